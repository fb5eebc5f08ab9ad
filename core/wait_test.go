package core_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testlog"
)

const ms = time.Millisecond

func TestWaitingSchedule(t *testing.T) {
	for _, tt := range []struct {
		wait time.Duration
		want []time.Duration // of the tries
	}{
		{0, []time.Duration{0}},
		{1, []time.Duration{0, 1}},
		{50 * ms, []time.Duration{0, 50 * ms}},
		{51 * ms, []time.Duration{0, 50 * ms, 51 * ms}},
		{2 * time.Second, []time.Duration{0, 50 * ms, 150 * ms, 350 * ms, 750 * ms, 1550 * ms, 2000 * ms}},
		{5 * time.Second, []time.Duration{0, 50 * ms, 150 * ms, 350 * ms, 750 * ms, 1550 * ms, 2550 * ms, 3550 * ms, 4550 * ms, 5000 * ms}},
	} {
		t.Run(tt.wait.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				occupy(t, store.real, "key", time.Hour)
				s := newStrategy(t, store, core.Options{Wait: tt.wait, Hooks: rec.hooks(nil)})
				err := s.Do(t.Context(), "key", mustNotRun(t))
				if got := store.times("acquire"); !slices.Equal(got, tt.want) {
					t.Errorf("tries at %v, want %v", got, tt.want)
				}
				e, ok := errors.AsType[*core.NotAcquiredError](err)
				if !ok || !errors.Is(err, core.ErrNotAcquired) || !core.IsRejection(err) {
					t.Fatalf("got %v, want a NotAcquiredError", err)
				}
				if e.Key != "key" || e.Waited != tt.wait || e.Tries != len(tt.want) || e.Reentrant || e.Err != nil {
					t.Errorf("got %+v, want key, waited %v, %d tries", *e, tt.wait, len(tt.want))
				}
				if e.Code() != "LOCK_NOT_ACQUIRED" || e.HTTPStatus() != 409 {
					t.Errorf("code %s, status %d", e.Code(), e.HTTPStatus())
				}
				want := "Waiting Rejected"
				if tt.wait == 0 {
					want = "Rejected"
				}
				if got := rec.names(); got != want {
					t.Errorf("hooks %s, want %s", got, want)
				}
				if len(store.seen("release")) != 0 {
					t.Error("a release was sent, though nothing had been granted")
				}
			})
		})
	}
}

func TestWaitForEverHasNoBound(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		occupy(t, store.real, "key", time.Hour)
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
		start := time.Now()
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(start); waited != time.Hour {
			t.Errorf("got the key after %v, want the moment that it ran out", waited)
		}
	})
}

func TestWaiterGetsTheKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec := newScriptedStore(t), newRecorder()
		free := occupy(t, store.real, "key", time.Hour)
		s := newStrategy(t, store, core.Options{Wait: time.Minute, Hooks: rec.hooks(nil)})
		time.AfterFunc(400*ms, free)
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
		if got, want := rec.names(), "Waiting Acquired Released"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
		if e := rec.one(t, "Waiting"); e.Tries != 1 || e.Token != 0 || e.Held != 0 || e.Err != nil || e.at != 0 {
			t.Errorf("Waiting got %+v", e.Event)
		}
		if e := rec.one(t, "Acquired"); e.Tries != 5 || e.Waited != 750*ms || e.Token == 0 || e.Err != nil || e.Key != "key" {
			t.Errorf("Acquired got %+v, want 5 tries in 750ms", e.Event)
		}
	})
}

// Grant.Left says when the present lease runs out: no reason to sleep longer.
func TestWaiterWakesWhenTheLeaseRunsOut(t *testing.T) {
	for _, left := range []time.Duration{10 * ms, 49 * ms, 130 * ms, 7*time.Second + 3*ms} {
		t.Run(left.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := newScriptedStore(t)
				occupy(t, store.real, "key", left)
				s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
				start := time.Now()
				if err := s.Do(t.Context(), "key", nothing); err != nil {
					t.Fatal(err)
				}
				if waited := time.Since(start); waited != left {
					t.Errorf("waited %v for a lease of %v", waited, left)
				}
			})
		})
	}
}

