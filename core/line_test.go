package core_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
)

// queueUp lets n waiters ask for key, one after the other, and returns how each
// of them may be sent away. served gets the number of each that had the key.
func queueUp(t *testing.T, s *core.Strategy, key string, n int, served chan<- int) []context.CancelFunc {
	t.Helper()
	away := make([]context.CancelFunc, n)
	for i := range n {
		ctx, cancel := context.WithCancel(t.Context())
		away[i] = cancel
		go func() {
			err := s.Do(ctx, key, func(context.Context) error {
				served <- i
				return nil
			})
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("waiter %d: %v", i, err)
			}
		}()
		synctest.Wait()
	}
	return away
}

// Of those who wait in one process only one tries when the key becomes free:
// the others would try in vain, and hold up the one.
func TestOnlyTheFirstInLineHeedsASignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, _ := newNotifyingStore(t)
		signals := make([]chan struct{}, 0, 10)
		var mu sync.Mutex
		store.subscribe = func(context.Context, request) (<-chan struct{}, func(), error) {
			mu.Lock()
			defer mu.Unlock()
			c := make(chan struct{}, 1)
			signals = append(signals, c)
			return c, func() {}, nil
		}
		if g, err := store.real.Acquire(t.Context(), "key", "somebody", time.Hour); err != nil || !g.Acquired {
			t.Fatal(g, err)
		}
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
		served := make(chan int, 10)
		away := queueUp(t, s, "key", 10, served)

		before := len(store.seen("acquire"))
		for _, c := range signals {
			c <- struct{}{}
		}
		synctest.Wait()
		if got := len(store.seen("acquire")) - before; got != 1 {
			t.Errorf("a signal to ten waiters made %d tries, want 1", got)
		}
		for _, cancel := range away {
			cancel()
		}
	})
}

// A first in line whose subscription has failed would else be as slow as its
// polls, and with it everybody behind.
func TestFirstInLineThatHearsNothingIsCalledByTheOthers(t *testing.T) {
	for _, tt := range []struct {
		name string
		deaf func() (<-chan struct{}, func(), error)
	}{
		{"subscription failed", func() (<-chan struct{}, func(), error) { return nil, nil, errServer }},
		{"subscription ended", func() (<-chan struct{}, func(), error) {
			c := make(chan struct{})
			close(c)
			return c, func() {}, nil
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, subs := newNotifyingStore(t)
				subscribed := 0
				store.subscribe = func(context.Context, request) (<-chan struct{}, func(), error) {
					if subscribed++; subscribed == 1 {
						return tt.deaf()
					}
					return subs.subscribe()
				}
				if g, err := store.real.Acquire(t.Context(), "key", "somebody", time.Hour); err != nil || !g.Acquired {
					t.Fatal(g, err)
				}
				s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
				served := make(chan int, 2)
				queueUp(t, s, "key", 2, served)
				time.Sleep(5*time.Second + time.Millisecond) // between two polls, before it subscribes again
				begin := time.Now()
				if err := store.real.Release(t.Context(), "key", "somebody"); err != nil {
					t.Fatal(err)
				}
				subs.signals <- struct{}{}
				if first := <-served; first != 0 || time.Since(begin) != 0 {
					t.Errorf("waiter %d had the key after %v, want the first at once", first, time.Since(begin))
				}
				<-served
			})
		})
	}
}

// The signal may have been for the one who leaves.
func TestWhoLeavesTheLinePassesHisTurnOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newScriptedStore(t)
		lease, err := store.real.Acquire(t.Context(), "key", "somebody", time.Hour)
		if err != nil || !lease.Acquired {
			t.Fatal(lease, err)
		}
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
		served := make(chan int, 3)
		away := queueUp(t, s, "key", 3, served)
		if err := store.real.Release(t.Context(), "key", "somebody"); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		away[0]()
		if first := <-served; first != 1 || time.Since(begin) != 0 {
			t.Errorf("waiter %d had the key after %v, want the second at once", first, time.Since(begin))
		}
		<-served
	})
}

// A release by a neighbour needs no signal of the store.
func TestReleaseCallsTheNextInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStrategy(t, newScriptedStore(t), core.Options{Wait: core.WaitForever}) // no Notifier
		lease, err := s.Acquire(t.Context(), "key")
		if err != nil {
			t.Fatal(err)
		}
		const n = 8
		served := make(chan int, n)
		queueUp(t, s, "key", n, served)
		time.Sleep(10 * time.Millisecond) // between two polls
		begin := time.Now()
		if err := lease.Release(); err != nil {
			t.Fatal(err)
		}
		for want := range n {
			if got := <-served; got != want {
				t.Errorf("waiter %d was served, want %d: first come, first served", got, want)
			}
		}
		if d := time.Since(begin); d != 0 {
			t.Errorf("the hand-overs took %v, want no poll", d)
		}
	})
}

// MinHold keeps the key: there is nothing to call anybody for.
func TestKeptKeyCallsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newScriptedStore(t)
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever, MinHold: time.Minute})
		lease, err := s.Acquire(t.Context(), "key")
		if err != nil {
			t.Fatal(err)
		}
		away := queueUp(t, s, "key", 1, make(chan int, 1))
		tries := len(store.seen("acquire"))
		if err := lease.Release(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := len(store.seen("acquire")); got != tries {
			t.Errorf("%d tries after a release that kept the key, want none", got-tries)
		}
		away[0]()
	})
}

// Nobody starves: of 32 who want the key again and again, none watches many more
// hand-overs than there are others.
//
// In a bubble, in which nobody goes on while another could: a machine that stops
// one of them for a while would be taken for bad luck.
func TestUnluckiestWaiter(t *testing.T) { bubble(t, testUnluckiestWaiter) }

func testUnluckiestWaiter(t *testing.T) {
	s := newStrategy(t, newMemory(t), core.Options{Wait: core.WaitForever})
	const contenders, rounds = 32, 20
	var served []int
	var wg sync.WaitGroup
	for i := range contenders {
		wg.Go(func() {
			for range rounds {
				err := s.Do(t.Context(), "key", func(context.Context) error {
					served = append(served, i) // the lock guards it
					time.Sleep(50 * time.Microsecond)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	last := make([]int, contenders)
	unluckiest := 0
	for n, i := range served {
		unluckiest = max(unluckiest, n-last[i])
		last[i] = n
	}
	t.Logf("%d contenders, %d hand-overs: the unluckiest waited for %d", contenders, len(served), unluckiest)
	if limit := len(served) / 2; unluckiest > limit {
		t.Errorf("somebody waited for %d hand-overs, want at most %d", unluckiest, limit)
	}
}
