package redisstore_test

import (
	"testing"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	"github.com/leasekit/leasekit/stores/redis"
	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { testserver.Main(m) }

// open is a store on a client of its own, on the shared server.
func open(t testing.TB) core.LockStore {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: testserver.Redis(t).Addr})
	t.Cleanup(func() { _ = client.Close() })
	return newStore(t, client, redisstore.Options{})
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
