package core_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testlog"
)

// subscriptions are channels that a test feeds, and a count of what was stopped.
type subscriptions struct {
	signals          chan struct{}
	started, stopped atomic.Int32
}

func (s *subscriptions) subscribe() (<-chan struct{}, func(), error) {
	s.started.Add(1)
	return s.signals, func() { s.stopped.Add(1) }, nil
}

func (s *subscriptions) wantStopped(t testing.TB) {
	t.Helper()
	if started, stopped := s.started.Load(), s.stopped.Load(); started == 0 || started != stopped {
		t.Errorf("%d subscriptions, %d stopped", started, stopped)
	}
}

func newNotifyingStore(t testing.TB) (*notifyingStore, *subscriptions) {
	subs := &subscriptions{signals: make(chan struct{}, 1)}
	store := &notifyingStore{scriptedStore: newScriptedStore(t)}
	store.subscribe = func(context.Context, request) (<-chan struct{}, func(), error) { return subs.subscribe() }
	return store, subs
}

func TestSignalWakesTheWaiter(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, subs := newNotifyingStore(t)
		free := occupy(t, store.real, "key", time.Hour)
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
		time.AfterFunc(12345*ms, func() {
			free()
			subs.signals <- struct{}{}
		})
		start := time.Now()
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(start); waited != 12345*ms {
			t.Errorf("got the key after %v, want the moment of the signal", waited)
		}
		subs.wantStopped(t)
		if got := store.seen("subscribe")[0].bound; got == 0 {
			t.Error("Subscribe has no deadline")
		}
	})
}

// Whoever does not have to wait does not pay for a subscription, and who waits
// has one for all his tries.
func TestSubscribesOnceAfterTheFirstFailedTry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, subs := newNotifyingStore(t)
		s := newStrategy(t, store, core.Options{Wait: 10 * time.Second})
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
		occupy(t, store.real, "key", time.Hour)
		if _, err := s.TryDo(t.Context(), "key", mustNotRun(t)); err != nil {
			t.Fatal(err)
		}
		if n := subs.started.Load(); n != 0 {
			t.Errorf("%d subscriptions without waiting", n)
		}
		if err := s.Do(t.Context(), "key", mustNotRun(t)); !core.IsRejection(err) {
			t.Fatalf("got %v, want a rejection", err)
		}
		if n := subs.started.Load(); n != 1 {
			t.Errorf("%d subscriptions for one waiter", n)
		}
		subs.wantStopped(t)
	})
}

// The key becomes free between the failed try and the subscription. No signal
// comes for that.
func TestTriesAgainAtOnceWhenTheSubscriptionStands(t *testing.T) {
	for _, slow := range []time.Duration{0, 20 * ms, 3 * time.Second} {
		t.Run(slow.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, subs := newNotifyingStore(t)
				free := occupy(t, store.real, "key", time.Hour)
				store.subscribe = func(context.Context, request) (<-chan struct{}, func(), error) {
					time.Sleep(slow)
					free()
					return subs.subscribe()
				}
				s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
				start := time.Now()
				if err := s.Do(t.Context(), "key", nothing); err != nil {
					t.Fatal(err)
				}
				if waited := time.Since(start); waited != slow {
					t.Errorf("got the key after %v, want %v", waited, slow)
				}
				subs.wantStopped(t)
			})
		})
	}
}

// The try that follows the subscription is none of the schedule's.
func TestSubscriptionDoesNotSlowThePolls(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, _ := newNotifyingStore(t)
		occupy(t, store.real, "key", time.Hour)
		s := newStrategy(t, store, core.Options{Wait: time.Second})
		if err := s.Do(t.Context(), "key", mustNotRun(t)); !core.IsRejection(err) {
			t.Fatalf("got %v, want a rejection", err)
		}
		if got, want := fmt.Sprint(store.times("acquire")), "[0s 0s 50ms 150ms 350ms 750ms 1s]"; got != want {
			t.Errorf("tries at %v, want %v", got, want)
		}
	})
}

