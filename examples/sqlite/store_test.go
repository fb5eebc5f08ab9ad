package sqlitestore_test

import (
	"cmp"
	"os"
	"path/filepath"
	"testing"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	sqlitestore "github.com/leasekit/leasekit/examples/sqlite"
)

func TestConformance(t *testing.T) {
	file := cmp.Or(os.Getenv("LEASES_FILE"), filepath.Join(t.TempDir(), "leases.db"))
	conformance.Run(t, conformance.Config{
		Open: func(t testing.TB) core.LockStore {
			store, err := sqlitestore.Open(t.Context(), file)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { store.Close() })
			return store
		},
		Env: func(testing.TB) []string { return []string{"LEASES_FILE=" + file} },
	})
}
