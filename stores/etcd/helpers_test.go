package etcdstore_test

import (
	"context"
	"crypto/rand"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

func TestMain(m *testing.M) { testserver.Main(m) }

// connect returns a client of the server at url.
func connect(t testing.TB, url string, opts ...grpc.DialOption) *clientv3.Client {
	t.Helper()
	return connectWith(t, clientv3.Config{Endpoints: []string{url}, DialOptions: opts})
}

func connectAs(t testing.TB, url, user, password string) *clientv3.Client {
	t.Helper()
	return connectWith(t, clientv3.Config{Endpoints: []string{url}, Username: user, Password: password})
}

func connectWith(t testing.TB, config clientv3.Config) *clientv3.Client {
	t.Helper()
	config.Logger = zap.NewNop() // servers are stopped on purpose
	config.DialTimeout = 10 * time.Second
	client, err := clientv3.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func open(t testing.TB, client *clientv3.Client, o etcdstore.Options) *etcdstore.Store {
	t.Helper()
	store, err := etcdstore.New(client, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return store
}

// openPatient is open for tests that count requests: a server that is slow gets
// none of them twice.
func openPatient(t testing.TB, client *clientv3.Client, o etcdstore.Options) *etcdstore.Store {
	t.Helper()
	store := open(t, client, o)
	etcdstore.Wait(store)
	return store
}

// enableAuth switches authentication on, with the users root, who may do
// everything, locker, who may use the default prefix, and nobody, whose
// passwords are "secret". It returns what switches it off again.
func enableAuth(t testing.TB, url string) (disable func()) {
	t.Helper()
	client := connect(t, url)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := client.RoleAdd(ctx, "root")
	must(err)
	_, err = client.RoleAdd(ctx, "locker")
	must(err)
	_, err = client.RoleGrantPermission(ctx, "locker", etcdstore.DefaultPrefix,
		clientv3.GetPrefixRangeEnd(etcdstore.DefaultPrefix), clientv3.PermissionType(clientv3.PermReadWrite))
	must(err)
	for _, user := range []string{"root", "locker", "nobody"} {
		_, err = client.UserAdd(ctx, user, "secret")
		must(err)
		if user != "nobody" {
			_, err = client.UserGrantRole(ctx, user, user)
			must(err)
		}
	}
	_, err = client.AuthEnable(ctx)
	must(err)
	return func() {
		root := connectAs(t, url, "root", "secret")
		ctx := context.Background()
		_, err := root.AuthDisable(ctx)
		must(err)
		for _, user := range []string{"root", "locker", "nobody"} {
			_, err = client.UserDelete(ctx, user)
			must(err)
		}
		for _, role := range []string{"root", "locker"} {
			_, err = client.RoleDelete(ctx, role)
			must(err)
		}
	}
}

// random returns a name that no other test uses.
func random(prefix string) string { return prefix + rand.Text() }

// acquire gets a key that must be free.
func acquire(t testing.TB, store core.LockStore, key, owner string, ttl time.Duration) core.Grant {
	t.Helper()
	g, err := store.Acquire(t.Context(), key, owner, ttl)
	if err != nil || !g.Acquired {
		t.Fatalf("Acquire = %+v, %v; want acquired", g, err)
	}
	return g
}

// acquireUnknown tries to acquire a key over a wire that brings no answer: the
// outcome is not known.
func acquireUnknown(t testing.TB, w *wire, store *etcdstore.Store, key, owner string) {
	t.Helper()
	w.giveUp(t, func(ctx context.Context) error {
		_, err := store.Acquire(ctx, key, owner, time.Minute)
		return err
	})
}
