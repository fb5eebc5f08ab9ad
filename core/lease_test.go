package core_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
)

func TestLeaseIsHeldUntilRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec := newScriptedStore(t), newRecorder()
		s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil)})
		lease, err := s.Acquire(t.Context(), "key")
		if err != nil {
			t.Fatal(err)
		}
		if lease.Key() != "key" || lease.Token() == 0 || lease.Err() != nil {
			t.Errorf("key %q, token %d, err %v", lease.Key(), lease.Token(), lease.Err())
		}
		time.Sleep(10 * ttl)
		wantHeld(t, store.real, "key")
		select {
		case <-lease.Done():
			t.Error("Done is closed while the lease is held")
		default:
		}
		if err := lease.Release(); err != nil {
			t.Errorf("Release: %v", err)
		}
		select {
		case <-lease.Done():
		default:
			t.Error("Done is not closed after Release")
		}
		if err := lease.Err(); err != core.ErrReleased { //nolint:errorlint // the sentinel itself
			t.Errorf("Err: %v, want ErrReleased", err)
		}
		wantFree(t, store.real, "key")
		if err := lease.Release(); err != nil {
			t.Errorf("second Release: %v, want what the first returned", err)
		}
		if n := len(store.seen("release")); n != 1 {
			t.Errorf("%d releases, want 1", n)
		}
		if got := rec.names(); !strings.HasPrefix(got, "Acquired Renewed") || !strings.HasSuffix(got, "Renewed Released") {
			t.Errorf("hooks %s", got)
		}
	})
}

// A helper's own time-out on acquiring must not end the lease that it returns.
func TestLeaseOutlivesTheContextOfAcquire(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		s := newStrategy(t, store, core.Options{})
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), ctxKey{}, "value"), time.Second)
		lease, err := s.Acquire(ctx, "key")
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		work := lease.Context(context.Background())
		time.Sleep(3 * ttl)
		select {
		case <-lease.Done():
			t.Error("Done is closed with the context of Acquire")
		default:
		}
		if lease.Err() != nil || work.Err() != nil {
			t.Errorf("ended with the context of Acquire: %v, %v", lease.Err(), work.Err())
		}
		wantHeld(t, store.real, "key")
		if err := lease.Release(); err != nil {
			t.Error(err)
		}
		for _, c := range store.seen("renew", "release") {
			if c.ended != nil || c.ctx.Value(ctxKey{}) != "value" {
				t.Errorf("%v: ctx %v, want a live one with the values of Acquire's", c, c.ended)
			}
		}
	})
}

func TestLeaseErrors(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		s := newStrategy(t, store, core.Options{Wait: time.Second})
		free := occupy(t, store.real, "key", time.Hour)
		start := time.Now()
		if lease, err := s.Acquire(t.Context(), "key"); lease != nil || !core.IsRejection(err) || time.Since(start) != time.Second {
			t.Errorf("held elsewhere: %v, %v after %v, want a rejection after Wait", lease, err, time.Since(start))
		}
		free()
		store.acquire = refuseAcquire
		if lease, err := s.Acquire(t.Context(), "key"); lease != nil || !errors.Is(err, core.ErrStore) {
			t.Errorf("store down: %v, %v, want ErrStore", lease, err)
		}
	})
}