func TestLostSignalCostsAtMostOnePoll(t *testing.T) {
	for _, after := range []time.Duration{1, 60 * ms, 5 * time.Second, 5001 * ms, 7777 * ms} {
		t.Run(after.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, subs := newNotifyingStore(t)
				free := occupy(t, store.real, "key", time.Hour)
				s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
				time.AfterFunc(after, free)
				start := time.Now()
				if err := s.Do(t.Context(), "key", nothing); err != nil {
					t.Fatal(err)
				}
				if late := time.Since(start) - after; late > time.Second {
					t.Errorf("%v late, want at most one poll", late)
				}
				subs.wantStopped(t)
			})
		})
	}
}

// Nor does a signal push the next poll away for more than that.
func TestSpuriousSignalsCostTriesOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, subs := newNotifyingStore(t)
		free := occupy(t, store.real, "key", time.Hour)
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
		for i := range 20 {
			time.AfterFunc(time.Duration(i)*130*ms, func() { subs.signals <- struct{}{} })
		}
		time.AfterFunc(10100*ms, free) // unnoticed
		start := time.Now()
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
		if late := time.Since(start) - 10100*ms; late > time.Second {
			t.Errorf("%v late, want at most one poll", late)
		}
		subs.wantStopped(t)
	})
}

func TestClosedChannelMeansPollOnly(t *testing.T) {
	for _, when := range []time.Duration{0, time.Second} {
		t.Run(when.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, subs := newNotifyingStore(t)
				occupy(t, store.real, "key", time.Hour)
				s := newStrategy(t, store, core.Options{Wait: 5 * time.Second})
				time.AfterFunc(when, func() { close(subs.signals) })
				if err := s.Do(t.Context(), "key", mustNotRun(t)); !core.IsRejection(err) {
					t.Fatalf("got %v, want a rejection", err)
				}
				if got, want := fmt.Sprint(store.times("acquire")), "[0s 0s 50ms 150ms 350ms 750ms 1.55s 2.55s 3.55s 4.55s 5s]"; got != want {
					t.Errorf("tries at %v, want %v", got, want)
				}
				subs.wantStopped(t)
			})
		})
	}
}

// A subscription that cannot be had is a line in the log, once, and no delay.
func TestSubscriptionThatFails(t *testing.T) {
	for _, tt := range []struct {
		name      string
		subscribe func(context.Context) error
	}{
		{"at once", func(context.Context) error { return errServer }},
		{"in between", func(context.Context) error { time.Sleep(300 * ms); return errServer }},
		{"by hanging", hang},
		{"by hanging, and deaf", func(context.Context) error { deaf(10 * time.Minute); return errServer }},
		{"by hanging, deaf, and with success at last", func(context.Context) error { deaf(10 * time.Minute); return nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, subs := newNotifyingStore(t)
				store.subscribe = func(ctx context.Context, _ request) (<-chan struct{}, func(), error) {
					if err := tt.subscribe(ctx); err != nil {
						return nil, nil, err
					}
					return subs.subscribe()
				}
				rec, log := newRecorder(), &testlog.Book{}
				free := occupy(t, store.real, "key", time.Hour)
				s := newStrategy(t, store, core.Options{Wait: core.WaitForever, Name: "billing", Hooks: rec.hooks(nil), Logger: log.Logger()})
				time.AfterFunc(20*time.Second, free)
				start := time.Now()
				if err := s.Do(t.Context(), "key", nothing); err != nil {
					t.Fatal(err)
				}
				if waited := time.Since(start); waited > 21*time.Second {
					t.Errorf("got the key after %v, want a poll after 20s", waited)
				}
				if got, want := fmt.Sprint(store.times("acquire")[:6]), "[0s 50ms 150ms 350ms 750ms 1.55s]"; got != want {
					t.Errorf("tries at %v, want %v", got, want)
				}
				if got, want := rec.names(), "Waiting Acquired Released"; got != want {
					t.Errorf("hooks %s, want %s", got, want)
				}
				lines := log.Lines()
				time.Sleep(time.Hour)
				if started, stopped := subs.started.Load(), subs.stopped.Load(); started != stopped {
					t.Errorf("%d subscriptions, %d stopped", started, stopped)
				}
				if len(lines) != 1 || len(log.Lines()) != 1 || !strings.Contains(lines[0], "level=INFO") || !strings.Contains(lines[0], "lock=billing") || !strings.Contains(lines[0], "key=key") || !strings.Contains(lines[0], "error=") {
					t.Errorf("logged %q, want one line", lines)
				}
			})
		})
	}
}

