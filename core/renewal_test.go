package core_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testlog"
)

// The default ttl, and what follows from it.
const (
	ttl      = 30 * time.Second
	third    = 10 * time.Second
	earliest = 8 * time.Second             // a renewal, with all of its jitter
	deadline = 29700 * ms                  // the local one: one percent less than ttl
	giveUp   = third + 50*time.Millisecond // on a renewal that minds no context
)

func TestRenewalKeepsTheLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec := newScriptedStore(t), newRecorder()
		s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
		err := s.Do(t.Context(), "key", func(ctx context.Context) error {
			for range 100 { // ttls
				time.Sleep(ttl)
				wantHeld(t, store.real, "key")
			}
			return ctx.Err()
		})
		if err != nil {
			t.Errorf("got %v, want nil: it was held all the time", err)
		}
		last := time.Duration(0)
		for _, c := range store.seen("renew") {
			if gap := c.at - last; gap < earliest || gap > third {
				t.Errorf("%v came %v after the one before, want %v to %v", c, gap, earliest, third)
			}
			last = c.at
			if c.bound != third {
				t.Errorf("%v may take %v, want %v", c, c.bound, third)
			}
		}
		if n := len(store.seen("renew")); n < 300 {
			t.Errorf("only %d renewals in 100 ttls", n)
		}
		want := "Acquired " + strings.Repeat("Renewed ", len(store.seen("renew"))) + "Released"
		if got := rec.names(); got != want {
			t.Errorf("hooks are not Acquired, Renewed for each renewal, Released")
		}
	})
}

// Holds that begin together must not all renew together.
func TestRenewalsAreSpread(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		s := newStrategy(t, store, core.Options{})
		const holds = 1000
		for i := range holds {
			lease, err := s.Acquire(t.Context(), fmt.Sprint(i))
			if err != nil {
				t.Fatal(err)
			}
			defer lease.Release()
		}
		time.Sleep(third)
		synctest.Wait()
		var buckets [4]int
		calls := store.seen("renew")
		for _, c := range calls {
			buckets[min(3, (c.at-earliest)*4/(third-earliest))]++
		}
		if len(calls) != holds {
			t.Errorf("%d of %d were renewed by a third of the ttl", len(calls), holds)
		}
		for i, n := range buckets {
			if n < holds/8 { // 250 on average; fewer than 125 is nine sigma
				t.Errorf("only %d of %d renewals in quarter %d of the jitter: %v", n, holds, i, buckets)
			}
		}
	})
}

// The caller has gone, the callback winds down: nobody else may come in before
// it is done.
func TestRenewalOutlivesTheCallersContext(t *testing.T) {
	for _, how := range []string{"cancelled with a cause", "deadline"} {
		t.Run(how, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := newScriptedStore(t)
				ctx, wantErr, wantCause, end := endable(t, how)
				s := newStrategy(t, store, core.Options{})
				err := s.Do(ctx, "key", func(ctx context.Context) error {
					time.Sleep(time.Second)
					end()
					<-ctx.Done()
					if err, cause := ctx.Err(), context.Cause(ctx); !errors.Is(err, wantErr) || !errors.Is(cause, wantCause) {
						t.Errorf("callback's context: %v, cause %v, want the caller's", err, cause)
					}
					time.Sleep(10 * ttl) // a long farewell
					wantHeld(t, store.real, "key")
					return nil
				})
				if err != nil {
					t.Errorf("got %v, want the callback's nil", err)
				}
				for _, c := range store.seen("renew", "release") {
					if c.ended != nil {
						t.Errorf("%v was sent with a context that had ended", c)
					}
				}
				wantFree(t, store.real, "key")
			})
		})
	}
}

