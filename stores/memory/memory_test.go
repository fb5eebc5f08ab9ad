package memory_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

// calls are all methods of the store that can fail, on one key.
func calls(store *memory.Store, key string) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"Acquire": func(ctx context.Context) error {
			g, err := store.Acquire(ctx, key, "owner", time.Second)
			if err != nil && g != (core.Grant{}) {
				return nil // an error comes with nothing
			}
			return err
		},
		"Renew":     func(ctx context.Context) error { _, err := store.Renew(ctx, key, "owner", time.Second); return err },
		"Release":   func(ctx context.Context) error { return store.Release(ctx, key, "owner") },
		"Subscribe": func(ctx context.Context) error { _, _, err := store.Subscribe(ctx, key); return err },
		"Break":     func(ctx context.Context) error { _, _, err := store.Break(ctx, key); return err },
		"Leases": func(ctx context.Context) error {
			for _, err := range store.Leases(ctx, core.LeaseQuery{Key: key}) {
				return err
			}
			return nil
		},
	}
}

func TestEndedContextsAreRefused(t *testing.T) {
	t.Parallel()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	store := newStore(t)
	for name, call := range calls(store, "key") {
		if err := call(cancelled); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v, want context.Canceled", name, err)
		}
		if err := call(late); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want context.DeadlineExceeded", name, err)
		}
	}
	if n := store.Len(); n != 0 {
		t.Errorf("%d leases were made", n)
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	for what, key := range map[string]string{"NUL": "a\x00", "no UTF-8": "\xff", "too long": strings.Repeat("k", 513)} {
		for name, call := range calls(store, key) {
			if err := call(t.Context()); !errors.Is(err, core.ErrInvalid) {
				t.Errorf("%s with %s in the key: %v, want ErrInvalid", name, what, err)
			}
		}
	}
	for name, err := range map[string]error{
		"Acquire, owner": func() error { _, err := store.Acquire(t.Context(), "key", "", time.Second); return err }(),
		"Acquire, ttl":   func() error { _, err := store.Acquire(t.Context(), "key", "owner", 0); return err }(),
		"Renew, owner":   func() error { _, err := store.Renew(t.Context(), "key", "", time.Second); return err }(),
		"Renew, ttl":     func() error { _, err := store.Renew(t.Context(), "key", "owner", time.Millisecond-1); return err }(),
		"Release, owner": store.Release(t.Context(), "key", ""),
		"Release, key":   store.Release(t.Context(), "", "owner"),
	} {
		if !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	if n := store.Len(); n != 0 {
		t.Errorf("%d leases were made", n)
	}
}

// Now plays a server whose clock is not the client's: it alone decides.
func TestNowDecides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var offset atomic.Int64
		offset.Store(int64(-24 * time.Hour)) // a server of yesterday
		store, err := memory.New(memory.Options{Now: func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }})
		if err != nil {
			t.Fatal(err)
		}
		g, err := store.Acquire(t.Context(), "key", "owner", time.Minute)
		if err != nil || !g.Acquired || g.Token != time.Now().Add(-24*time.Hour).UnixMicro() {
			t.Fatalf("got %+v, %v, want a token of yesterday", g, err)
		}
		time.Sleep(time.Minute - 1)
		if g, _ := store.Acquire(t.Context(), "key", "another", time.Minute); g.Acquired || g.Left != 1 {
			t.Errorf("got %+v, want it held for a nanosecond more", g)
		}
		offset.Add(1) // the server's clock, not ours
		if renewed, _ := store.Renew(t.Context(), "key", "owner", time.Minute); renewed {
			t.Error("an expired lease was renewed")
		}
		offset.Add(int64(-time.Hour)) // its clock is set back
		next, err := store.Acquire(t.Context(), "fresh", "another", time.Minute)
		if err != nil || !next.Acquired || next.Token != g.Token+1 {
			t.Errorf("got %+v, %v, want token %d: last + 1", next, err, g.Token+1)
		}
	})
}

// A strategy on a store whose clock runs fast notices that its leases end
// early, because renewals are answered with no; it does not notice sooner.
func TestStrategyOnAFastServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		store, err := memory.New(memory.Options{Now: func() time.Time { return start.Add(10 * time.Since(start)) }})
		if err != nil {
			t.Fatal(err)
		}
		s, err := core.NewStrategy(store, core.Options{})
		if err != nil {
			t.Fatal(err)
		}
		err = s.Do(t.Context(), "key", func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
		if took := time.Since(start); !errors.Is(err, core.ErrLost) || took < 8*time.Second || took > 10*time.Second {
			t.Errorf("got %v after %v, want ErrLost at the first renewal", err, took)
		}
	})
}

func TestInspectAndBreak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore(t)
		s, err := core.NewStrategy(store, core.Options{Label: "host-7"})
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"a/1", "a/2", "b/1"} {
			lease, err := s.Acquire(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			defer lease.Release()
		}
		for query, want := range map[core.LeaseQuery]int{{}: 3, {Prefix: "a/"}: 2, {Key: "b/1"}: 1, {Key: "b"}: 0, {Prefix: "c"}: 0} {
			n := 0
			for l, err := range store.Leases(t.Context(), query) {
				if err != nil || l.Label != "host-7" || l.Token == 0 || l.Left != core.DefaultTTL {
					t.Errorf("%+v shows %+v, %v", query, l, err)
				}
				n++
			}
			if n != want {
				t.Errorf("%+v shows %d leases, want %d", query, n, want)
			}
		}
		// The consumer stops, or its context ends, in the middle.
		for range store.Leases(t.Context(), core.LeaseQuery{}) {
			break
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var got []error
		for _, err := range store.Leases(ctx, core.LeaseQuery{}) {
			got = append(got, err)
			cancel()
		}
		if len(got) != 2 || got[0] != nil || !errors.Is(got[1], context.Canceled) {
			t.Errorf("cancelled in the middle: %v, want a lease and the context's error", got)
		}

		signals, stop, err := store.Subscribe(t.Context(), "a/1")
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		was, broken, err := store.Break(t.Context(), "a/1")
		if err != nil || !broken || was.Key != "a/1" || was.Label != "host-7" || was.Token == 0 {
			t.Errorf("Break: %+v, %v, %v", was, broken, err)
		}
		select {
		case <-signals:
		default:
			t.Error("a waiter of the broken key got no signal")
		}
		if was, broken, err := store.Break(t.Context(), "a/1"); broken || err != nil || was != (core.LeaseInfo{}) {
			t.Errorf("second Break: %+v, %v, %v", was, broken, err)
		}
	})
}