// A store whose hint is always "any moment now" is not asked in a busy loop.
func TestWaiterIsNotHurriedByAWrongHint(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.acquire = func(context.Context, request) (core.Grant, error) { return core.Grant{Left: 1}, nil }
		s := newStrategy(t, store, core.Options{Wait: time.Second})
		err := s.Do(t.Context(), "key", mustNotRun(t))
		if e, ok := errors.AsType[*core.NotAcquiredError](err); !ok || e.Tries > 101 {
			t.Errorf("got %v, want at most a try every 10ms", err)
		}
		// Nor is a negative or a huge one.
		store.acquire = func(_ context.Context, r request) (core.Grant, error) {
			return core.Grant{Left: []time.Duration{-1, 1 << 62}[r.n%2]}, nil
		}
		err = s.Do(t.Context(), "key", mustNotRun(t))
		if e, ok := errors.AsType[*core.NotAcquiredError](err); !ok || e.Tries != 6 {
			t.Errorf("got %v, want the tries of the usual schedule", err)
		}
	})
}

// errGone is why a caller went away.
var errGone = errors.New("the user closed the window")

// TestContextEndsWhileWaiting has a caller who goes away at every step of the
// way. Each time Do is back at once, the callback does not run, nothing is left,
// and the error says why.
func TestContextEndsWhileWaiting(t *testing.T) {
	held := core.Grant{Left: time.Hour}
	for _, tt := range []struct {
		name    string
		acquire func(store *scriptedStore, end func()) func(context.Context, request) (core.Grant, error)
		release func(context.Context, request) error
		back    time.Duration // when Do is
		racing  bool          // a try begins at that moment, and its context may have ended or not
		late    time.Duration // when the key is free at last, after that
	}{
		{
			name: "while it sleeps",
			acquire: func(_ *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				time.AfterFunc(1234*ms, end)
				return func(context.Context, request) (core.Grant, error) { return held, nil }
			},
			back: 1234 * ms,
		}, {
			name: "at the very moment of a poll",
			acquire: func(_ *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				time.AfterFunc(1550*ms, end)
				return func(context.Context, request) (core.Grant, error) { return held, nil }
			},
			back: 1550 * ms, racing: true,
		}, {
			name: "while the store hangs",
			acquire: func(_ *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				time.AfterFunc(time.Second, end)
				return func(ctx context.Context, _ request) (core.Grant, error) { return core.Grant{}, hang(ctx) }
			},
			back: time.Second,
		}, {
			name: "while the store answers no",
			acquire: func(_ *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				return func(context.Context, request) (core.Grant, error) { end(); return held, nil }
			},
		}, {
			name: "while the store grants",
			acquire: func(store *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				return func(_ context.Context, r request) (core.Grant, error) { end(); return store.grant(r) }
			},
		}, {
			name: "while the store fails with an error of its own",
			acquire: func(_ *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				return func(context.Context, request) (core.Grant, error) { end(); return core.Grant{}, errServer }
			},
		}, {
			name: "the reply to a grant is lost",
			acquire: func(store *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				time.AfterFunc(time.Second, end)
				return func(ctx context.Context, r request) (core.Grant, error) {
					if _, err := store.grant(r); err != nil {
						return core.Grant{}, err
					}
					return core.Grant{}, hang(ctx)
				}
			},
			back: time.Second,
		}, {
			name: "and the release hangs too",
			acquire: func(_ *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				return func(context.Context, request) (core.Grant, error) { end(); return core.Grant{}, errServer }
			},
			release: func(ctx context.Context, _ request) error { return hang(ctx) },
			late:    5 * time.Second,
		}, {
			name: "after the store failed, while it is cleaned up",
			acquire: func(_ *scriptedStore, end func()) func(context.Context, request) (core.Grant, error) {
				time.AfterFunc(300*ms, end)
				return func(context.Context, request) (core.Grant, error) { return core.Grant{}, errServer }
			},
			release: func(ctx context.Context, _ request) error { return hang(ctx) },
			back:    300 * ms, late: 5 * time.Second,
		},
	} {
		for _, how := range []string{"cancelled", "cancelled with a cause", "deadline"} {
			t.Run(tt.name+", "+how, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					store, rec := newScriptedStore(t), newRecorder()
					ctx, wantErr, wantCause, end := endable(t, how)
					store.acquire = tt.acquire(store, end)
					store.release = tt.release
					s := newStrategy(t, store, core.Options{Wait: time.Minute, Hooks: rec.hooks(nil)})
					start := time.Now()
					ran, err := false, s.Do(ctx, "key", mustNotRun(t))
					if took := time.Since(start); took != tt.back {
						t.Errorf("back after %v, want %v", took, tt.back)
					}
					if ran {
						t.Error("the callback ran")
					}
					if !errors.Is(err, wantErr) || !errors.Is(err, wantCause) {
						t.Errorf("got %v, want it to match %v and %v", err, wantErr, wantCause)
					}
					if core.IsRejection(err) || errors.Is(err, core.ErrInvalid) || errors.Is(err, core.ErrLost) {
						t.Errorf("%v is taken for something else", err)
					}
					if !strings.HasPrefix(err.Error(), `lock "key": `) || !strings.Contains(err.Error(), wantCause.Error()) {
						t.Errorf("%q does not name key and cause", err)
					}
					for _, c := range store.seen("acquire") {
						if c.ended != nil && !(tt.racing && c.at == tt.back) {
							t.Errorf("%v had a context that had ended", c)
						}
					}
					if e := rec.one(t, "AcquireFailed"); e.Err != err { //nolint:errorlint // the same
						t.Errorf("AcquireFailed got %v, want what Do returned", e.Err)
					}
					if got := rec.names(); got != "AcquireFailed" && got != "Waiting AcquireFailed" {
						t.Errorf("hooks %s", got)
					}
					time.Sleep(tt.late)
					synctest.Wait() // for the release in the background
					if tt.release == nil {
						wantFree(t, store.real, "key")
					}
					calls := len(store.seen())
					time.Sleep(time.Hour)
					if got := store.seen()[calls:]; len(got) != 0 {
						t.Errorf("calls after all was over: %v", got)
					}
				})
			})
		}
	}
}