// Two thirds of the lease are left when the first renewal fails. A server that
// is down for half a ttl, from whatever moment on, and in whatever way, ends no
// lease.
func TestServerDownForHalfATTLIsNoLoss(t *testing.T) {
	for _, tt := range []struct {
		name string
		down func(ctx context.Context) error
	}{
		{"refuses", func(context.Context) error { return errServer }},
		{"hangs", hang},
		{"hangs, and minds no context", func(context.Context) error { deaf(time.Hour); return errServer }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				store.renew = func(ctx context.Context, r request) (bool, error) {
					var begin time.Duration // of the outage of this key
					if _, err := fmt.Sscan(r.key, &begin); err != nil {
						t.Error(err)
					}
					if begin *= time.Second / 2; r.at >= begin && r.at < begin+ttl/2 {
						return false, tt.down(ctx)
					}
					return store.real.Renew(ctx, r.key, r.owner, r.ttl)
				}
				s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
				var leases []*core.Lease
				for begin := range 3 * ttl / (time.Second / 2) {
					lease, err := s.Acquire(t.Context(), fmt.Sprint(int64(begin)))
					if err != nil {
						t.Fatal(err)
					}
					leases = append(leases, lease)
				}
				time.Sleep(5 * ttl)
				for _, lease := range leases {
					wantHeld(t, store.real, lease.Key())
					if err := lease.Release(); err != nil {
						t.Errorf("server down from %s half seconds on: %v", lease.Key(), err)
					}
				}
				if !strings.Contains(rec.names(), "RenewFailed Renewed") {
					t.Error("no renewal failed and then passed")
				}
			})
		})
	}
}

// A failed renewal is tried again after a short back-off, until the deadline.
func TestRenewalRetries(t *testing.T) {
	for _, tt := range []struct {
		ttl  time.Duration
		want []time.Duration // between the tries
	}{
		{30 * time.Second, []time.Duration{50 * ms, 100 * ms, 200 * ms, 400 * ms, 800 * ms, time.Second, time.Second}},
		{2400 * ms, []time.Duration{50 * ms, 100 * ms, 200 * ms, 200 * ms, 200 * ms}}, // a twelfth of the ttl
		{120 * ms, []time.Duration{10 * ms, 10 * ms, 10 * ms}},
	} {
		t.Run(tt.ttl.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
				store.renew = func(context.Context, request) (bool, error) { return false, errServer }
				s := newStrategy(t, store, core.Options{TTL: tt.ttl, Name: "billing", Hooks: rec.hooks(nil), Logger: log.Logger()})
				lost := time.Duration(0)
				err := s.Do(t.Context(), "key", func(ctx context.Context) error {
					<-ctx.Done()
					lost = time.Since(store.start)
					return ctx.Err()
				})
				if !errors.Is(err, core.ErrLost) || !errors.Is(err, errServer) {
					t.Errorf("got %v, want ErrLost because of the server's error", err)
				}
				if want := tt.ttl - tt.ttl/100; lost != want {
					t.Errorf("lost after %v, want the local deadline %v", lost, want)
				}
				at := store.times("renew")
				for i, want := range tt.want {
					if got := at[i+1] - at[i]; got != want {
						t.Errorf("try %d came %v after the one before, want %v", i+2, got, want)
					}
				}
				if last, gap := at[len(at)-1], tt.want[len(tt.want)-1]; lost-last > gap {
					t.Errorf("the last try was at %v, the deadline at %v: given up early", last, lost)
				}
				if got, want := rec.names(), "Acquired "+strings.Repeat("RenewFailed ", len(at))+"Lost Released"; got != want {
					t.Errorf("hooks %s, want %s", got, want)
				}
				for _, c := range rec.seen() {
					if e, ok := errors.AsType[*core.StoreError](c.Err); c.hook == "RenewFailed" && (!ok || e.Op != "renew" || e.Key != "key" || e.Err != errServer) { //nolint:errorlint // unchanged
						t.Errorf("RenewFailed got %v, want a StoreError with op, key and the store's error", c.Err)
					}
				}
				lines := log.Lines()
				if len(lines) != len(at)+1 {
					t.Errorf("%d lines logged, want one for each failure and one for the loss", len(lines))
				}
				for _, line := range lines {
					if !strings.Contains(line, "level=WARN") || !strings.Contains(line, "lock=billing") || !strings.Contains(line, "key=key") || !strings.Contains(line, "token=") {
						t.Errorf("logged %q", line)
					}
				}
			})
		})
	}
}