// A waiter that came while the server was away is woken by the release all the
// same, hours later. A call that ignores its context is not repeated: it would
// leave a goroutine each time.
func TestFailedSubscriptionIsTriedAgain(t *testing.T) {
	for _, tt := range []struct {
		name      string
		subscribe func(context.Context) error
		within    time.Duration // of the last time
	}{
		{"refused", func(context.Context) error { return errServer }, 10 * time.Second},
		{"silent", hang, 16 * time.Second},
		{"deaf for a minute", func(context.Context) error { deaf(time.Minute); return errServer }, 62 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, subs := newNotifyingStore(t)
				start := time.Now()
				var asked []time.Duration
				store.subscribe = func(ctx context.Context, _ request) (<-chan struct{}, func(), error) {
					asked = append(asked, time.Since(start))
					if len(asked) < 4 {
						return nil, nil, tt.subscribe(ctx)
					}
					return subs.subscribe()
				}
				free := occupy(t, store.real, "key", 10*time.Hour)
				s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
				released := time.Hour + 12345*time.Microsecond
				time.AfterFunc(released, func() { free(); subs.signals <- struct{}{} })
				if err := s.Do(t.Context(), "key", nothing); err != nil {
					t.Fatal(err)
				}
				if late := time.Since(start) - released; late != 0 {
					t.Errorf("%v late, want to be woken", late)
				}
				if len(asked) != 4 {
					t.Fatalf("subscribed at %v, want 4 times", asked)
				}
				for i, last := range asked[:3] {
					if gap := asked[i+1] - last; gap < 6*time.Second || gap > tt.within {
						t.Errorf("subscribed at %v, want 6s to %v in between", asked, tt.within)
					}
				}
				subs.wantStopped(t)
			})
		})
	}
}

// A thousand waiters on a store that cannot subscribe must not fill the log;
// but when it worked in between, that it fails again is news.
func TestFailingSubscriptionsAreLoggedOnChange(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, subs := newNotifyingStore(t)
		failing := true
		store.subscribe = func(context.Context, request) (<-chan struct{}, func(), error) {
			if failing {
				return nil, nil, errServer
			}
			return subs.subscribe()
		}
		var log testlog.Book
		occupy(t, store.real, "key", time.Hour)
		s := newStrategy(t, store, core.Options{Wait: time.Second, Logger: log.Logger()})
		for i, want := range []int{1, 1, 1, 2, 2, 2} {
			failing = i != 2
			if err := s.Do(t.Context(), "key", mustNotRun(t)); !core.IsRejection(err) {
				t.Fatalf("got %v, want a rejection", err)
			}
			if got := len(log.Lines()); got != want {
				t.Errorf("after waiter %d: %d lines, want %d", i, got, want)
			}
		}
	})
}

// The waiter goes away while its subscription is on the way: whatever becomes
// of that, nothing is left, and nothing is logged, for nothing has failed.
func TestSubscriptionThatIsNotNeededAnyMore(t *testing.T) {
	type outcome struct {
		name      string
		subscribe func(ctx context.Context, subs *subscriptions) (<-chan struct{}, func(), error)
	}
	outcomes := []outcome{
		{"hangs", func(ctx context.Context, _ *subscriptions) (<-chan struct{}, func(), error) {
			return nil, nil, hang(ctx)
		}},
		{"is late", func(_ context.Context, subs *subscriptions) (<-chan struct{}, func(), error) {
			deaf(3 * time.Second)
			return subs.subscribe()
		}},
		{"is very late", func(_ context.Context, subs *subscriptions) (<-chan struct{}, func(), error) {
			deaf(time.Minute)
			return subs.subscribe()
		}},
	}
	for _, o := range outcomes {
		for _, end := range []string{"acquired", "rejected", "cancelled"} {
			t.Run(o.name+", "+end, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					store, subs := newNotifyingStore(t)
					store.subscribe = func(ctx context.Context, _ request) (<-chan struct{}, func(), error) {
						return o.subscribe(ctx, subs)
					}
					var log testlog.Book
					free := occupy(t, store.real, "key", time.Hour)
					s := newStrategy(t, store, core.Options{Wait: 2 * time.Second, Logger: log.Logger()})
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					switch end {
					case "acquired":
						time.AfterFunc(time.Second, free)
					case "cancelled":
						time.AfterFunc(time.Second, cancel)
					}
					start := time.Now()
					err := s.Do(ctx, "key", nothing)
					synctest.Wait()
					if store.seen("subscribe")[0].ctx.Err() == nil {
						t.Error("the call that is not needed any more was not cancelled")
					}
					if (err == nil) != (end == "acquired") || core.IsRejection(err) != (end == "rejected") || errors.Is(err, context.Canceled) != (end == "cancelled") {
						t.Errorf("got %v", err)
					}
					if took := time.Since(start); took > 2*time.Second {
						t.Errorf("took %v", took)
					}
					time.Sleep(time.Hour)
					if o.name != "hangs" {
						subs.wantStopped(t)
					}
					if log.String() != "" {
						t.Errorf("logged %s", log.String())
					}
				})
			})
		}
	}
}

