package core_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testlog"
)

func TestDoRunsTheCallbackUnderTheLease(t *testing.T) {
	t.Parallel()
	store := newMemory(t)
	s := newStrategy(t, store, core.Options{})
	caller := goroutine()
	ran := 0
	err := s.Do(context.WithValue(t.Context(), ctxKey{}, "value"), "key", func(ctx context.Context) error {
		ran++
		if got := goroutine(); got != caller {
			t.Errorf("the callback runs on %s, want the caller's %s", got, caller)
		}
		if ctx.Value(ctxKey{}) != "value" || ctx.Err() != nil {
			t.Errorf("callback's context: value %v, err %v", ctx.Value(ctxKey{}), ctx.Err())
		}
		wantHeld(t, store, "key")
		return nil
	})
	if ran != 1 || err != nil {
		t.Errorf("callback ran %d times, err %v, want once and nil", ran, err)
	}
	if n := store.Len(); n != 0 {
		t.Errorf("%d leases left, want none", n)
	}
}

func TestDoReturnsTheCallbacksError(t *testing.T) {
	t.Parallel()
	s := newStrategy(t, newMemory(t), core.Options{})
	want := errors.New("mine")
	if err := s.Do(t.Context(), "key", func(context.Context) error { return want }); err != want { //nolint:errorlint // unchanged, not wrapped
		t.Errorf("Do: %v, want the callback's error itself", err)
	}
	if ran, err := s.TryDo(t.Context(), "key", func(context.Context) error { return want }); !ran || err != want { //nolint:errorlint // unchanged
		t.Errorf("TryDo: %v, %v, want true and the callback's error itself", ran, err)
	}
	n, err := core.Do(t.Context(), s, "key", func(context.Context) (int, error) { return 7, want })
	if n != 7 || err != want { //nolint:errorlint // unchanged
		t.Errorf("Do[T]: %v, %v, want what the callback returned", n, err)
	}
}

func TestDoWithAResult(t *testing.T) {
	t.Parallel()
	store := newMemory(t)
	s := newStrategy(t, store, core.Options{})
	n, err := core.Do(t.Context(), s, "key", func(ctx context.Context) (int64, error) {
		token, _ := core.TokenFor(ctx, "key")
		return token, nil
	})
	if n == 0 || err != nil {
		t.Errorf("got %v, %v, want the token", n, err)
	}
	occupy(t, store, "key", time.Hour)
	n, err = core.Do(t.Context(), s, "key", func(context.Context) (int64, error) {
		t.Error("the callback ran")
		return 1, nil
	})
	if n != 0 || !core.IsRejection(err) {
		t.Errorf("got %v, %v, want 0 and a rejection", n, err)
	}
}

func TestDoRefusesBadArguments(t *testing.T) {
	t.Parallel()
	store, rec := newScriptedStore(t), newRecorder()
	s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
	var noCtx context.Context
	for _, tt := range []struct {
		name string
		do   func() error
	}{
		{"Do, nil callback", func() error { return s.Do(t.Context(), "key", nil) }},
		{"TryDo, nil callback", func() error { _, err := s.TryDo(t.Context(), "key", nil); return err }},
		{"Do[T], nil callback", func() error { _, err := core.Do[int](t.Context(), s, "key", nil); return err }},
		{"Do, nil context", func() error { return s.Do(noCtx, "key", mustNotRun(t)) }},
		{"TryDo, nil context", func() error { _, err := s.TryDo(noCtx, "key", mustNotRun(t)); return err }},
		{"Acquire, nil context", func() error { _, err := s.Acquire(noCtx, "key"); return err }},
		{"Do, empty key", func() error { return s.Do(t.Context(), "", mustNotRun(t)) }},
		{"TryDo, long key", func() error {
			_, err := s.TryDo(t.Context(), strings.Repeat("k", 513), mustNotRun(t))
			return err
		}},
		{"Acquire, NUL in key", func() error { _, err := s.Acquire(t.Context(), "\x00"); return err }},
	} {
		if err := tt.do(); !errors.Is(err, core.ErrInvalid) || !strings.HasPrefix(err.Error(), `lock "`) || len(err.Error()) > 300 {
			t.Errorf("%s: %v, want ErrInvalid with the key", tt.name, err)
		}
	}
	wantCalls(t, store)
	if got := rec.names(); got != "" {
		t.Errorf("hooks ran: %s", got)
	}
}

func TestTryDoSaysWhetherItsCallbackRan(t *testing.T) {
	t.Parallel()
	store := newMemory(t)
	// Wait is for Do: TryDo never waits.
	s := newStrategy(t, store, core.Options{Wait: core.WaitForever})
	free := occupy(t, store, "key", time.Hour)
	if ran, err := s.TryDo(t.Context(), "key", mustNotRun(t)); ran || err != nil {
		t.Errorf("held elsewhere: %v, %v, want false, nil", ran, err)
	}
	free()
	if ran, err := s.TryDo(t.Context(), "key", nothing); !ran || err != nil {
		t.Errorf("free: %v, %v, want true, nil", ran, err)
	}
	if n := store.Len(); n != 0 {
		t.Errorf("%d leases left, want none", n)
	}
}

