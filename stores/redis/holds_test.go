package redisstore_test

import (
	"context"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// TestManyHolds keeps many leases alive in one process: none is lost, and a hold
// costs no goroutine. With $LEASEKIT_TEST_LONG set: 10,000 holds for 10 ttls.
func TestManyHolds(t *testing.T) {
	// Long enough that a busy machine, with the race detector, does not stop for
	// two thirds of it; shorter ones are for the conformance suite, which knows
	// when it was the machine.
	holds, ttl, ttls := 500, 6*time.Second, 2
	if os.Getenv("LEASEKIT_TEST_LONG") != "" {
		holds, ttl, ttls = 10_000, 10*time.Second, 10
	} else {
		t.Parallel() // it mostly waits
	}
	server := testserver.StartRedis(t)
	client := connect(t, server.Addr, func(o *redis.Options) { o.PoolSize = 32 })
	store := newStore(t, client, redisstore.Options{})
	var lost, renewed, failed atomic.Int64
	count := func(n *atomic.Int64) func(context.Context, core.Event) {
		return func(context.Context, core.Event) { n.Add(1) }
	}
	strategy, err := core.NewStrategy(store, core.Options{
		TTL: ttl,
		Hooks: core.Hooks{
			Lost:        count(&lost),
			Renewed:     count(&renewed),
			RenewFailed: count(&failed),
		},
		Logger: quiet,
	})
	must(t, err)
	memory := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	goroutines, before := runtime.NumGoroutine(), memory()

	leases := make([]*core.Lease, holds)
	each := func(f func(i int)) {
		var wg sync.WaitGroup
		for w := range 32 {
			wg.Go(func() {
				for i := w; i < holds; i += 32 {
					f(i)
				}
			})
		}
		wg.Wait()
	}
	began := time.Now()
	each(func(i int) {
		lease, err := strategy.Acquire(context.Background(), random("many-"))
		if err != nil {
			t.Errorf("Acquire: %v", err)
			return
		}
		leases[i] = lease
	})
	if t.Failed() {
		t.FailNow()
	}
	t.Logf("%d acquired in %v", holds, time.Since(began).Round(time.Millisecond))

	least := int(^uint(0) >> 1)
	for end := time.Now().Add(time.Duration(ttls) * ttl); time.Now().Before(end); time.Sleep(ttl / 10) {
		least = min(least, runtime.NumGoroutine())
	}
	t.Logf("%d goroutines and %d bytes a hold", least-goroutines, int64(memory()-before)/int64(holds))
	for _, lease := range leases {
		if err := lease.Err(); err != nil {
			t.Errorf("lease: %v", err)
		}
	}
	each(func(i int) { _ = leases[i].Release() })
	t.Logf("%d renewals, %d failed, %d lost", renewed.Load(), failed.Load(), lost.Load())
	if n := lost.Load(); n != 0 {
		t.Errorf("%d of %d leases lost", n, holds)
	}
	if n := renewed.Load(); n < int64(holds*ttls) {
		t.Errorf("%d renewals of %d leases in %d ttls: too few", n, holds, ttls)
	}
	// The client's connections and the renewals under way, not the holds; and
	// those of tests beside this one.
	if n := least - goroutines; n > holds/2 {
		t.Errorf("%d goroutines for %d holds", n, holds)
	}
}