// When the present lease runs out, one of ten waiters looks, not all of them; and
// as it gets the key, nobody else has to look.
func TestOnlyTheFirstInLineWatchesTheEndOfTheLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		const end = 10*time.Second + 3*ms // between two polls
		occupy(t, store.real, "key", end)
		s := newStrategy(t, store, core.Options{Wait: time.Minute})
		for range 10 {
			go func() { _ = s.Do(context.Background(), "key", until(time.Hour, nil)) }()
		}
		time.Sleep(end)
		synctest.Wait()
		tries := 0
		for _, at := range store.times("acquire") {
			if at == end {
				tries++
			}
		}
		if tries != 1 {
			t.Errorf("%d tries at the end of the lease, want 1", tries)
		}
		wantHeld(t, store.real, "key")
	})
}

// The first in line alone heeds signals. If his own try hangs, the others find
// out by their polls.
func TestFirstInLineThatHangsCostsTheOthersOnePoll(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		free := occupy(t, store.real, "key", time.Hour)
		type hangs struct{}
		store.acquire = func(ctx context.Context, r request) (core.Grant, error) {
			if r.n > 1 && ctx.Value(hangs{}) != nil {
				return core.Grant{}, hang(ctx)
			}
			return store.real.Acquire(ctx, r.key, r.owner, r.ttl)
		}
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever, TTL: time.Hour})
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), hangs{}, true))
		go func() {
			if err := s.Do(ctx, "key", mustNotRun(t)); !errors.Is(err, context.Canceled) {
				t.Errorf("the one that hangs: %v", err)
			}
		}()
		synctest.Wait()
		time.AfterFunc(10*time.Second, free)
		start := time.Now()
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Error(err)
		}
		if late := time.Since(start) - 10*time.Second; late > time.Second {
			t.Errorf("%v late, want at most one poll", late)
		}
		cancel()
	})
}

// A signal that is there already when the subscription stands, and the poll at
// the same moment: no try is lost, and none is made twice for ever.
func TestManyWaitersEachGetTheirTurn(t *testing.T) {
	for name, store := range map[string]func(t *testing.T) core.LockStore{
		"with signals": func(t *testing.T) core.LockStore { return newMemory(t) },
		"polling":      func(t *testing.T) core.LockStore { return newScriptedStore(t) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newStrategy(t, store(t), core.Options{Wait: core.WaitForever})
				var running, done atomic.Int32
				for range 50 {
					go func() {
						err := s.Do(context.Background(), "key", func(context.Context) error {
							if n := running.Add(1); n != 1 {
								t.Errorf("%d holders", n)
							}
							time.Sleep(100 * ms)
							running.Add(-1)
							done.Add(1)
							return nil
						})
						if err != nil {
							t.Error(err)
						}
					}()
				}
				if name == "with signals" {
					time.Sleep(50*100*ms + time.Second)
				} else {
					time.Sleep(10 * time.Minute)
				}
				synctest.Wait()
				if n := done.Load(); n != 50 {
					t.Errorf("%d of 50 waiters got the key", n)
				}
			})
		})
	}
}