// After a failure that passed the next one starts from the short back-off.
func TestRenewalBackOffStartsAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.renew = func(ctx context.Context, r request) (bool, error) {
			if r.n%4 != 0 {
				return false, errServer
			}
			return store.real.Renew(ctx, r.key, r.owner, r.ttl)
		}
		s := newStrategy(t, store, core.Options{})
		if err := s.Do(t.Context(), "key", until(5*time.Minute, nil)); err != nil {
			t.Error(err)
		}
		at := store.times("renew")
		for i := 0; i+3 < len(at); i += 4 {
			if at[i+1]-at[i] != 50*ms || at[i+2]-at[i+1] != 100*ms || at[i+3]-at[i+2] != 200*ms {
				t.Errorf("tries at %v, want 50, 100 and 200ms between", at[i:i+4])
			}
		}
	})
}

func TestUnansweredRenewalIsGivenUpAfterAThird(t *testing.T) {
	for _, tt := range []struct {
		name string
		call func(ctx context.Context)
		took time.Duration
	}{
		{"by a store that minds its context", func(ctx context.Context) { _ = hang(ctx) }, third},
		{"by the strategy, if the store does not", func(context.Context) { deaf(time.Hour) }, giveUp},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				store.renew = func(ctx context.Context, r request) (bool, error) {
					if r.n == 1 {
						tt.call(ctx)
						return false, ctx.Err()
					}
					return store.real.Renew(ctx, r.key, r.owner, r.ttl)
				}
				s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
				if err := s.Do(t.Context(), "key", until(ttl, nil)); err != nil {
					t.Error(err)
				}
				at := store.times("renew")
				if got, want := at[1]-at[0], tt.took+50*ms; got != want {
					t.Errorf("the second renewal came %v after the first, want %v", got, want)
				}
				if e := rec.one(t, "RenewFailed"); !errors.Is(e.Err, context.DeadlineExceeded) || e.at != at[0]+tt.took {
					t.Errorf("RenewFailed at %v with %v, want a time-out at %v", e.at, e.Err, at[0]+tt.took)
				}
				if store.seen("renew")[0].ctx.Err() == nil {
					t.Error("the call that was given up was not cancelled")
				}
			})
		})
	}
}

// A server that needs almost a third of the ttl for each renewal is not asked
// again the moment that it has answered.
func TestSlowServerIsNotPressed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec := newScriptedStore(t), newRecorder()
		store.renew = func(_ context.Context, r request) (bool, error) {
			deaf(third - 1)
			return store.confirm(r)
		}
		s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
		if err := s.Do(t.Context(), "key", until(20*ttl, nil)); err != nil {
			t.Error(err)
		}
		at := store.times("renew")
		for i, sent := range at[1:] {
			if gap := sent - (at[i] + third - 1); gap < ttl/30 {
				t.Errorf("renewal %d was sent %v after the answer to the one before, want at least %v", i+2, gap, ttl/30)
			}
		}
		if strings.Contains(rec.names(), "Failed") || len(at) < 40 {
			t.Errorf("%d renewals, hooks %s", len(at), rec.names())
		}
	})
}

