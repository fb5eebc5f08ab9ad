package redisstore_test

import (
	"crypto/rand"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

func TestMain(m *testing.M) { testserver.Main(m) }

// connect returns a client of the server at addr with the default options, which
// change may change.
func connect(t testing.TB, addr string, change func(*redis.Options)) *redis.Client {
	t.Helper()
	o := &redis.Options{Addr: addr}
	if change != nil {
		change(o)
	}
	client := redis.NewClient(o)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func newStore(t testing.TB, client redis.UniversalClient, o redisstore.Options) *redisstore.Store {
	t.Helper()
	store, err := redisstore.New(client, o)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return store
}

// open is a store on a client of its own, on the shared server.
func open(t testing.TB) core.LockStore {
	t.Helper()
	return newStore(t, connect(t, testserver.Redis(t).Addr, nil), redisstore.Options{})
}

func random(prefix string) string { return prefix + rand.Text() }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