// The context ends during a try that is the only one: no waiting comes after it
// in which it could be noticed.
func TestContextEndsDuringTheOnlyTry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, g := range []core.Grant{{Left: time.Hour}, {Acquired: true, Token: 1}} {
			store := newScriptedStore(t)
			ctx, cancel := context.WithCancel(t.Context())
			store.acquire = func(context.Context, request) (core.Grant, error) {
				cancel()
				return g, nil
			}
			ran, err := newStrategy(t, store, core.Options{}).TryDo(ctx, "key", mustNotRun(t))
			if ran || !errors.Is(err, context.Canceled) || core.IsRejection(err) {
				t.Errorf("store says %+v: %v, %v, want the context's error", g, ran, err)
			}
		}
	})
}

// endable returns a context, what its Err and Cause will be, and what ends it.
func endable(t *testing.T, how string) (ctx context.Context, err, cause error, end func()) { //nolint:revive,staticcheck // the errors are what is tested
	t.Helper()
	switch how {
	case "cancelled":
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		return ctx, context.Canceled, context.Canceled, cancel
	case "cancelled with a cause":
		ctx, cancel := context.WithCancelCause(t.Context())
		t.Cleanup(func() { cancel(nil) })
		return ctx, context.Canceled, errGone, func() { cancel(errGone) }
	default: // a deadline, as a context of one's own may have it
		ctx := &manualCtx{Context: t.Context(), done: make(chan struct{})}
		return ctx, context.DeadlineExceeded, context.DeadlineExceeded, ctx.expire
	}
}

// manualCtx is a context that the standard library does not know, whose
// deadline passes when the test says so.
type manualCtx struct {
	context.Context
	done chan struct{}
}

