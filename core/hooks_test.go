package core_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testlog"
)

// scenario is a call of Do on "key" that runs through the given hooks.
type scenario struct {
	hooks string // in order
	fail  error  // what Do's error matches
	work  time.Duration
	o     core.Options
	store func(t *testing.T, s *scriptedStore)
}

var scenarios = map[string]scenario{
	"quiet":         {hooks: "Acquired Released"},
	"renewed":       {hooks: "Acquired Renewed Released", work: 15 * time.Second},
	"release fails": {hooks: "Acquired ReleaseFailed", store: func(_ *testing.T, s *scriptedStore) { s.release = refuseRelease }},
	"renewal fails": {hooks: "Acquired RenewFailed Renewed Released", work: 15 * time.Second, store: func(_ *testing.T, s *scriptedStore) { s.renew = failFirst(s) }},
	"lost":          {hooks: "Acquired Lost", fail: core.ErrLost, work: 15 * time.Second, store: func(_ *testing.T, s *scriptedStore) { s.renew = disown }},
	"held for long": {hooks: "Acquired RenewFailed Lost Released", fail: core.ErrLost, work: time.Minute, o: core.Options{MaxHold: 11 * time.Second}, store: func(_ *testing.T, s *scriptedStore) { s.renew = failOnceAndHang }},
	"waited":        {hooks: "Waiting Acquired Released", o: core.Options{Wait: time.Minute}, store: func(t *testing.T, s *scriptedStore) { occupy(t, s.real, "key", time.Second) }},
	"rejected":      {hooks: "Waiting Rejected", fail: core.ErrNotAcquired, o: core.Options{Wait: time.Second}, store: func(t *testing.T, s *scriptedStore) { occupy(t, s.real, "key", time.Hour) }},
	"acquire fails": {hooks: "AcquireFailed", fail: errServer, store: func(_ *testing.T, s *scriptedStore) { s.acquire = refuseAcquire }},
	"nothing works": {hooks: "ReleaseFailed AcquireFailed", fail: errServer, store: func(_ *testing.T, s *scriptedStore) { s.acquire, s.release = refuseAcquire, refuseRelease }},
}

func refuseAcquire(context.Context, request) (core.Grant, error) { return core.Grant{}, errServer }
func refuseRelease(context.Context, request) error               { return errServer }
func disown(context.Context, request) (bool, error)              { return false, nil }
func failOnceAndHang(_ context.Context, r request) (bool, error) {
	if r.n > 1 {
		deaf(time.Hour)
	}
	return false, errServer
}

func failFirst(s *scriptedStore) func(context.Context, request) (bool, error) {
	return func(_ context.Context, r request) (bool, error) {
		if r.n == 1 {
			return false, errServer
		}
		return s.confirm(r)
	}
}

// run sets the scenario up with hooks that record and call also.
func (sc scenario) run(t *testing.T, also func(hook string, ctx context.Context, e core.Event), use func(ctx context.Context, s *core.Strategy, fn func(context.Context) error)) (*scriptedStore, *recorder, *testlog.Book) {
	t.Helper()
	store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
	if sc.store != nil {
		sc.store(t, store)
	}
	sc.o.Hooks, sc.o.Logger, sc.o.Name = rec.hooks(also), log.Logger(), "billing"
	s := newStrategy(t, store, sc.o)
	use(context.WithValue(t.Context(), ctxKey{}, "value"), s, func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			time.Sleep(time.Second) // the hook is over when the callback is
		case <-time.After(sc.work):
		}
		return ctx.Err()
	})
	return store, rec, log
}

// do is how most tests use a scenario.
func (sc scenario) do(t *testing.T) func(context.Context, *core.Strategy, func(context.Context) error) {
	return func(ctx context.Context, s *core.Strategy, fn func(context.Context) error) {
		t.Helper()
		if err := s.Do(ctx, "key", fn); !errors.Is(err, sc.fail) {
			t.Errorf("Do returned %v, want %v", err, sc.fail)
		}
	}
}

