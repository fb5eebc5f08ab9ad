package integration

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/testcontainers/testcontainers-go"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/zap"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver/images"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// start starts a container and returns host:port of its server, which need not
// answer yet: see untilAnswered. The test is skipped unless LEASEKIT_CONTAINERS
// is set: pulling images is nobody's wish who just runs all tests.
//
//	make containers                                           # images made here
//	LEASEKIT_CONTAINERS=1 go test ./integration -run Container  # pulled ones
func start(t *testing.T, image images.Image) string {
	t.Helper()
	if os.Getenv("LEASEKIT_CONTAINERS") == "" {
		t.Skip("needs Docker and images: run make containers, or set LEASEKIT_CONTAINERS=1 to have them pulled")
	}
	port := image.Port + "/tcp"
	req := testcontainers.ContainerRequest{
		Image: image.Name(), Env: image.Env, Cmd: image.Cmd, ExposedPorts: []string{port},
	}
	c, err := testcontainers.GenericContainer(t.Context(), testcontainers.GenericContainerRequest{ContainerRequest: req, Started: true})
	t.Cleanup(func() {
		// What the clearing up meets is no verdict on the store.
		if err := testcontainers.TerminateContainer(c); err != nil {
			t.Log(err)
		}
	})
	if err != nil {
		t.Fatalf("%s: %v", image.Name(), err)
	}
	addr, err := c.PortEndpoint(t.Context(), port, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s at %s", image.Name(), addr)
	return addr
}

// untilAnswered asks a server until it answers. That its port can be connected to
// says nothing: Docker's proxy takes connections before the server does, and
// hangs up. One answer is enough, because the image's server then stays: none of
// them listens on the network before it is set up.
func untilAnswered(t *testing.T, ask func(ctx context.Context) error) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		err := ask(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func TestRedisContainer(t *testing.T) {
	addr := start(t, images.Redis)
	client, _ := redisAt(t, addr)
	untilAnswered(t, func(ctx context.Context) error { return client.Ping(ctx).Err() })
	conformance.Run(t, conformance.Config{Open: func(t testing.TB) core.LockStore {
		client, _ := redisAt(t, addr)
		return redisStore(t, client)
	}})
}

func TestEtcdContainer(t *testing.T) {
	addr := start(t, images.Etcd)
	connect := func(t testing.TB) *clientv3.Client {
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
		check(t, err)
		t.Cleanup(func() { client.Close() })
		return client
	}
	client := connect(t)
	untilAnswered(t, func(ctx context.Context) error {
		_, err := client.Get(ctx, "any") // linearizable: there is a leader
		return err
	})
	conformance.Run(t, conformance.Config{
		TTL: 2 * time.Second, Slack: 4 * time.Second, // as in stores/etcd
		Open: func(t testing.TB) core.LockStore {
			store, err := etcdstore.New(connect(t), etcdstore.Options{})
			check(t, err)
			t.Cleanup(func() { store.Close() })
			return store
		},
	})
}

func TestPostgresContainer(t *testing.T) {
	addr := start(t, images.Postgres)
	at := new(current)
	at.set(addr)
	pool := postgresPool(t, at)
	untilAnswered(t, func(ctx context.Context) error { return pgstore.Migrate(ctx, pool, pgstore.Options{}) })
	conformance.Run(t, conformance.Config{Open: func(t testing.TB) core.LockStore {
		return postgresStore(t, postgresPool(t, at))
	}})
}

func TestMongoContainer(t *testing.T) {
	replica := images.Mongo
	replica.Cmd = append(slices.Clone(replica.Cmd), "--replSet", "rs0")
	addr := start(t, replica)
	leases := mongoLeases(t, addr)
	client := leases.Database().Client()
	untilAnswered(t, func(ctx context.Context) error { return client.Ping(ctx, nil) })
	// A mongod that was started with --replSet waits for this; the stand-in
	// says that there is nothing to do.
	initiate := bson.D{{Key: "replSetInitiate", Value: bson.D{
		{Key: "_id", Value: "rs0"},
		{Key: "members", Value: bson.A{bson.D{{Key: "_id", Value: 0}, {Key: "host", Value: "127.0.0.1:27017"}}}},
	}}}
	if err := client.Database("admin").RunCommand(t.Context(), initiate).Err(); err != nil {
		t.Logf("replSetInitiate: %v", err)
	}
	untilAnswered(t, func(ctx context.Context) error { // as its primary
		return mongostore.EnsureIndexes(ctx, leases)
	})
	conformance.Run(t, conformance.Config{Open: func(t testing.TB) core.LockStore {
		return mongoStore(t, mongoLeases(t, addr))
	}})
}