// Loss is declared ttl, less the allowance for drift, after the last request
// that was answered with yes was *sent*: the server began to count in between.
func TestLossAtTheLocalDeadline(t *testing.T) {
	for _, tt := range []struct {
		name          string
		acquireTakes  time.Duration
		goodRenewals  int
		renewalsTake  time.Duration
		down          func(ctx context.Context) (bool, error)
		wantNoRelease bool
	}{
		{name: "no renewal at all, server refuses", down: func(context.Context) (bool, error) { return false, errServer }},
		{name: "no renewal at all, server silent", down: func(ctx context.Context) (bool, error) { return false, hang(ctx) }},
		{name: "no renewal at all, server silent, client deaf", down: func(context.Context) (bool, error) { deaf(time.Hour); return true, nil }},
		{name: "slow grant", acquireTakes: 25 * time.Second, down: func(context.Context) (bool, error) { return false, errServer }},
		{name: "after three renewals, server refuses", goodRenewals: 3, down: func(context.Context) (bool, error) { return false, errServer }},
		{name: "after three slow renewals, client deaf", goodRenewals: 3, renewalsTake: 9 * time.Second, down: func(context.Context) (bool, error) { deaf(time.Hour); return true, nil }},
		{name: "client deaf, with a no", down: func(context.Context) (bool, error) { deaf(time.Hour); return false, nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				store.acquire = func(_ context.Context, r request) (core.Grant, error) {
					deaf(tt.acquireTakes)
					return store.grant(r)
				}
				var sent time.Duration // the last request that was answered with yes
				store.renew = func(ctx context.Context, r request) (bool, error) {
					if r.n <= tt.goodRenewals {
						sent = r.at
						deaf(tt.renewalsTake)
						return store.confirm(r)
					}
					return tt.down(ctx)
				}
				s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
				var ended time.Duration
				var cause error
				err := s.Do(t.Context(), "key", func(ctx context.Context) error {
					<-ctx.Done()
					ended, cause = time.Since(store.start), context.Cause(ctx)
					return ctx.Err()
				})
				if want := sent + deadline; ended != want {
					t.Errorf("cancelled at %v, want %v", ended, want)
				}
				lost, ok := errors.AsType[*core.LostError](cause)
				if !ok || lost.Key != "key" || lost.Token == 0 || lost.Reason == nil || lost.Err != nil {
					t.Errorf("cause %v, want a LostError with key, token and reason", cause)
				}
				if !errors.Is(err, core.ErrLost) {
					t.Errorf("got %v, want ErrLost", err)
				}
				if e := rec.one(t, "Lost"); e.at != ended || e.Token != lost.Token || e.Err != cause { //nolint:errorlint // the same
					t.Errorf("Lost got %+v at %v", e.Event, e.at)
				}
				// It may still live on the server, by its clock: give it back.
				releases := store.seen("release")
				if len(releases) != 1 || releases[0].ended != nil || releases[0].owner != store.seen("acquire")[0].owner {
					t.Errorf("releases %v, want one, with a context that lives", releases)
				}
				calls := len(store.seen())
				time.Sleep(2 * time.Hour)
				if got := store.seen()[calls:]; len(got) != 0 {
					t.Errorf("calls after the loss: %v", got)
				}
				if got, want := rec.names(), "Lost Released"; !strings.HasSuffix(got, want) {
					t.Errorf("hooks %s, want them to end with %s", got, want)
				}
			})
		})
	}
}

// "false" is an answer: the lease is gone. No retry, no waiting for a deadline,
// and nothing to release.
func TestLossWhenTheStoreSaysNo(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
		var said time.Duration
		store.renew = func(_ context.Context, r request) (bool, error) {
			said = r.at
			return false, nil
		}
		s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil), Logger: log.Logger()})
		err := s.Do(t.Context(), "key", func(ctx context.Context) error {
			<-ctx.Done()
			if at := time.Since(store.start); at != said {
				t.Errorf("cancelled at %v, want at once at %v", at, said)
			}
			time.Sleep(time.Hour)
			return ctx.Err()
		})
		if !errors.Is(err, core.ErrLost) {
			t.Errorf("got %v, want ErrLost", err)
		}
		wantCalls(t, store, "acquire@0s", fmt.Sprint("renew@", said))
		if got, want := rec.names(), "Acquired Lost"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
		if lines := log.Lines(); len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0], "lost") {
			t.Errorf("logged %q, want one warning", lines)
		}
	})
}

