package pgstore_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// list returns the keys of the leases that q asks for.
func list(t testing.TB, store *pgstore.Store, q core.LeaseQuery) []string {
	t.Helper()
	var keys []string
	for info, err := range store.Leases(t.Context(), q) {
		if err != nil {
			t.Fatalf("Leases(%+v): %v", q, err)
		}
		if info.Token <= 0 || info.Left <= 0 || info.Left > long {
			t.Errorf("%+v, want a token and the time left", info)
		}
		keys = append(keys, info.Key)
	}
	return keys
}

func TestLeases(t *testing.T) {
	all, pool, o := open(t, fast)
	o.Prefix = "app:"
	store := newStore(t, pool, o)
	// More than two pages of live leases, between others.
	var want []string
	for i := range 600 {
		key := fmt.Sprintf("key %04d", i)
		want = append(want, key)
		mustAcquire(t, store, key, "owner", long)
		if i%3 == 0 {
			mustAcquire(t, store, key+" released", "owner", long)
			mustRelease(t, store, key+" released", "owner")
		}
	}
	mustAcquire(t, store, "expired", "owner", time.Millisecond)
	mustAcquire(t, all, "other", "owner", long)
	mustAcquire(t, all, "app", "owner", long)
	mustAcquire(t, all, "app;", "owner", long)
	time.Sleep(2 * time.Millisecond)

	if got := list(t, store, core.LeaseQuery{}); !slices.Equal(got, want) {
		t.Errorf("%d leases, want the %d keys in order", len(got), len(want))
	}
	if got := list(t, all, core.LeaseQuery{}); len(got) != 603 || !slices.Contains(got, "app:key 0000") {
		t.Errorf("%d leases without a prefix, want 603", len(got))
	}
	for prefix, n := range map[string]int{"key 00": 100, "key 0599": 1, "kez": 0, "\u00e1": 0} {
		if got := list(t, store, core.LeaseQuery{Prefix: prefix}); len(got) != n {
			t.Errorf("Prefix %q: %d leases, want %d", prefix, len(got), n)
		}
	}
	if got := list(t, store, core.LeaseQuery{Key: "key 0007"}); !slices.Equal(got, []string{"key 0007"}) {
		t.Errorf("Key: %q, want the one", got)
	}
	for _, key := range []string{"key 000", "key 0007 ", "key 0000 released", "expired"} {
		if got := list(t, store, core.LeaseQuery{Key: key}); got != nil {
			t.Errorf("Key %q: %q, want nothing", key, got)
		}
	}
	// Whoever has seen enough need not go on.
	for range store.Leases(t.Context(), core.LeaseQuery{}) {
		break
	}
	for _, err := range store.Leases(t.Context(), core.LeaseQuery{Key: "a", Prefix: "a"}) {
		if !errors.Is(err, core.ErrInvalid) {
			t.Errorf("Key and Prefix: error %v, want one that matches core.ErrInvalid", err)
		}
	}
	// A page is read, then the table is taken away.
	var last error
	n := 0
	for _, err := range store.Leases(t.Context(), core.LeaseQuery{}) {
		if n++; n == 1 {
			mustExec(t, pool, "DROP TABLE "+table(o))
		}
		last = err
	}
	if last == nil || !strings.Contains(last.Error(), "pgstore.Migrate") {
		t.Errorf("the sequence ended with %v, want the error", last)
	}
}

func TestBreak(t *testing.T) {
	store, _, _ := open(t, fast)
	const owner = "web-1/0123456789abcdef0123456789abcdef"
	token := mustAcquire(t, store, "key", owner, long)
	was, broken, err := store.Break(t.Context(), "key")
	if err != nil || !broken || was.Key != "key" || was.Label != "web-1" || was.Token != token || was.Left <= 0 || was.Left > long {
		t.Errorf("%+v, %v, error %v, want the lease of web-1 with token %d", was, broken, err, token)
	}
	mustRenew(t, store, "key", owner, long, false)
	if next := mustAcquire(t, store, "key", "next", long); next <= token {
		t.Errorf("token %d after %d", next, token)
	}
	mustRelease(t, store, "key", owner)
	mustBeHeld(t, store, "key")
	if _, _, err := store.Break(t.Context(), ""); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("Break of no key: error %v, want one that matches core.ErrInvalid", err)
	}
}
