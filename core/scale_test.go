package core_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
)

const manyHolds = 10_000

// Not parallel: it counts the goroutines of the process.
func TestHoldCostsNoGoroutineWhileItSleeps(t *testing.T) {
	s := newStrategy(t, newMemory(t), core.Options{TTL: time.Hour})
	before := runtime.NumGoroutine()
	leases := make([]*core.Lease, manyHolds)
	for i := range leases {
		var err error
		if leases[i], err = s.Acquire(t.Context(), fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
		_ = leases[i].Context(context.Background()) // costs none either
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines for %d holds", after-before, manyHolds)
	}
	for _, lease := range leases {
		if err := lease.Release(); err != nil {
			t.Error(err)
		}
	}
	if n := goroutinesOf("leasekit/core.(*hold)"); n != 0 {
		t.Errorf("%d goroutines of holds that have ended", n)
	}
}

func TestManyHoldsRenewOnTime(t *testing.T) {
	ttls := time.Duration(3)
	if testing.Short() {
		ttls = 1
	}
	bubble(t, func(t *testing.T) {
		store := newMemory(t)
		var renewals atomic.Int32
		s := newStrategy(t, store, core.Options{Hooks: core.Hooks{
			Renewed:     func(context.Context, core.Event) { renewals.Add(1) },
			RenewFailed: func(_ context.Context, e core.Event) { t.Error(e.Err) },
			Lost:        func(_ context.Context, e core.Event) { t.Error(e.Err) },
		}})
		leases := make([]*core.Lease, manyHolds)
		for i := range leases {
			var err error
			if leases[i], err = s.Acquire(t.Context(), fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(ttls * ttl)
		synctest.Wait()
		if n, want := int(renewals.Load()), int(3*ttls*manyHolds); n < want {
			t.Errorf("%d renewals in %d ttls, want at least %d", n, ttls, want)
		}
		if n := store.Len(); n != manyHolds {
			t.Errorf("%d leases live, want %d", n, manyHolds)
		}
		for _, lease := range leases {
			if err := lease.Release(); err != nil {
				t.Error(err)
			}
		}
		if n := store.Len(); n != 0 {
			t.Errorf("%d leases live after the release", n)
		}
	})
}

// racyStore lets others run between the strategy and the memory store.
type racyStore struct{ core.LockStore }

func (s racyStore) Renew(_ context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if rand.N(2) == 0 {
		time.Sleep(rand.N(time.Millisecond))
	}
	return s.LockStore.Renew(context.Background(), key, owner, ttl) // the cancel comes too late
}

// A heartbeat in flight once revived a lock that had just been released. Leases
// are so short here that renewals and releases meet all the time; after each
// round the key must be free.
func TestRenewalInFlightNeverRevivesAReleasedLease(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	store := newMemory(t)
	var renewals atomic.Int32
	// On a busy machine a grant may come after its own 3 ms: try again then.
	s := newStrategy(t, racyStore{store}, core.Options{TTL: 3 * time.Millisecond, Wait: core.WaitForever, Hooks: core.Hooks{
		Renewed: func(context.Context, core.Event) { renewals.Add(1) },
	}})
	const workers = 10
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			key := fmt.Sprint(w)
			for range rounds / workers {
				if err := s.Do(context.Background(), key, func(context.Context) error {
					time.Sleep(rand.N(3 * time.Millisecond)) // a loss on a busy machine is none of the callback's concern
					return nil
				}); err != nil {
					t.Error(err)
				}
				wantFree(t, store, key)
			}
		})
	}
	wg.Wait()
	time.Sleep(5 * time.Millisecond) // renewals that are late at all are over
	for w := range workers {
		wantFree(t, store, fmt.Sprint(w))
	}
	if renewals.Load() == 0 {
		t.Error("no renewal was confirmed: the race was not run")
	}
}

// Mutual exclusion as anybody understands it: a plain variable, and the race
// detector.
func TestCallbacksOfAKeyNeverOverlap(t *testing.T) {
	t.Parallel()
	s := newStrategy(t, newMemory(t), core.Options{Wait: core.WaitForever})
	counter, last := 0, int64(0)
	var wg sync.WaitGroup
	const workers, rounds = 16, 25
	for range workers {
		wg.Go(func() {
			for range rounds {
				err := s.Do(context.Background(), "key", func(ctx context.Context) error {
					n := counter
					runtime.Gosched()
					counter = n + 1
					token, _ := core.TokenFor(ctx, "key")
					if token <= last {
						t.Errorf("token %d after %d", token, last)
					}
					last = token
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if counter != workers*rounds {
		t.Errorf("counted to %d, want %d", counter, workers*rounds)
	}
}

// Callers come, wait, are cancelled, lose and panic, all on a few keys: in the
// end nothing is left of them.
func TestNothingIsLeftAfterATumult(t *testing.T) {
	for name, wrap := range map[string]func(core.LockStore) core.LockStore{
		"with signals": func(s core.LockStore) core.LockStore { return s },
		"polling":      func(s core.LockStore) core.LockStore { return secret{s} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := newMemory(t)
				s := newStrategy(t, wrap(store), core.Options{TTL: time.Second, Wait: 20 * time.Second, MaxHold: 3 * time.Second})
				var holders [5]atomic.Int32
				var wg sync.WaitGroup
				for i := range 500 {
					wg.Go(func() {
						defer func() { _ = recover() }()
						time.Sleep(rand.N(20 * time.Second))
						ctx, cancel := context.WithTimeout(context.Background(), rand.N(30*time.Second))
						defer cancel()
						key := i % len(holders)
						_ = s.Do(ctx, fmt.Sprint(key), func(ctx context.Context) error {
							if n := holders[key].Add(1); n != 1 {
								t.Errorf("%d holders of %d", n, key)
							}
							defer holders[key].Add(-1)
							switch rand.N(4) {
							case 0:
								panic("boo")
							case 1:
								runtime.Goexit()
							case 2:
								<-ctx.Done()
							}
							time.Sleep(rand.N(200 * time.Millisecond))
							return ctx.Err()
						})
					})
				}
				wg.Wait()
				if n := store.Len(); n != 0 {
					t.Errorf("%d leases are left", n)
				}
				if n := core.LinesOf(s); n != 0 {
					t.Errorf("lines for %d keys are left", n)
				}
			})
		})
	}
}
