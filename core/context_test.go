package core_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

func TestTokenOutsideOfALock(t *testing.T) {
	t.Parallel()
	if token, ok := core.Token(t.Context()); token != 0 || ok {
		t.Errorf("Token: %v, %v, want 0, false", token, ok)
	}
	if token, ok := core.TokenFor(t.Context(), "key"); token != 0 || ok {
		t.Errorf("TokenFor: %v, %v, want 0, false", token, ok)
	}
}

// Under an inner lock, Token is the inner lock's. Handed to the outer lock's
// resource it would be refused, or worse, refuse others for ever.
func TestTokenForUnderNestedLocks(t *testing.T) {
	t.Parallel()
	s := newStrategy(t, newMemory(t), core.Options{})
	other := newStrategy(t, newMemory(t), core.Options{})
	check := func(ctx context.Context, key string, want int64) {
		t.Helper()
		if got, ok := core.TokenFor(ctx, key); got != want || ok != (want != 0) {
			t.Errorf("TokenFor(%q): %v, %v, want %v", key, got, ok, want)
		}
	}
	err := s.Do(t.Context(), "outer", func(ctx context.Context) error {
		outer, _ := core.Token(ctx)
		check(ctx, "outer", outer)
		check(ctx, "inner", 0)
		lease, err := s.Acquire(ctx, "lease")
		if err != nil {
			return err
		}
		defer lease.Release()
		return s.Do(lease.Context(ctx), "inner", func(ctx context.Context) error {
			inner, ok := core.Token(ctx)
			if !ok || inner <= lease.Token() || lease.Token() <= outer {
				t.Errorf("tokens %d, %d, %d of one store do not grow", outer, lease.Token(), inner)
			}
			for name, ctx := range map[string]context.Context{"ctx": ctx, "detached": context.WithoutCancel(ctx), "child": context.WithValue(ctx, ctxKey{}, 1)} {
				t.Log(name)
				check(ctx, "inner", inner)
				check(ctx, "lease", lease.Token())
				check(ctx, "outer", outer)
				check(ctx, "other", 0)
			}
			// The same key on another store is another lock: the innermost counts.
			return other.Do(ctx, "outer", func(ctx context.Context) error {
				again, _ := core.Token(ctx)
				if again == outer {
					t.Error("two stores gave one token")
				}
				check(ctx, "outer", again)
				check(ctx, "inner", inner)
				return nil
			})
		})
	})
	if err != nil {
		t.Error(err)
	}
}

// The cause of a callback's context says what ended it.
func TestCallbackContextAfterTheCallback(t *testing.T) {
	t.Parallel()
	s := newStrategy(t, newMemory(t), core.Options{})
	var kept context.Context
	if err := s.Do(t.Context(), "key", func(ctx context.Context) error { kept = ctx; return nil }); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(kept.Err(), context.Canceled) || !errors.Is(context.Cause(kept), core.ErrReleased) {
		t.Errorf("err %v, cause %v, want it cancelled because of ErrReleased", kept.Err(), context.Cause(kept))
	}
	// Work that was left behind can see that its lock is gone, and may lock anew.
	ran, err := s.TryDo(context.WithoutCancel(kept), "key", nothing)
	if !ran || err != nil {
		t.Errorf("TryDo after the callback: %v, %v", ran, err)
	}
}

