package sqlitestore_test

import (
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	sqlitestore "github.com/leasekit/leasekit/examples/sqlite"
)

// TestConformanceState adds what takes a few lines more: that records are
// purged, and that tokens go on growing when they have been, or are lost.
func TestConformanceState(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leases.db")
	open := func(t testing.TB, file string, retention time.Duration) *sqlitestore.Store {
		t.Helper()
		store, err := sqlitestore.Open(t.Context(), file)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { store.Close() })
		store.Retention = retention
		return store
	}
	elsewhere := make(map[string]string)
	for _, rule := range conformance.Rules() {
		if rule.Group != "State" && rule.Group != "Fencing" && rule.Group != "Notifier" {
			elsewhere[rule.Group] = "checked by TestConformance"
		}
	}
	conformance.Run(t, conformance.Config{
		NotSupported: elsewhere,
		Open:         func(t testing.TB) core.LockStore { return open(t, file, time.Hour) },
		OpenRetention: func(t testing.TB, retention time.Duration) (core.LockStore, func() int) {
			file := filepath.Join(t.TempDir(), "leases.db")
			return open(t, file, retention), func() int { return query(t, file, `SELECT count(*) FROM leases`) }
		},
		Flush: func(t testing.TB) { query(t, file, `DELETE FROM leases RETURNING 1`) },
	})
}

// query runs a statement on a connection of its own.
func query(t testing.TB, file, statement string) (n int) {
	t.Helper()
	db, err := sql.Open("sqlite", file+"?_pragma=busy_timeout(30000)")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRowContext(t.Context(), statement).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