func eachScenario(t *testing.T, f func(t *testing.T, sc scenario)) {
	seen := map[string]bool{}
	for name, sc := range scenarios {
		for hook := range strings.FieldsSeq(sc.hooks) {
			seen[hook] = true
		}
		t.Run(name, func(t *testing.T) { bubble(t, func(t *testing.T) { f(t, sc) }) })
	}
	if len(seen) != 9 {
		t.Errorf("only the hooks %v are in a scenario", seen)
	}
}

func TestHooksAreCalledInOrder(t *testing.T) {
	eachScenario(t, func(t *testing.T, sc scenario) {
		caller := goroutine()
		_, rec, _ := sc.run(t, nil, sc.do(t))
		if got := rec.names(); got != sc.hooks {
			t.Errorf("hooks %s, want %s", got, sc.hooks)
		}
		for _, c := range rec.seen() {
			own := c.hook == "Renewed" || c.hook == "RenewFailed" || c.hook == "Lost"
			if (c.goroutine == caller) == own {
				t.Errorf("%s ran on %s, the caller is %s", c.hook, c.goroutine, caller)
			}
			if c.ctx.Value(ctxKey{}) != "value" || c.ctx.Done() != nil || c.ctx.Err() != nil {
				t.Errorf("%s got the context %v, want one with the caller's values that never ends", c.hook, c.ctx)
			}
			if c.Name != "billing" || c.Key != "key" || c.Tries < 1 {
				t.Errorf("%s got %+v, want name, key and tries", c.hook, c.Event)
			}
			before := c.hook == "Waiting" || c.hook == "Rejected" || c.hook == "AcquireFailed" || sc.hooks == "ReleaseFailed AcquireFailed"
			if (c.Token == 0) != before || before && (c.Held != 0 || c.Waited != c.at) || !before && c.Held+c.Waited != c.at {
				t.Errorf("%s at %v got %+v, want token, held and waited to fit", c.hook, c.at, c.Event)
			}
			if failed := c.hook == "Rejected" || c.hook == "Lost" || strings.Contains(c.hook, "Failed"); (c.Err != nil) != failed {
				t.Errorf("%s got the error %v", c.hook, c.Err)
			}
		}
	})
}

// Without hooks the same happens, in silence.
func TestHooksAreOptional(t *testing.T) {
	eachScenario(t, func(t *testing.T, sc scenario) {
		store := newScriptedStore(t)
		if sc.store != nil {
			sc.store(t, store)
		}
		err := newStrategy(t, store, sc.o).Do(t.Context(), "key", func(ctx context.Context) error {
			select {
			case <-ctx.Done():
			case <-time.After(sc.work):
			}
			return ctx.Err()
		})
		if !errors.Is(err, sc.fail) {
			t.Errorf("Do returned %v, want %v", err, sc.fail)
		}
	})
}

// Slow hooks delay their caller, run one at a time, and are all over when Do
// returns.
func TestDoReturnsAfterItsLastHook(t *testing.T) {
	eachScenario(t, func(t *testing.T, sc scenario) {
		var running atomic.Int32
		slow := func(hook string, _ context.Context, _ core.Event) {
			if n := running.Add(1); n != 1 {
				t.Errorf("%s: %d hooks run at once", hook, n)
			}
			time.Sleep(7 * time.Second)
			running.Add(-1)
		}
		_, rec, _ := sc.run(t, slow, func(ctx context.Context, s *core.Strategy, fn func(context.Context) error) {
			sc.do(t)(ctx, s, fn)
			if n := running.Load(); n != 0 {
				t.Errorf("Do returned while %d hooks ran", n)
			}
		})
		before := rec.names()
		time.Sleep(time.Hour)
		if after := rec.names(); after != before {
			t.Errorf("hooks after Do has returned: %s", strings.TrimPrefix(after, before))
		}
	})
}