func TestLeaseReleaseTellsHowItEnded(t *testing.T) {
	for _, tt := range []struct {
		name     string
		renew    func(context.Context, request) (bool, error)
		release  func(context.Context, request) error
		work     time.Duration
		want     error
		releases int
	}{
		{"held to the end", nil, nil, time.Minute, nil, 1},
		{"store said no", disown, nil, time.Minute, core.ErrLost, 0},
		{"deadline passed", func(context.Context, request) (bool, error) { return false, errServer }, nil, time.Minute, core.ErrLost, 1},
		{"release failed", nil, refuseRelease, time.Second, core.ErrStore, 1},
		{"lost, and release failed", func(context.Context, request) (bool, error) { return false, errServer }, refuseRelease, time.Minute, core.ErrLost, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := newScriptedStore(t)
				store.renew, store.release = tt.renew, tt.release
				lease, err := newStrategy(t, store, core.Options{}).Acquire(t.Context(), "key")
				if err != nil {
					t.Fatal(err)
				}
				select {
				case <-lease.Done():
					if lost, ok := errors.AsType[*core.LostError](lease.Err()); !ok || lost.Token != lease.Token() || tt.want != core.ErrLost { //nolint:errorlint // the sentinel itself
						t.Errorf("ended early with %v", lease.Err())
					}
				case <-time.After(tt.work):
				}
				for range 2 {
					if err := lease.Release(); !errors.Is(err, tt.want) || tt.want == nil && err != nil {
						t.Errorf("Release: %v, want %v", err, tt.want)
					}
				}
				if e, ok := errors.AsType[*core.StoreError](lease.Release()); tt.want == core.ErrStore && (!ok || e.Op != "release" || e.Key != "key") { //nolint:errorlint // the sentinel itself
					t.Errorf("Release: %v, want a StoreError with op and key", e)
				}
				wantErr := core.ErrReleased
				if tt.want == core.ErrLost { //nolint:errorlint // the sentinel itself
					wantErr = core.ErrLost
				}
				if err := lease.Err(); !errors.Is(err, wantErr) {
					t.Errorf("Err: %v, want %v, also after Release", err, wantErr)
				}
				if core.TimerRuns(lease) {
					t.Error("the timer of the lease still runs")
				}
				if n := len(store.seen("release")); n != tt.releases {
					t.Errorf("%d releases, want %d", n, tt.releases)
				}
			})
		})
	}
}

func TestZeroLeasesAreReleased(t *testing.T) {
	t.Parallel()
	var none *core.Lease
	for name, lease := range map[string]*core.Lease{"nil": none, "zero": {}} {
		if lease.Key() != "" || lease.Token() != 0 || lease.Release() != nil || lease.Release() != nil {
			t.Errorf("%s lease: key %q, token %d, release %v", name, lease.Key(), lease.Token(), lease.Release())
		}
		if err := lease.Err(); !errors.Is(err, core.ErrReleased) {
			t.Errorf("%s lease: Err %v, want ErrReleased", name, err)
		}
		select {
		case <-lease.Done():
		default:
			t.Errorf("%s lease: Done is open", name)
		}
		ctx := lease.Context(context.WithValue(t.Context(), ctxKey{}, "value"))
		if ctx.Err() == nil || !errors.Is(context.Cause(ctx), core.ErrReleased) || ctx.Value(ctxKey{}) != "value" {
			t.Errorf("%s lease: context %v, cause %v", name, ctx.Err(), context.Cause(ctx))
		}
		if token, ok := core.Token(ctx); ok {
			t.Errorf("%s lease: token %d", name, token)
		}
	}
}

// parents in a struct that cannot be a key of a map.
type oddContext struct {
	context.Context
	_ []int
}