// The callback hands on the rejection of an inner lock. Whoever takes that for
// his own lock's does the work again, or never.
func TestTryDoTellsAnInnerRejectionFromItsOwn(t *testing.T) {
	t.Parallel()
	store := newMemory(t)
	s := newStrategy(t, store, core.Options{})
	occupy(t, store, "inner", time.Hour)
	inner := func(ctx context.Context) error { return s.Do(ctx, "inner", mustNotRun(t)) }

	ran, err := s.TryDo(t.Context(), "outer", inner)
	if !ran || !core.IsRejection(err) {
		t.Errorf("TryDo: %v, %v, want true and the inner rejection", ran, err)
	}
	err = s.Do(t.Context(), "outer", inner)
	if e, ok := errors.AsType[*core.NotAcquiredError](err); !ok || e.Key != "inner" {
		t.Errorf("Do: %v, want a rejection with the inner key", err)
	}
}

func TestTryDoReturnsFailures(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.acquire = func(context.Context, request) (core.Grant, error) { return core.Grant{}, errServer }
		s := newStrategy(t, store, core.Options{})
		if ran, err := s.TryDo(t.Context(), "key", mustNotRun(t)); ran || !errors.Is(err, core.ErrStore) {
			t.Errorf("store down: %v, %v, want false and ErrStore", ran, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if ran, err := s.TryDo(ctx, "key", mustNotRun(t)); ran || !errors.Is(err, context.Canceled) {
			t.Errorf("ctx ended: %v, %v, want false and its error", ran, err)
		}
	})
}

// TestReleaseWhateverTheCallbackDoes is about the key: free at once after
// return, failure, panic, Goexit and cancellation.
func TestReleaseWhateverTheCallbackDoes(t *testing.T) {
	errMine := errors.New("mine")
	for _, tt := range []struct {
		name      string
		fn        func(context.Context, context.CancelFunc) error
		want      error
		wantPanic any
		goexit    bool
	}{
		{name: "returns", fn: func(context.Context, context.CancelFunc) error { return nil }},
		{name: "fails", fn: func(context.Context, context.CancelFunc) error { return errMine }, want: errMine},
		{name: "panics", fn: func(context.Context, context.CancelFunc) error { panic("boo") }, wantPanic: "boo"},
		{name: "panics with an error", fn: func(context.Context, context.CancelFunc) error { panic(errMine) }, wantPanic: errMine},
		{name: "calls Goexit", fn: func(context.Context, context.CancelFunc) error { runtime.Goexit(); return nil }, goexit: true},
		{name: "is cancelled", fn: func(ctx context.Context, cancel context.CancelFunc) error {
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}, want: context.Canceled},
		{name: "is cancelled and does not care", fn: func(_ context.Context, cancel context.CancelFunc) error { cancel(); return nil }},
	} {
		for _, hooks := range []string{"no hooks", "hooks", "hooks that panic"} {
			t.Run(tt.name+", "+hooks, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					store, rec := newScriptedStore(t), newRecorder()
					o := core.Options{}
					switch hooks {
					case "hooks":
						o.Hooks = rec.hooks(nil)
					case "hooks that panic":
						o.Hooks = rec.hooks(func(string, context.Context, core.Event) { panic("hook") })
					}
					s := newStrategy(t, store, o)
					ctx, cancel := context.WithCancel(context.WithValue(t.Context(), ctxKey{}, "value"))
					defer cancel()
					var err error
					var recovered any
					returned := false
					var wg sync.WaitGroup
					wg.Go(func() {
						defer func() { recovered = recover() }()
						err = s.Do(ctx, "key", func(ctx context.Context) error { return tt.fn(ctx, cancel) })
						returned = true
					})
					wg.Wait()
					if recovered != tt.wantPanic {
						t.Errorf("panic %v, want %v unchanged", recovered, tt.wantPanic)
					}
					if err != tt.want { //nolint:errorlint // unchanged
						t.Errorf("got %v, want %v", err, tt.want)
					}
					if want := tt.wantPanic == nil && !tt.goexit; returned != want {
						t.Errorf("Do returned: %v, want %v", returned, want)
					}
					wantFree(t, store.real, "key")
					wantCalls(t, store, "acquire@0s", "release@0s")
					c := store.seen("release")[0]
					if c.ended != nil || c.bound != 5*time.Second || c.ctx.Value(ctxKey{}) != "value" {
						t.Errorf("release's context: %v, bound %v, value %v; want a live one of 5s with the caller's values", c.ended, c.bound, c.ctx.Value(ctxKey{}))
					}
					if c.ctx.Err() == nil {
						t.Error("release's context still lives after it has returned")
					}
					if want := "Acquired Released"; hooks != "no hooks" && rec.names() != want {
						t.Errorf("hooks %s, want %s", rec.names(), want)
					}
				})
			})
		}
	}
}