func (c *manualCtx) expire()               { close(c.done) }
func (c *manualCtx) Done() <-chan struct{} { return c.done }
func (c *manualCtx) Value(any) any         { return nil }
func (c *manualCtx) Err() error {
	select {
	case <-c.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

func TestContextThatHasEndedNeverReachesTheStore(t *testing.T) {
	for _, how := range []string{"cancelled", "cancelled with a cause", "deadline"} {
		t.Run(how, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				ctx, wantErr, wantCause, end := endable(t, how)
				end()
				s := newStrategy(t, store, core.Options{Wait: core.WaitForever, Hooks: rec.hooks(nil)})
				_, errTry := s.TryDo(ctx, "key", mustNotRun(t))
				_, errT := core.Do(ctx, s, "key", func(context.Context) (int, error) { return 0, mustNotRun(t)(nil) })
				lease, errAcquire := s.Acquire(ctx, "key")
				for what, err := range map[string]error{"Do": s.Do(ctx, "key", mustNotRun(t)), "TryDo": errTry, "Do[T]": errT, "Acquire": errAcquire} {
					if !errors.Is(err, wantErr) || !errors.Is(err, wantCause) {
						t.Errorf("%s: %v, want it to match %v and %v", what, err, wantErr, wantCause)
					}
				}
				if lease != nil {
					t.Error("Acquire returned a lease")
				}
				wantCalls(t, store)
				if got, want := rec.names(), strings.TrimSpace(strings.Repeat("AcquireFailed ", 4)); got != want {
					t.Errorf("hooks %s, want %s", got, want)
				}
			})
		})
	}
}

// Two outcomes, two errors: waiting time over, and context over.
func TestWaitThatRanOutIsNoContextError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newMemory(t)
		occupy(t, store, "key", time.Hour)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := newStrategy(t, store, core.Options{Wait: time.Second}).Do(ctx, "key", mustNotRun(t))
		if errors.Is(err, context.DeadlineExceeded) || !core.IsRejection(err) {
			t.Errorf("waiting time over: %v, want a rejection and no context error", err)
		}
		err = newStrategy(t, store, core.Options{Wait: core.WaitForever}).Do(ctx, "key", mustNotRun(t))
		if !errors.Is(err, context.DeadlineExceeded) || core.IsRejection(err) {
			t.Errorf("context over: %v, want the context's error and no rejection", err)
		}
	})
}

func TestTryIsBoundedByTTL(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.acquire = func(ctx context.Context, r request) (core.Grant, error) {
			_, _ = store.grant(r)
			return core.Grant{}, hang(ctx)
		}
		s := newStrategy(t, store, core.Options{TTL: 3 * time.Second, Wait: time.Hour})
		start := time.Now()
		err := s.Do(t.Context(), "key", mustNotRun(t))
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("the try took %v, want its ttl of 3s", took)
		}
		if !errors.Is(err, core.ErrStore) || core.IsRejection(err) {
			t.Errorf("got %v, want ErrStore", err)
		}
		if got := store.seen("acquire")[0].bound; got != 3*time.Second {
			t.Errorf("the store was told to take at most %v, want 3s", got)
		}
		wantFree(t, store.real, "key")

		// The caller's own deadline counts if it is sooner.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		if err := s.Do(ctx, "key", mustNotRun(t)); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, core.ErrStore) {
			t.Errorf("got %v, want the caller's deadline", err)
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("the try took %v, want the caller's second", took)
		}
		if got := store.seen("acquire")[1].bound; got != time.Second {
			t.Errorf("the store was told to take at most %v, want 1s", got)
		}
	})
}