// A hook that hangs for minutes holds up neither the renewals nor the
// cancellation of the callback.
func TestSlowHookDelaysNeitherRenewalNorLoss(t *testing.T) {
	for _, slow := range []string{"Renewed", "RenewFailed"} {
		t.Run(slow, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				store.renew = func(_ context.Context, r request) (bool, error) {
					switch {
					case r.n == 1 && slow == "RenewFailed":
						return false, errServer
					case r.at > 5*time.Minute:
						return false, nil
					}
					return store.confirm(r)
				}
				hooks := rec.hooks(func(hook string, _ context.Context, _ core.Event) {
					if hook == slow {
						time.Sleep(10 * time.Minute)
					}
				})
				s := newStrategy(t, store, core.Options{Hooks: hooks})
				var cancelled time.Duration
				err := s.Do(t.Context(), "key", func(ctx context.Context) error {
					time.Sleep(4 * time.Minute)
					wantHeld(t, store.real, "key")
					<-ctx.Done()
					cancelled = time.Since(store.start)
					return ctx.Err()
				})
				if !errors.Is(err, core.ErrLost) {
					t.Errorf("got %v, want ErrLost", err)
				}
				at := store.times("renew")
				if last := at[len(at)-1]; cancelled != last || last > 5*time.Minute+third {
					t.Errorf("cancelled at %v, the store said no at %v", cancelled, last)
				}
				if !strings.Contains(rec.names(), "Renewed Lost") {
					t.Errorf("hooks %s", rec.names())
				}
			})
		})
	}
}

func TestHookThatPanics(t *testing.T) {
	eachScenario(t, func(t *testing.T, sc scenario) {
		store, rec, log := sc.run(t, func(hook string, _ context.Context, _ core.Event) { panic("boo from " + hook) }, sc.do(t))
		if got := rec.names(); got != sc.hooks {
			t.Errorf("hooks %s, want %s as if nothing had happened", got, sc.hooks)
		}
		if store.release == nil && sc.fail == nil {
			wantFree(t, store.real, "key")
		}
		for hook := range strings.FieldsSeq(sc.hooks) {
			found := 0
			for _, line := range log.Lines() {
				if strings.Contains(line, "level=ERROR") && strings.Contains(line, "boo from "+hook+`"`) && strings.Contains(line, "lock=billing") && strings.Contains(line, "key=key") {
					found++
				}
			}
			if found != 1 {
				t.Errorf("the panic of %s is in the log %d times:\n%v", hook, found, log)
			}
		}
	})
}

// t.FailNow in a hook is a Goexit. It may end the goroutine that runs the hook;
// it must not leave a lease that is renewed for ever, or a Do that hangs.
func TestHookThatCallsGoexit(t *testing.T) {
	eachScenario(t, func(t *testing.T, sc scenario) {
		for which := range strings.FieldsSeq(sc.hooks) {
			for _, how := range []string{"Do", "Acquire"} {
				exit := func(hook string, _ context.Context, _ core.Event) {
					if hook == which {
						runtime.Goexit()
					}
				}
				returned := make(chan bool, 1)
				store, _, _ := sc.run(t, exit, func(ctx context.Context, s *core.Strategy, fn func(context.Context) error) {
					go func() {
						ok := false
						defer func() { returned <- ok }()
						if how == "Do" {
							_ = s.Do(ctx, "key", fn)
						} else if lease, err := s.Acquire(ctx, "key"); err == nil {
							_ = fn(lease.Context(ctx))
							_ = lease.Release()
						}
						ok = true
					}()
					select {
					case ok := <-returned:
						if own := which == "Renewed" || which == "RenewFailed" || which == "Lost"; ok != own {
							t.Errorf("%s, Goexit in %s: returned: %v, want %v", how, which, ok, own)
						}
					case <-time.After(time.Hour):
						t.Fatalf("%s hangs after a Goexit in %s", how, which)
					}
				})
				calls := len(store.seen())
				time.Sleep(3 * ttl)
				if got := store.seen()[calls:]; len(got) != 0 {
					t.Errorf("%s, Goexit in %s: calls after all was over: %v", how, which, got)
				}
			}
		}
	})
}