func TestReentrancyIsRefusedAtOnce(t *testing.T) {
	store := newMemory(t)
	o := core.Options{Wait: core.WaitForever}
	s := newStrategy(t, store, o)
	for _, tt := range []struct {
		name string
		s    *core.Strategy
		ctx  func(context.Context) context.Context
		want bool // refused
	}{
		{"same strategy", s, func(ctx context.Context) context.Context { return ctx }, true},
		{"another strategy on the store", newStrategy(t, store, o), func(ctx context.Context) context.Context { return ctx }, true},
		{"the store in a wrapper", newStrategy(t, wrapper{store}, o), func(ctx context.Context) context.Context { return ctx }, true},
		{"in two wrappers", newStrategy(t, &wrapper{wrapper{store}}, o), func(ctx context.Context) context.Context { return ctx }, true},
		{"detached context", s, context.WithoutCancel, true},
		{"child context", s, func(ctx context.Context) context.Context { return context.WithValue(ctx, ctxKey{}, 1) }, true},
		{"another store", newStrategy(t, newMemory(t), o), func(ctx context.Context) context.Context { return ctx }, false},
		{"a wrapper that hides its store", newStrategy(t, secret{newMemory(t)}, o), func(ctx context.Context) context.Context { return ctx }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := s.Do(t.Context(), "key", func(ctx context.Context) error {
				return s.Do(ctx, "between", func(ctx context.Context) error {
					ctx = tt.ctx(ctx)
					ran, err := tt.s.TryDo(ctx, "key", nothing)
					if ran == tt.want || (err == nil) == tt.want {
						t.Errorf("TryDo: %v, %v, want refused: %v", ran, err, tt.want)
					}
					if lease, err := tt.s.Acquire(ctx, "key"); (err != nil) != tt.want {
						t.Errorf("Acquire: %v, want refused: %v", err, tt.want)
					} else {
						_ = lease.Release()
					}
					err = tt.s.Do(ctx, "key", nothing)
					if e, ok := errors.AsType[*core.NotAcquiredError](err); ok != tt.want || ok && (!e.Reentrant || e.Key != "key" || e.Tries != 0 || !strings.Contains(e.Error(), "reentrant")) {
						t.Errorf("Do: %v, want refused: %v", err, tt.want)
					}
					if tt.want != core.IsRejection(err) {
						t.Errorf("IsRejection(%v) is %v", err, !tt.want)
					}
					// Another key is another lock.
					return tt.s.Do(ctx, "another", nothing)
				})
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestReentrancyNeverReachesTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec := newScriptedStore(t), newRecorder()
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever, Hooks: rec.hooks(nil)})
		if err := s.Do(t.Context(), "key", func(ctx context.Context) error {
			_ = s.Do(ctx, "key", mustNotRun(t))
			return nil
		}); err != nil {
			t.Error(err)
		}
		wantCalls(t, store, "acquire@0s", "release@0s")
		if got, want := rec.names(), "Acquired Rejected Released"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
	})
}

// A lease that was lost is not held: whoever asks for the key again waits for
// whoever has it now, maybe himself of a moment ago.
func TestReentrancyEndsWithTheLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.renew = func(_ context.Context, r request) (bool, error) {
			if r.n == 1 {
				_ = store.real.Release(context.Background(), r.key, r.owner) // an operator broke it
			}
			return store.confirm(r)
		}
		s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
		err := s.Do(t.Context(), "key", func(ctx context.Context) error {
			lost, _ := core.Token(ctx)
			<-ctx.Done()
			return s.Do(context.WithoutCancel(ctx), "key", func(ctx context.Context) error {
				if token, _ := core.TokenFor(ctx, "key"); token <= lost {
					t.Errorf("token %d after %d", token, lost)
				}
				time.Sleep(ttl)
				return nil
			})
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// An inner lock's context is a child of the outer's: losing the outer cancels
// the work under both, with the outer's key in the cause.
func TestLossOfTheOuterLockEndsTheInner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.renew = func(_ context.Context, r request) (bool, error) {
			if r.key == "outer" {
				return false, nil
			}
			return store.confirm(r)
		}
		s := newStrategy(t, store, core.Options{})
		err := s.Do(t.Context(), "outer", func(ctx context.Context) error {
			err := s.Do(ctx, "inner", func(ctx context.Context) error {
				<-ctx.Done()
				if lost, ok := errors.AsType[*core.LostError](context.Cause(ctx)); !ok || lost.Key != "outer" {
					t.Errorf("cause %v, want the loss of outer", context.Cause(ctx))
				}
				time.Sleep(ttl)
				wantHeld(t, store.real, "inner") // still protected
				return ctx.Err()
			})
			if errors.Is(err, core.ErrLost) {
				t.Errorf("inner Do: %v, want no loss: that lease was held", err)
			}
			return err
		})
		if lost, ok := errors.AsType[*core.LostError](err); !ok || lost.Key != "outer" {
			t.Errorf("outer Do: %v, want the loss of outer", err)
		}
		wantFree(t, store.real, "inner")
	})
}