func TestReleaseIsBounded(t *testing.T) {
	for ttl, want := range map[time.Duration]time.Duration{time.Second: time.Second, 5 * time.Second: 5 * time.Second, time.Minute: 5 * time.Second} {
		t.Run(fmt.Sprint("ttl ", ttl), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store, rec := newScriptedStore(t), newRecorder()
				store.release = func(ctx context.Context, _ request) error { return hang(ctx) }
				s := newStrategy(t, store, core.Options{TTL: ttl, Hooks: rec.hooks(nil)})
				start := time.Now()
				if err := s.Do(t.Context(), "key", nothing); err != nil {
					t.Errorf("got %v, want nil: the work is done", err)
				}
				if took := time.Since(start); took != want {
					t.Errorf("Do returned after %v, want %v", took, want)
				}
				if e := rec.one(t, "ReleaseFailed"); !errors.Is(e.Err, context.DeadlineExceeded) || !errors.Is(e.Err, core.ErrStore) {
					t.Errorf("ReleaseFailed with %v, want the store's time-out", e.Err)
				}
			})
		})
	}
}

func TestFailedReleaseGoesToHookAndLogAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
		store.release = func(context.Context, request) error { return errServer }
		s := newStrategy(t, store, core.Options{Name: "billing", Hooks: rec.hooks(nil), Logger: log.Logger()})
		var token int64
		if err := s.Do(t.Context(), "key", func(ctx context.Context) error {
			token, _ = core.Token(ctx)
			return nil
		}); err != nil {
			t.Errorf("got %v, want nil", err)
		}
		if got, want := rec.names(), "Acquired ReleaseFailed"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
		e, ok := errors.AsType[*core.StoreError](rec.one(t, "ReleaseFailed").Err)
		if !ok || e.Op != "release" || e.Key != "key" || e.Err != errServer { //nolint:errorlint // unchanged
			t.Errorf("hook got %v, want a StoreError with op, key and the store's error", rec.one(t, "ReleaseFailed").Err)
		}
		lines := log.Lines()
		if len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0], "lock=billing") ||
			!strings.Contains(lines[0], "key=key") || !strings.Contains(lines[0], fmt.Sprint("token=", token)) || !strings.Contains(lines[0], errServer.Error()) {
			t.Errorf("logged %q, want one warning with lock, key, token and error", lines)
		}
	})
}

// Release goes out when nobody can be renewing any more: a renewal that is
// still on its way has been cancelled before.
func TestReleaseCancelsTheRenewalFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		var renewal context.Context
		store.renew = func(ctx context.Context, _ request) (bool, error) {
			renewal = ctx
			return false, hang(ctx)
		}
		store.release = func(ctx context.Context, r request) error {
			if renewal.Err() == nil {
				t.Error("the renewal in flight was not cancelled before the release")
			}
			return store.real.Release(ctx, r.key, r.owner)
		}
		rec := newRecorder()
		s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
		if err := s.Do(t.Context(), "key", until(10*time.Second, nil)); err != nil {
			t.Error(err)
		}
		if n := len(store.seen("renew")); n != 1 {
			t.Errorf("%d renewals, want the one in flight", n)
		}
		// A renewal that was cancelled because it is not needed has not failed.
		time.Sleep(time.Minute)
		if got, want := rec.names(), "Acquired Released"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
	})
}

// A renewal that is executed after the release must not bring the lease back,
// nor may its answer disturb anybody.
func TestReleaseBeforeALateRenewal(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
		store.renew = func(_ context.Context, r request) (bool, error) {
			deaf(5 * time.Second)
			return store.confirm(r)
		}
		s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil), Logger: log.Logger()})
		if err := s.Do(t.Context(), "key", until(10*time.Second, nil)); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		wantFree(t, store.real, "key")
		if got, want := rec.names(), "Acquired Released"; got != want {
			t.Errorf("hooks %s, want %s", got, want)
		}
		if log.String() != "" {
			t.Errorf("logged %s", log.String())
		}
	})
}

// After the end nothing goes on: no timer that was forgotten sends a renewal.
func TestNothingIsSentAfterTheRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		s := newStrategy(t, store, core.Options{})
		if err := s.Do(t.Context(), "key", until(50*time.Second, nil)); err != nil {
			t.Fatal(err)
		}
		before := len(store.seen())
		if before < 6 {
			t.Errorf("only %d calls in 50s", before)
		}
		time.Sleep(time.Hour)
		if after := len(store.seen()); after != before {
			t.Errorf("calls after the release: %v", store.seen()[before:])
		}
	})
}