func TestAcquireErrorIsFollowedByOneRelease(t *testing.T) {
	for _, granted := range []bool{true, false} {
		t.Run(fmt.Sprint("granted: ", granted), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				store.acquire = func(_ context.Context, r request) (core.Grant, error) {
					if granted {
						_, _ = store.grant(r)
					}
					return core.Grant{}, errServer
				}
				s := newStrategy(t, store, core.Options{Wait: time.Hour, Hooks: rec.hooks(nil)})
				ctx := context.WithValue(t.Context(), ctxKey{}, "value")
				err := s.Do(ctx, "key", mustNotRun(t))
				e, ok := errors.AsType[*core.StoreError](err)
				if !ok || e.Op != "acquire" || e.Key != "key" || e.Err != errServer || !errors.Is(err, core.ErrStore) { //nolint:errorlint // unchanged
					t.Errorf("got %v, want a StoreError with op, key and the store's error", err)
				}
				wantCalls(t, store, "acquire@0s", "release@0s")
				acquire, release := store.seen("acquire")[0], store.seen("release")[0]
				if acquire.owner != release.owner {
					t.Error("the release was for another owner")
				}
				if release.ended != nil || release.bound != 5*time.Second || release.ctx.Value(ctxKey{}) != "value" {
					t.Errorf("release's context: %v, bound %v, value %v; want a live one of 5s with the caller's values", release.ended, release.bound, release.ctx.Value(ctxKey{}))
				}
				wantFree(t, store.real, "key")
				if got, want := rec.names(), "AcquireFailed"; got != want {
					t.Errorf("hooks %s, want %s", got, want)
				}
				if e := rec.one(t, "AcquireFailed"); e.Err != err || e.Tries != 1 { //nolint:errorlint // the same
					t.Errorf("AcquireFailed got %+v, want what Do returned", e.Event)
				}
			})
		})
	}
}

func TestReleaseAfterAcquireErrorIsWaitedForASecond(t *testing.T) {
	for _, tt := range []struct {
		name         string
		ttl          time.Duration
		took         time.Duration // by the release
		back         time.Duration // Do
		logged       bool
		hookReleases bool // ReleaseFailed ran
	}{
		{name: "quick", ttl: time.Minute, took: 200 * ms, back: 200 * ms},
		{name: "slow", ttl: time.Minute, took: 4 * time.Second, back: time.Second},
		{name: "for ever", ttl: time.Minute, took: time.Hour, back: time.Second, logged: true},
		{name: "for ever, short ttl", ttl: 300 * ms, took: time.Hour, back: 300 * ms, logged: true, hookReleases: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
				store.acquire = func(context.Context, request) (core.Grant, error) { return core.Grant{}, errServer }
				store.release = func(ctx context.Context, _ request) error {
					select {
					case <-time.After(tt.took):
						return nil
					case <-ctx.Done():
						return hang(ctx)
					}
				}
				s := newStrategy(t, store, core.Options{TTL: tt.ttl, Hooks: rec.hooks(nil), Logger: log.Logger()})
				start := time.Now()
				err := s.Do(t.Context(), "key", mustNotRun(t))
				if took := time.Since(start); took != tt.back {
					t.Errorf("back after %v, want %v", took, tt.back)
				}
				if !errors.Is(err, errServer) || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v, want the acquire's error", err)
				}
				want := "AcquireFailed"
				if tt.hookReleases {
					want = "ReleaseFailed AcquireFailed"
				}
				time.Sleep(time.Hour) // no hook runs after Do has returned
				if got := rec.names(); got != want {
					t.Errorf("hooks %s, want %s", got, want)
				}
				if lines := log.Lines(); len(lines) > 1 || (len(lines) == 1) != tt.logged || tt.logged && !strings.Contains(lines[0], "level=WARN") {
					t.Errorf("logged %q, want a warning: %v", lines, tt.logged)
				}
			})
		})
	}
}