// Renewals that were given up are answered after all.
func TestLateAnswerOfAnAbandonedRenewal(t *testing.T) {
	type answer = func(store *scriptedStore, r request) (bool, error)
	yes := func(store *scriptedStore, r request) (bool, error) { return store.confirm(r) }
	no := func(*scriptedStore, request) (bool, error) { return false, nil }
	failure := func(*scriptedStore, request) (bool, error) { return false, errServer }
	for _, tt := range []struct {
		name   string
		first  answer
		late   time.Duration // after it was sent
		others answer
		lost   func(first time.Duration) time.Duration // nil: not
		failed int                                     // renewals, if it matters
	}{
		{
			name: "yes is a yes, from when it was sent", first: yes, late: 15 * time.Second, others: failure,
			lost: func(first time.Duration) time.Duration { return first + deadline },
		}, {
			name: "yes, and the next ones too", first: yes, late: 15 * time.Second, others: yes, failed: 1,
		}, {
			name: "no is a no", first: no, late: 15 * time.Second, others: yes,
			lost: func(first time.Duration) time.Duration { return first + 15*time.Second },
		}, {
			name: "failure is no news", first: failure, late: 15 * time.Second, others: yes, failed: 1,
		}, {
			name: "yes after the loss", first: yes, late: time.Minute, others: failure,
			lost: func(time.Duration) time.Duration { return deadline },
		}, {
			name: "no after the loss", first: no, late: time.Minute, others: failure,
			lost: func(time.Duration) time.Duration { return deadline },
		}, {
			name: "yes after its own time was over", first: yes, late: deadline, others: yes,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				store.renew = func(_ context.Context, r request) (bool, error) {
					if r.n == 1 {
						deaf(tt.late)
						return tt.first(store, r)
					}
					return tt.others(store, r)
				}
				s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
				lost := time.Duration(0)
				err := s.Do(t.Context(), "key", func(ctx context.Context) error {
					select {
					case <-ctx.Done():
						lost = time.Since(store.start)
					case <-time.After(10 * ttl):
					}
					return ctx.Err()
				})
				time.Sleep(time.Hour)
				want := time.Duration(0)
				if tt.lost != nil {
					want = tt.lost(store.times("renew")[0])
				}
				if lost != want || errors.Is(err, core.ErrLost) != (want != 0) {
					t.Errorf("lost at %v with %v, want %v (0s: not at all)", lost, err, want)
				}
				if n := strings.Count(rec.names(), "RenewFailed"); tt.failed != 0 && n != tt.failed {
					t.Errorf("%d failures, want %d: %s", n, tt.failed, rec.names())
				}
				if n := strings.Count(rec.names(), "Lost"); (n == 1) != (want != 0) || n > 1 {
					t.Errorf("hooks %s", rec.names())
				}
			})
		})
	}
}

func TestLossAndTheCallbacksResult(t *testing.T) {
	errMine := errors.New("mine")
	for _, tt := range []struct {
		name   string
		fn     func(ctx context.Context) error
		wantOK bool
		wantIs []error
		notIs  error
	}{
		{"nil: the work is done", func(context.Context) error { return nil }, true, nil, nil},
		{"an error", func(context.Context) error { return errMine }, false, []error{core.ErrLost, errMine}, context.Canceled},
		{"the context's error", func(ctx context.Context) error { return ctx.Err() }, false, []error{core.ErrLost, context.Canceled}, nil},
		{"the context's cause", func(ctx context.Context) error { return context.Cause(ctx) }, false, []error{core.ErrLost}, context.Canceled},
		{"the cause, wrapped", func(ctx context.Context) error { return fmt.Errorf("%w: %w", errMine, context.Cause(ctx)) }, false, []error{core.ErrLost, errMine}, context.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := newScriptedStore(t)
				store.renew = func(context.Context, request) (bool, error) { return false, nil }
				s := newStrategy(t, store, core.Options{})
				var token int64
				fn := func(ctx context.Context) error {
					token, _ = core.Token(ctx)
					<-ctx.Done()
					return tt.fn(ctx)
				}
				ran, err := s.TryDo(t.Context(), "TryDo", fn)
				if !ran {
					t.Error("TryDo says that the callback did not run")
				}
				n, errT := core.Do(t.Context(), s, "Do[T]", func(ctx context.Context) (int, error) { return 7, fn(ctx) })
				if n != 7 {
					t.Errorf("Do[T] returned %v, want the callback's value", n)
				}
				for what, err := range map[string]error{"TryDo": err, "Do[T]": errT, "Do": s.Do(t.Context(), "Do", fn)} {
					if tt.wantOK {
						if err != nil {
							t.Errorf("%s: %v, want nil", what, err)
						}
						continue
					}
					lost, ok := errors.AsType[*core.LostError](err)
					if !ok || lost.Key != what || what == "Do" && lost.Token != token || lost.Code() != "LOCK_LOST" {
						t.Errorf("%s: %v, want a LostError with key and token", what, err)
					}
					for _, want := range tt.wantIs {
						if !errors.Is(err, want) {
							t.Errorf("%s: %v does not match %v", what, err, want)
						}
					}
					if n := strings.Count(err.Error(), "lease lost"); tt.name != "the cause, wrapped" && n != 1 {
						t.Errorf("%s: %v says it %d times", what, err, n)
					}
					if tt.notIs != nil && errors.Is(err, tt.notIs) {
						t.Errorf("%s: %v matches %v", what, err, tt.notIs)
					}
				}
			})
		})
	}
}