// A hook may end its own lease.
func TestHookThatReleasesItsLease(t *testing.T) {
	eachScenario(t, func(t *testing.T, sc scenario) {
		for which := range strings.FieldsSeq(sc.hooks) {
			if which == "Waiting" || which == "Acquired" {
				continue // no lease yet
			}
			var lease atomic.Pointer[core.Lease]
			release := func(hook string, _ context.Context, _ core.Event) {
				if hook == which {
					_ = lease.Load().Release()
				}
			}
			done := make(chan struct{})
			store, rec, _ := sc.run(t, release, func(ctx context.Context, s *core.Strategy, fn func(context.Context) error) {
				go func() {
					defer close(done)
					l, err := s.Acquire(ctx, "key")
					if err != nil {
						return
					}
					lease.Store(l)
					_ = fn(l.Context(ctx))
					_ = l.Release()
				}()
				select {
				case <-done:
				case <-time.After(time.Hour):
					t.Fatalf("deadlock: hook %s releases its lease", which)
				}
			})
			synctest.Wait()
			if store.release == nil {
				if n := strings.Count(rec.names(), "Released"); n > 1 || len(store.seen("release")) > 1 {
					t.Errorf("hook %s: released %d times: %s", which, n, rec.names())
				}
			}
		}
	})
}

// The end of the hold finds the loss, and the hook Lost releases.
func TestHookThatReleasesALeaseFoundLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for range 20 { // the timer and the end of the hold race
			store, rec := newScriptedStore(t), newRecorder()
			store.renew = func(ctx context.Context, _ request) (bool, error) { return false, hang(ctx) }
			var lease atomic.Pointer[core.Lease]
			s := newStrategy(t, store, core.Options{Hooks: rec.hooks(func(hook string, _ context.Context, _ core.Event) {
				if hook == "Lost" || hook == "Released" {
					if err := lease.Load().Release(); !errors.Is(err, core.ErrLost) {
						t.Errorf("Release in %s: %v, want ErrLost", hook, err)
					}
				}
			})})
			l, err := s.Acquire(t.Context(), "key")
			if err != nil {
				t.Fatal(err)
			}
			lease.Store(l)
			time.Sleep(deadline)
			if err := l.Release(); !errors.Is(err, core.ErrLost) {
				t.Errorf("Release: %v, want ErrLost", err)
			}
			synctest.Wait()
			if got, want := rec.names(), "Lost Released"; !strings.HasSuffix(got, want) {
				t.Errorf("hooks %s, want %s at the end", got, want)
			}
		}
	})
}

// Hooks of two acquisitions do not wait for one another.
func TestHooksOfOtherAcquisitionsAreIndependent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newStrategy(t, newMemory(t), core.Options{Hooks: core.Hooks{Acquired: func(_ context.Context, e core.Event) {
			if e.Key == "slow" {
				time.Sleep(time.Hour)
			}
		}}})
		go func() {
			if err := s.Do(context.Background(), "slow", nothing); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		start := time.Now()
		if err := s.Do(t.Context(), "quick", nothing); err != nil || time.Since(start) != 0 {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
	})
}

// Nobody may be told an owner: whoever knows it can end the lease.
func TestOwnersStayOutOfErrorsAndLogs(t *testing.T) {
	eachScenario(t, func(t *testing.T, sc scenario) {
		var text strings.Builder
		store, rec, log := sc.run(t, nil, func(ctx context.Context, s *core.Strategy, fn func(context.Context) error) {
			err := s.Do(ctx, "key", func(ctx context.Context) error {
				fmt.Fprintf(&text, "%v %+v %v", ctx, ctx, context.Cause(ctx))
				return fn(ctx)
			})
			fmt.Fprintf(&text, "%v %+v %#v", err, err, err)
		})
		text.WriteString(log.String())
		for _, c := range rec.seen() {
			fmt.Fprintf(&text, "%v %+v", c.Event, c.Event)
		}
		for _, c := range store.seen() {
			if strings.Contains(text.String(), c.owner) {
				t.Fatalf("the owner of %v is in\n%s", c, text.String())
			}
		}
	})
}