// A lease may live for days, and its parent for as long.
func TestLeaseContextOfTheSameParentIsOne(t *testing.T) {
	bubble(t, func(t *testing.T) {
		lease, err := newStrategy(t, newMemory(t), core.Options{}).Acquire(t.Context(), "key")
		if err != nil {
			t.Fatal(err)
		}
		parent, cancel := context.WithCancel(t.Context())
		first := lease.Context(parent)
		for range 1000 {
			if lease.Context(parent) != first {
				t.Fatal("another context for the same parent")
			}
		}
		if lease.Context(t.Context()) == first {
			t.Error("the same context for another parent")
		}
		odd := oddContext{Context: t.Context()}
		if a, b := lease.Context(odd), lease.Context(odd); a.Err() != nil || b.Err() != nil {
			t.Errorf("%v, %v", a.Err(), b.Err())
		}
		if n := core.ChildrenOf(lease); n != 4 {
			t.Errorf("the lease has %d contexts to cancel, want 4", n)
		}
		cancel()
		synctest.Wait()
		if n := core.ChildrenOf(lease); n != 3 || first.Err() == nil {
			t.Errorf("the lease has %d contexts to cancel, want 3, after one has ended: %v", n, first.Err())
		}
		if err := lease.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestLeaseContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		s := newStrategy(t, store, core.Options{})
		acquire := func() *core.Lease {
			lease, err := s.Acquire(t.Context(), "key")
			if err != nil {
				t.Fatal(err)
			}
			return lease
		}

		lease := acquire()
		parent, cancel := context.WithCancelCause(context.WithValue(t.Context(), ctxKey{}, "value"))
		one, two := lease.Context(parent), lease.Context(context.Background())
		if token, ok := core.TokenFor(one, "key"); !ok || token != lease.Token() || one.Value(ctxKey{}) != "value" || one.Err() != nil {
			t.Errorf("context has token %v, value %v, err %v", token, one.Value(ctxKey{}), one.Err())
		}
		if err := s.Do(one, "key", mustNotRun(t)); !core.IsRejection(err) {
			t.Errorf("Do under the lease: %v, want a refusal", err)
		}
		cancel(errGone)
		if one.Err() == nil || !errors.Is(context.Cause(one), errGone) {
			t.Errorf("parent ended: %v, cause %v", one.Err(), context.Cause(one))
		}
		if two.Err() != nil || lease.Err() != nil {
			t.Errorf("the end of one context ended another, or the lease: %v, %v", two.Err(), lease.Err())
		}
		synctest.Wait()
		if err := lease.Release(); err != nil {
			t.Error(err)
		}
		if two.Err() == nil || !errors.Is(context.Cause(two), core.ErrReleased) {
			t.Errorf("released: %v, cause %v, want ErrReleased", two.Err(), context.Cause(two))
		}
		if after := lease.Context(t.Context()); after.Err() == nil || !errors.Is(context.Cause(after), core.ErrReleased) {
			t.Errorf("made after the release: %v, cause %v, want ErrReleased", after.Err(), context.Cause(after))
		}
		if ended := lease.Context(parent); !errors.Is(context.Cause(ended), errGone) {
			t.Errorf("made of an ended parent: cause %v, want the parent's", context.Cause(ended))
		}

		store.renew = disown
		lease = acquire()
		ctx := lease.Context(t.Context())
		<-ctx.Done()
		if cause := context.Cause(ctx); cause != lease.Err() || !errors.Is(cause, core.ErrLost) { //nolint:errorlint // the same
			t.Errorf("lost: cause %v, want Err's %v", cause, lease.Err())
		}
		if after := lease.Context(t.Context()); !errors.Is(context.Cause(after), core.ErrLost) {
			t.Errorf("made after the loss: cause %v, want ErrLost", context.Cause(after))
		}
		_ = lease.Release()
	})
}

// A lease that lives for months, and a context for each request under it: those
// whose requests are over must not be kept.
func TestLeaseForgetsContextsThatHaveEnded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		lease, err := newStrategy(t, newMemory(t), core.Options{}).Acquire(t.Context(), "key")
		if err != nil {
			t.Fatal(err)
		}
		defer lease.Release()
		for range 1000 {
			parent, cancel := context.WithCancel(context.Background())
			_ = lease.Context(parent)
			cancel()
		}
		synctest.Wait()
		if n := core.ChildrenOf(lease); n != 0 {
			t.Errorf("%d contexts are kept", n)
		}
	})
}

// All methods at once, from many goroutines, around a release and around a loss.
func TestLeaseIsSafeForConcurrentUse(t *testing.T) {
	for _, lose := range []bool{false, true} {
		t.Run(fmt.Sprint("lose: ", lose), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				store := newScriptedStore(t)
				if lose {
					store.renew = disown
				}
				lease, err := newStrategy(t, store, core.Options{}).Acquire(t.Context(), "key")
				if err != nil {
					t.Fatal(err)
				}
				var wg sync.WaitGroup
				for i := range 50 {
					wg.Go(func() {
						if lose {
							<-lease.Done()
						}
						ctx := lease.Context(context.Background())
						_, _ = core.TokenFor(ctx, "key")
						_, _ = lease.Err(), lease.Token()
						if i%2 == 0 {
							if err := lease.Release(); errors.Is(err, core.ErrLost) != lose || !lose && err != nil {
								t.Errorf("Release: %v", err)
							}
						}
						<-ctx.Done()
						<-lease.Done()
					})
				}
				wg.Wait()
				if n, want := len(store.seen("release")), 1; n != want && !lose {
					t.Errorf("%d releases, want %d", n, want)
				}
			})
		})
	}
}