// The timer of a process that was suspended may come after its callback: then
// the end of the hold finds the loss.
func TestLossFoundWhenTheCallbackReturns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		errMine := errors.New("mine")
		for _, after := range []time.Duration{deadline, deadline - 1} {
			store, rec := newScriptedStore(t), newRecorder()
			store.renew = func(ctx context.Context, _ request) (bool, error) { return false, hang(ctx) }
			s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
			err := s.Do(t.Context(), "key", until(after, errMine)) // both timers fire at the same instant
			if lost := errors.Is(err, core.ErrLost); lost != (after == deadline) || !errors.Is(err, errMine) {
				t.Errorf("after %v: %v, want a loss: %v", after, err, after == deadline)
			}
			if lost := strings.HasSuffix(rec.names(), "Lost Released"); lost != (after == deadline) {
				t.Errorf("after %v: hooks %s", after, rec.names())
			}
		}
	})
}

// First the callback's context and all that was made of it is cancelled, then
// the hook runs, then Do returns, then nothing.
func TestLossOrderOfEvents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec := newScriptedStore(t), newRecorder()
		var mu sync.Mutex
		var events []string
		note := func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, fmt.Sprintf(format, args...))
		}
		store.renew = func(context.Context, request) (bool, error) { return false, errServer }
		store.release = func(context.Context, request) error { note("release"); return nil }
		var callback, child context.Context
		hooks := rec.hooks(func(hook string, hookCtx context.Context, e core.Event) {
			switch hook {
			case "Lost":
				note("hook Lost: callback %v, child %v, cause is the hook's: %v", callback.Err(), child.Err(), context.Cause(callback) == e.Err) //nolint:errorlint // the same
				if hookCtx.Err() != nil || hookCtx.Done() != nil || hookCtx.Value(ctxKey{}) != "value" {
					t.Errorf("hook's context: %v", hookCtx)
				}
				time.Sleep(time.Second) // slower than the callback
				note("hook Lost returns")
			case "Released":
				note("hook Released")
			}
		})
		s := newStrategy(t, store, core.Options{Hooks: hooks})
		err := s.Do(context.WithValue(t.Context(), ctxKey{}, "value"), "key", func(ctx context.Context) error {
			callback = ctx
			var cancel context.CancelFunc
			child, cancel = context.WithTimeout(context.WithValue(ctx, ctxKey{}, "other"), time.Hour)
			defer cancel()
			<-child.Done()
			note("callback cancelled")
			time.Sleep(ms)
			note("callback returns")
			return ctx.Err()
		})
		note("Do returns: lost %v", errors.Is(err, core.ErrLost))
		synctest.Wait()

		mu.Lock()
		got := strings.Join(events, "\n")
		mu.Unlock()
		// Whether the callback notices before the hook runs is the scheduler's.
		hook := "hook Lost: callback context canceled, child context canceled, cause is the hook's: true"
		rest := "\ncallback returns\nrelease\nhook Lost returns\nhook Released\nDo returns: lost true"
		if got != hook+"\ncallback cancelled"+rest && got != "callback cancelled\n"+hook+rest {
			t.Errorf("got\n%s\nwant\n%s\ncallback cancelled%s", got, hook, rest)
		}
	})
}

// No library function ends the process or goes on renewing for a callback that
// ignores its cancellation.
func TestLossOfACallbackThatDoesNotCare(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.renew = func(context.Context, request) (bool, error) { return false, errServer }
		s := newStrategy(t, store, core.Options{})
		if err := s.Do(t.Context(), "key", until(time.Hour, nil)); err != nil {
			t.Errorf("got %v, want nil: the work is done", err)
		}
		calls := store.seen("renew")
		if last := calls[len(calls)-1].at; last >= deadline {
			t.Errorf("a renewal was sent at %v, after the loss", last)
		}
		if at := store.times("release"); len(at) != 1 || at[0] != time.Hour {
			t.Errorf("releases at %v, want one when the callback returned", at)
		}
	})
}

