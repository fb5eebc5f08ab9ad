package etcdstore_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

// BenchmarkAcquireRelease does a pair of raw writes without a lease, and then
// an acquisition and its release, on the same client, in turn. "ratio" is what
// the lock costs compared with them.
func BenchmarkAcquireRelease(b *testing.B) {
	client := connect(b, testserver.Etcd(b).URL)
	store := open(b, client, etcdstore.Options{})
	key, name := random("bench-"), random("raw-")
	ctx := b.Context()
	raw := func() {
		_, err := client.Txn(ctx).
			If(clientv3.Compare(clientv3.CreateRevision(name), "=", 0)).
			Then(clientv3.OpPut(name, "owner")).
			Else(clientv3.OpGet(name)).Commit()
		if err == nil {
			_, err = client.Delete(ctx, name)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	lock := func() {
		acquire(b, store, key, "owner", 30*time.Second)
		if err := store.Release(ctx, key, "owner"); err != nil {
			b.Fatal(err)
		}
	}
	compare(b, raw, lock)
}

// BenchmarkHeldTry does a raw read and then a try on a held key, in turn.
func BenchmarkHeldTry(b *testing.B) {
	client := connect(b, testserver.Etcd(b).URL)
	store := open(b, client, etcdstore.Options{})
	key, ctx := random("bench-"), b.Context()
	acquire(b, store, key, "holder", time.Hour)
	raw := func() {
		if _, err := client.Get(ctx, etcdstore.DefaultPrefix+key); err != nil {
			b.Fatal(err)
		}
	}
	try := func() {
		if g, err := store.Acquire(ctx, key, "waiter", time.Hour); err != nil || g.Acquired {
			b.Fatal(g, err)
		}
	}
	compare(b, raw, try)
	if err := store.Release(ctx, key, "holder"); err != nil {
		b.Fatal(err)
	}
}

// compare runs two functions in turn, so that a noisy machine disturbs both, and
// reports the median of each.
func compare(b *testing.B, raw, ours func()) {
	for range 20 {
		raw()
		ours()
	}
	var rawTimes, ourTimes []time.Duration
	for b.Loop() {
		start := time.Now()
		raw()
		middle := time.Now()
		ours()
		rawTimes = append(rawTimes, middle.Sub(start))
		ourTimes = append(ourTimes, time.Since(middle))
	}
	median := func(times []time.Duration) float64 {
		slices.Sort(times)
		return float64(times[len(times)/2]) / float64(time.Microsecond)
	}
	b.ReportMetric(median(rawTimes), "raw-µs")
	b.ReportMetric(median(ourTimes), "lock-µs")
	b.ReportMetric(median(ourTimes)/median(rawTimes), "ratio")
}

// BenchmarkAllocations counts the allocations of the pair alone.
func BenchmarkAllocations(b *testing.B) {
	client := connect(b, testserver.Etcd(b).URL)
	store := open(b, client, etcdstore.Options{})
	key, name, ctx := random("bench-"), random("raw-"), b.Context()
	b.Run("of=lock", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			acquire(b, store, key, "owner", 30*time.Second)
			_ = store.Release(ctx, key, "owner")
		}
	})
	b.Run("of=raw", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = client.Txn(ctx).
				If(clientv3.Compare(clientv3.CreateRevision(name), "=", 0)).
				Then(clientv3.OpPut(name, "owner")).
				Else(clientv3.OpGet(name)).Commit()
			_, _ = client.Delete(ctx, name)
		}
	})
}