// A grant whose answer comes after the local deadline may have ended already.
func TestLateGrantIsGivenBack(t *testing.T) {
	script := func(store *scriptedStore, late int, by time.Duration) {
		store.acquire = func(ctx context.Context, r request) (core.Grant, error) {
			if r.n > late {
				return store.real.Acquire(ctx, r.key, r.owner, r.ttl)
			}
			g, err := store.grant(r)
			deaf(by)
			return g, err
		}
	}
	t.Run("and tried again", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			store, rec := newScriptedStore(t), newRecorder()
			script(store, 2, 29700*ms)
			s := newStrategy(t, store, core.Options{Wait: core.WaitForever, Hooks: rec.hooks(nil)})
			if err := s.Do(t.Context(), "key", nothing); err != nil {
				t.Error(err)
			}
			wantCalls(t, store, "acquire@0s", "release@29.7s", "acquire@29.75s", "release@59.45s", "acquire@59.55s", "release@59.55s")
			for i, c := range store.seen("acquire") {
				if owner := store.seen("release")[i].owner; owner != c.owner {
					t.Errorf("%v: another owner was released", c)
				}
			}
			if got, want := rec.names(), "Waiting Acquired Released"; got != want {
				t.Errorf("hooks %s, want %s", got, want)
			}
		})
	})
	t.Run("but Wait is over", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			store, rec := newScriptedStore(t), newRecorder()
			script(store, 2, time.Minute)
			s := newStrategy(t, store, core.Options{Wait: 10 * time.Second, Hooks: rec.hooks(nil)})
			err := s.Do(t.Context(), "key", mustNotRun(t))
			e, ok := errors.AsType[*core.NotAcquiredError](err)
			if !ok || e.Err == nil || e.Reentrant || !strings.Contains(err.Error(), e.Err.Error()) || strings.Contains(err.Error(), "held elsewhere") {
				t.Errorf("got %v, want a rejection that says that it was no other holder", err)
			}
			if got, want := rec.names(), "Rejected"; got != want {
				t.Errorf("hooks %s, want %s", got, want)
			}
			wantFree(t, store.real, "key")
			// TryDo does not say "held elsewhere", which would be wrong.
			if ran, err := s.TryDo(t.Context(), "key", mustNotRun(t)); ran || !core.IsRejection(err) {
				t.Errorf("TryDo: %v, %v, want false and the rejection", ran, err)
			}
		})
	})
	t.Run("just in time", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			store := newScriptedStore(t)
			script(store, 1, 29700*ms-1)
			s := newStrategy(t, store, core.Options{})
			ran, err := s.TryDo(t.Context(), "key", nothing)
			if !ran || err != nil {
				t.Errorf("got %v, %v, want it held: a nanosecond of it is left", ran, err)
			}
		})
	})
}

// A store that grants without a usable token would break every fence.
func TestGrantWithoutAUsableTokenIsAStoreError(t *testing.T) {
	for _, token := range []int64{0, -1, 1 << 53, 1<<53 - 1, 1} {
		t.Run(fmt.Sprint(token), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := newScriptedStore(t)
				store.acquire = func(_ context.Context, r request) (core.Grant, error) {
					_, _ = store.grant(r)
					return core.Grant{Acquired: true, Token: token}, nil
				}
				s := newStrategy(t, store, core.Options{})
				ran, err := s.TryDo(t.Context(), "key", nothing)
				if good := token > 0 && token < 1<<53; good != ran || good != (err == nil) || !good && !errors.Is(err, core.ErrStore) {
					t.Errorf("got %v, %v", ran, err)
				}
				wantFree(t, store.real, "key")
			})
		})
	}
}

// An argument that only the store finds wrong was refused before any I/O:
// nothing to clean up.
func TestStoresOwnErrInvalidNeedsNoRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec := newScriptedStore(t), newRecorder()
		store.acquire = func(context.Context, request) (core.Grant, error) {
			return core.Grant{}, fmt.Errorf("%w: ttl of 1s, etcd keeps 2s at least", core.ErrInvalid)
		}
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever, Hooks: rec.hooks(nil)})
		err := s.Do(t.Context(), "key", mustNotRun(t))
		if !errors.Is(err, core.ErrInvalid) || errors.Is(err, core.ErrStore) || !strings.HasPrefix(err.Error(), `lock "key": `) {
			t.Errorf("got %v, want the store's ErrInvalid with the key", err)
		}
		wantCalls(t, store, "acquire@0s")
		if got, want := rec.names(), "AcquireFailed"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
	})
}