func TestMinHoldKeepsTheKey(t *testing.T) {
	for _, tt := range []struct {
		name string
		ttl  time.Duration
		work time.Duration
		fn   error
		last string // the call that ends it
		free time.Duration
	}{
		{"short work", ttl, 5 * time.Second, nil, "renew", 20 * time.Second},
		{"work that fails", ttl, 5 * time.Second, errServer, "renew", 20 * time.Second},
		{"no work", ttl, 0, nil, "renew", 20 * time.Second},
		{"short ttl", 3 * time.Second, 5 * time.Second, nil, "renew", 20 * time.Second},
		{"a bit is left", ttl, 20*time.Second - 1, nil, "renew", 20*time.Second + ms - 1}, // no lease is shorter than 1 ms
		{"nothing is left", ttl, 20 * time.Second, nil, "release", 20 * time.Second},
		{"long work", ttl, time.Minute, nil, "release", time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				s := newStrategy(t, store, core.Options{TTL: tt.ttl, MinHold: 20 * time.Second, Hooks: rec.hooks(nil)})
				if err := s.Do(t.Context(), "key", until(tt.work, tt.fn)); err != tt.fn { //nolint:errorlint // unchanged
					t.Errorf("got %v, want %v", err, tt.fn)
				}
				if back := time.Since(store.start); back != tt.work {
					t.Errorf("Do was back after %v, want %v: nobody waits for MinHold", back, tt.work)
				}
				calls := store.seen()
				if last := calls[len(calls)-1]; last.op != tt.last || last.at != tt.work || last.bound != min(tt.ttl, 5*time.Second) {
					t.Errorf("the last call was %v, bound %v, want %s", last, last.bound, tt.last)
				}
				if got := rec.names(); !strings.HasSuffix(got, "Released") {
					t.Errorf("hooks %s, want Released at the end", got)
				}
				wantFreeAfter(t, store.real, "key", tt.free-tt.work)
			})
		})
	}
}

// MinHold is not for a lease that is lost: that is given back.
func TestMinHoldAfterALossReleases(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.renew = func(context.Context, request) (bool, error) { return false, errServer }
		s := newStrategy(t, store, core.Options{MinHold: time.Hour})
		if err := s.Do(t.Context(), "key", until(time.Minute, nil)); err != nil {
			t.Error(err)
		}
		if n := len(store.seen("release")); n != 1 {
			t.Errorf("%d releases, want 1", n)
		}
	})
}

// A renewal that is on its way when the callback returns is of the same owner: it
// must not come after the one that keeps the key.
func TestMinHoldIsSentAfterTheRenewalOnItsWay(t *testing.T) {
	for _, minHold := range []time.Duration{20 * time.Second, 4 * time.Second} {
		t.Run(minHold.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				const ttl = 9 * time.Second
				store := newScriptedStore(t)
				var late atomic.Bool
				store.renew = func(_ context.Context, r request) (bool, error) {
					if !late.Swap(true) {
						deaf(2 * time.Second) // and then it is executed, whatever its ctx says
					}
					return store.confirm(r)
				}
				s := newStrategy(t, store, core.Options{TTL: ttl, MinHold: minHold})
				if err := s.Do(t.Context(), "key", until(ttl/3, nil)); err != nil {
					t.Fatal(err)
				}
				calls := store.seen()
				if last := calls[len(calls)-1]; last.at != calls[1].at+2*time.Second {
					t.Errorf("calls %v, want the last with the answer to the renewal", calls)
				}
				wantFreeAfter(t, store.real, "key", minHold-time.Since(store.start))
			})
		})
	}
}

// One that never comes back is not waited for.
func TestMinHoldBesideARenewalThatHangs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		var hung atomic.Bool
		store.renew = func(_ context.Context, r request) (bool, error) {
			if !hung.Swap(true) {
				deaf(time.Hour)
				return false, errServer
			}
			return store.confirm(r)
		}
		s := newStrategy(t, store, core.Options{TTL: ttl, MinHold: time.Minute})
		if err := s.Do(t.Context(), "key", until(third, nil)); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(store.start) - third; waited > 5*time.Second {
			t.Errorf("waited %v, want at most 5s", waited)
		}
		wantFreeAfter(t, store.real, "key", time.Minute-time.Since(store.start))
	})
}

