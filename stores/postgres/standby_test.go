package pgstore_test

import (
	"strings"
	"testing"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

func TestStandbyRefuses(t *testing.T) {
	primary := testserver.StartPostgres(t)
	pool := newPool(t, primary.URL)
	o := newTable(t, pool)
	store := newStore(t, pool, o)
	mustAcquire(t, store, "held", "owner", long)
	mustAcquire(t, store, "free", "owner", long)
	mustRelease(t, store, "free", "owner")

	server := testserver.StartPostgresStandby(t, primary.Addr)
	replica := newPool(t, server.URL)
	standby := newStore(t, replica, o)
	eventually(t, "the standby has replayed the leases", func() bool {
		return value[int](t, replica, "SELECT count(*) FROM "+table(o)) >= 2
	})

	// Also what would not write: a try on a held key, a stranger's Renew and
	// Release. A standby may be behind, so that its "not yours" is worth nothing.
	ctx := t.Context()
	calls := map[string]func() error{
		"Acquire of a held key":  func() error { _, err := standby.Acquire(ctx, "held", "other", long); return err },
		"Acquire of a free key":  func() error { _, err := standby.Acquire(ctx, "free", "other", long); return err },
		"Acquire of a new key":   func() error { _, err := standby.Acquire(ctx, "new", "other", long); return err },
		"Renew":                  func() error { _, err := standby.Renew(ctx, "held", "owner", long); return err },
		"Renew by a stranger":    func() error { _, err := standby.Renew(ctx, "held", "other", long); return err },
		"Release":                func() error { return standby.Release(ctx, "held", "owner") },
		"Release by a stranger":  func() error { return standby.Release(ctx, "held", "other") },
		"Release of an old key":  func() error { return standby.Release(ctx, "free", "owner") },
		"Subscribe":              func() error { _, _, err := standby.Subscribe(ctx, "held"); return err },
		"Break":                  func() error { _, _, err := standby.Break(ctx, "held"); return err },
		"Break of an old key":    func() error { _, _, err := standby.Break(ctx, "free"); return err },
		"Migrate where it lacks": func() error { return pgstore.Migrate(ctx, replica, pgstore.Options{Table: "elsewhere"}) },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			if err := call(); err == nil || !strings.Contains(err.Error(), "the server is a standby") {
				t.Errorf("error %v, want one that says that the server is a standby", err)
			}
		})
	}
	// The table is there, so there is nothing to do.
	if err := pgstore.Migrate(ctx, replica, o); err != nil {
		t.Errorf("Migrate of what has been migrated: %v, want nil", err)
	}
	n := 0
	for info, err := range standby.Leases(ctx, core.LeaseQuery{}) {
		if err != nil || info.Key != "held" {
			t.Errorf("Leases: %+v, error %v, want the lease on held", info, err)
		}
		n++
	}
	if n != 1 {
		t.Errorf("Leases: %d, want 1", n)
	}

	// Nothing has changed, and the same clients go on after a promotion.
	mustRenew(t, store, "held", "owner", long, true)
	primary.Kill(t)
	if ok := value[bool](t, replica, "SELECT pg_promote()"); !ok {
		t.Fatal("the standby was not promoted")
	}
	token := mustAcquire(t, standby, "free", "other", long)
	if before := value[int64](t, replica, "SELECT token FROM "+table(o)+" WHERE key = 'held'"); token <= before {
		t.Errorf("token %d after the promotion, want more than %d", token, before)
	}
	mustRenew(t, standby, "held", "owner", long, true)
}
