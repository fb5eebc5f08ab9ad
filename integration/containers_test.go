package integration

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/zap"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver/images"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

const startUp = 2 * time.Minute

// start starts a container and returns host:port of its server. It is skipped
// unless LEASEKIT_CONTAINERS is set: pulling images is nobody's wish who just
// runs all tests.
//
//	make containers                                           # images made here
//	LEASEKIT_CONTAINERS=1 go test ./integration -run Container  # pulled ones
func start(t *testing.T, image images.Image, ready wait.Strategy) string {
	t.Helper()
	if os.Getenv("LEASEKIT_CONTAINERS") == "" {
		t.Skip("needs Docker and images: run make containers, or set LEASEKIT_CONTAINERS=1 to have them pulled")
	}
	port := image.Port + "/tcp"
	req := testcontainers.ContainerRequest{
		Image: image.Name(), Env: image.Env, Cmd: image.Cmd,
		ExposedPorts: []string{port}, WaitingFor: ready,
	}
	c, err := testcontainers.GenericContainer(t.Context(), testcontainers.GenericContainerRequest{ContainerRequest: req, Started: true})
	testcontainers.CleanupContainer(t, c)
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

// listens waits until the image's server can be connected to.
func listens(image images.Image) wait.Strategy {
	return wait.ForListeningPort(image.Port + "/tcp").SkipInternalCheck().WithStartupTimeout(startUp)
}

func must[T any](t testing.TB, value T, err error) T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestRedisContainer(t *testing.T) {
	addr := start(t, images.Redis, listens(images.Redis))
	conformance.Run(t, conformance.Config{Open: func(t testing.TB) core.LockStore {
		client := redis.NewClient(&redis.Options{Addr: addr})
		t.Cleanup(func() { client.Close() })
		store, err := redisstore.New(client, redisstore.Options{})
		must(t, store, err)
		t.Cleanup(func() { store.Close() })
		return store
	}})
}

func TestEtcdContainer(t *testing.T) {
	addr := start(t, images.Etcd, wait.ForHTTP("/health").WithPort("2379/tcp").WithStartupTimeout(startUp))
	conformance.Run(t, conformance.Config{
		TTL: 2 * time.Second, Slack: 4 * time.Second, // as in stores/etcd
		Open: func(t testing.TB) core.LockStore {
			client, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
			must(t, client, err)
			t.Cleanup(func() { client.Close() })
			store, err := etcdstore.New(client, etcdstore.Options{})
			must(t, store, err)
			t.Cleanup(func() { store.Close() })
			return store
		},
	})
}

func TestPostgresContainer(t *testing.T) {
	addr := start(t, images.Postgres, wait.ForAll(
		wait.ForLog("database system is ready to accept connections").WithStartupTimeout(startUp),
		listens(images.Postgres)))
	connect := func(t testing.TB) *pgxpool.Pool {
		pool, err := pgxpool.New(context.Background(), "postgres://postgres@"+addr+"/postgres?sslmode=disable")
		must(t, pool, err)
		t.Cleanup(pool.Close)
		return pool
	}
	// The official image restarts its server once: try until it stays.
	pool := connect(t)
	for end := time.Now().Add(startUp); ; time.Sleep(200 * time.Millisecond) {
		err := pgstore.Migrate(t.Context(), pool, pgstore.Options{})
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	conformance.Run(t, conformance.Config{Open: func(t testing.TB) core.LockStore {
		store, err := pgstore.New(connect(t), pgstore.Options{})
		must(t, store, err)
		t.Cleanup(func() { store.Close() })
		return store
	}})
}

func TestMongoContainer(t *testing.T) {
	replica := images.Mongo
	replica.Cmd = append(slices.Clone(replica.Cmd), "--replSet", "rs0")
	addr := start(t, replica, listens(replica))
	connect := func(t testing.TB) *mongo.Client {
		client, err := mongo.Connect(options.Client().ApplyURI("mongodb://" + addr + "/?directConnection=true"))
		must(t, client, err)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = client.Disconnect(ctx)
		})
		return client
	}
	client := connect(t)
	// A mongod that was started with --replSet waits for this; the stand-in,
	// and one that was initiated before, say that there is nothing to do.
	initiate := bson.D{{Key: "replSetInitiate", Value: bson.D{
		{Key: "_id", Value: "rs0"},
		{Key: "members", Value: bson.A{bson.D{{Key: "_id", Value: 0}, {Key: "host", Value: "127.0.0.1:27017"}}}},
	}}}
	if err := client.Database("admin").RunCommand(t.Context(), initiate).Err(); err != nil {
		t.Logf("replSetInitiate: %v", err)
	}
	for end := time.Now().Add(startUp); ; time.Sleep(200 * time.Millisecond) {
		err := mongostore.EnsureIndexes(t.Context(), client.Database("leasekit").Collection("leases"))
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	conformance.Run(t, conformance.Config{Open: func(t testing.TB) core.LockStore {
		store, err := mongostore.New(connect(t).Database("leasekit").Collection("leases"), mongostore.Options{})
		must(t, store, err)
		t.Cleanup(func() { store.Close() })
		return store
	}})
}