// The lease was lost, and the renewal that was to keep the key is the first to
// learn of it.
func TestMinHoldThatCannotBeKeptIsReported(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
		store.renew = func(context.Context, request) (bool, error) { return false, nil }
		s := newStrategy(t, store, core.Options{MinHold: time.Hour, Hooks: rec.hooks(nil), Logger: log.Logger()})
		lease, err := s.Acquire(t.Context(), "key")
		if err != nil {
			t.Fatal(err)
		}
		err = lease.Release()
		if lost, ok := errors.AsType[*core.LostError](err); !ok || lost.Key != "key" || lost.Token != lease.Token() {
			t.Errorf("Release returned %v, want a LostError", err)
		}
		if got, want := rec.names(), "Acquired ReleaseFailed"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
		if lines := log.Lines(); len(lines) != 1 || !strings.Contains(lines[0], "not kept for MinHold") {
			t.Errorf("logged %q", lines)
		}
	})
}

// The key that MinHold keeps is held by nobody: the same caller may wait for it.
func TestMinHoldIsNoReentrancy(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newStrategy(t, newMemory(t), core.Options{MinHold: time.Minute, Wait: core.WaitForever})
		start := time.Now()
		var inner context.Context
		if err := s.Do(t.Context(), "key", func(ctx context.Context) error { inner = ctx; return nil }); err != nil {
			t.Fatal(err)
		}
		if err := s.Do(context.WithoutCancel(inner), "key", nothing); err != nil || time.Since(start) != time.Minute {
			t.Errorf("got %v after %v, want the key after a minute", err, time.Since(start))
		}
	})
}

func TestMaxHoldEndsTheHold(t *testing.T) {
	for _, maxHold := range []time.Duration{5 * time.Second, third, time.Hour, 1} {
		t.Run(maxHold.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				s := newStrategy(t, store, core.Options{MaxHold: maxHold, Hooks: rec.hooks(nil)})
				err := s.Do(t.Context(), "key", func(ctx context.Context) error {
					<-ctx.Done()
					if at := time.Since(store.start); at != maxHold {
						t.Errorf("cancelled at %v, want %v", at, maxHold)
					}
					if !errors.Is(context.Cause(ctx), core.ErrLost) {
						t.Errorf("cause %v, want ErrLost", context.Cause(ctx))
					}
					time.Sleep(time.Hour) // hangs
					return ctx.Err()
				})
				if lost, ok := errors.AsType[*core.LostError](err); !ok || !strings.Contains(lost.Error(), "MaxHold") {
					t.Errorf("got %v, want a loss because of MaxHold", err)
				}
				for _, c := range store.seen("renew") {
					if c.at >= maxHold {
						t.Errorf("%v is after MaxHold", c)
					}
				}
				if got := rec.names(); !strings.HasSuffix(got, "Lost Released") {
					t.Errorf("hooks %s, want Lost and Released at the end", got)
				}
				wantFree(t, store.real, "key")
			})
		})
	}
}

// A slow renewal that is answered after MaxHold, or at that very moment, does not
// prolong it.
func TestMaxHoldWithARenewalInFlight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for i := range 40 {
			store := newScriptedStore(t)
			store.renew = func(_ context.Context, r request) (bool, error) {
				deaf([]time.Duration{15 * time.Second, 20 * time.Second}[i%2] - r.at)
				return store.confirm(r)
			}
			s := newStrategy(t, store, core.Options{MaxHold: 15 * time.Second})
			err := s.Do(t.Context(), "key", func(ctx context.Context) error {
				<-ctx.Done()
				if at := time.Since(store.start); at != 15*time.Second {
					t.Errorf("cancelled at %v, want 15s", at)
				}
				return ctx.Err()
			})
			if !errors.Is(err, core.ErrLost) || !strings.Contains(err.Error(), "MaxHold") {
				t.Errorf("got %v, want ErrLost because of MaxHold", err)
			}
		}
	})
}