// BenchmarkRenew renews 1,000 leases at once.
func BenchmarkRenew(b *testing.B) {
	const leases = 1000
	store := open(b, connect(b, testserver.Etcd(b).URL), etcdstore.Options{})
	prefix := random("bench-")
	each := func(f func(key string) error) {
		var wg sync.WaitGroup
		for i := range leases {
			wg.Go(func() {
				if err := f(prefix + fmt.Sprint(i)); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
	}
	each(func(key string) error {
		_, err := store.Acquire(b.Context(), key, "owner", time.Minute)
		return err
	})
	for b.Loop() {
		each(func(key string) error {
			if renewed, err := store.Renew(b.Context(), key, "owner", time.Minute); !renewed {
				return fmt.Errorf("not renewed: %w", err)
			}
			return nil
		})
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*leases), "µs/lease")
	each(func(key string) error { return store.Release(context.Background(), key, "owner") })
}

// BenchmarkHandOver measures the time from the call of Release to when the next
// one has the key. Every contender has a client of its own, but for the last
// kind, where all share one store.
func BenchmarkHandOver(b *testing.B) {
	url := testserver.Etcd(b).URL
	for _, n := range []int{2, 16, 32} {
		b.Run(fmt.Sprintf("contenders=%d/by=leasekit", n), func(b *testing.B) {
			strategies := make([]*core.Strategy, n)
			for i := range strategies {
				strategies[i] = strategy(b, open(b, connect(b, url), etcdstore.Options{}))
			}
			handOvers(b, n, locksWith(strategies))
		})
		b.Run(fmt.Sprintf("contenders=%d/by=concurrency.Mutex", n), func(b *testing.B) {
			key := random("mutex-")
			mutexes := make([]*concurrency.Mutex, n)
			for i := range mutexes {
				session, err := concurrency.NewSession(connect(b, url))
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { _ = session.Close() })
				mutexes[i] = concurrency.NewMutex(session, key)
			}
			handOvers(b, n, func(ctx context.Context, i int) (func() error, error) {
				if err := mutexes[i].Lock(ctx); err != nil {
					return nil, err
				}
				return func() error { return mutexes[i].Unlock(context.WithoutCancel(ctx)) }, nil
			})
		})
		b.Run(fmt.Sprintf("contenders=%d/by=leasekit-one-store", n), func(b *testing.B) {
			one := strategy(b, open(b, connect(b, url), etcdstore.Options{}))
			handOvers(b, n, locksWith(slices.Repeat([]*core.Strategy{one}, n)))
		})
	}
}

func strategy(t testing.TB, store core.LockStore) *core.Strategy {
	t.Helper()
	s, err := core.NewStrategy(store, core.Options{Wait: core.WaitForever})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// locksWith makes contender i lock one key with the strategy i.
func locksWith(strategies []*core.Strategy) func(context.Context, int) (func() error, error) {
	key := random("hand-over-")
	return func(ctx context.Context, i int) (func() error, error) {
		lease, err := strategies[i].Acquire(ctx, key)
		if err != nil {
			return nil, err
		}
		return lease.Release, nil
	}
}

// handOvers makes n contenders take the lock in turn, b.N times in all. Each
// holds it for 2 ms. Those that lag behind are waiting by then.
func handOvers(b *testing.B, n int, lock func(ctx context.Context, i int) (unlock func() error, err error)) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	var (
		mu       sync.Mutex
		released time.Time // when Release was called; guarded by the lock under test
		times    []time.Duration
		last     = make([]int, n) // the hand-over that gave the lock to i
		longest  int              // wait of any, in hand-overs
		done     atomic.Bool
	)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for !done.Load() {
				unlock, err := lock(ctx, i)
				if err != nil {
					if ctx.Err() == nil {
						b.Error(err)
					}
					return
				}
				mu.Lock()
				if !released.IsZero() {
					times = append(times, time.Since(released))
				}
				longest = max(longest, len(times)-last[i])
				last[i] = len(times)
				if len(times) > b.N {
					done.Store(true)
					cancel()
				}
				mu.Unlock()
				time.Sleep(2 * time.Millisecond)
				mu.Lock()
				released = time.Now()
				mu.Unlock()
				if err := unlock(); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	slices.Sort(times)
	for _, q := range []struct {
		name string
		at   float64
	}{{"p50-µs", 0.5}, {"p99-µs", 0.99}, {"max-µs", 1}} {
		i := min(int(q.at*float64(len(times))), len(times)-1)
		b.ReportMetric(float64(times[i].Microseconds()), q.name)
	}
	b.ReportMetric(float64(longest), "longest-wait")
}
