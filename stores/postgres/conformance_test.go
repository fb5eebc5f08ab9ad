package pgstore_test

import (
	"crypto/rand"
	"io"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// conformanceURL names, in a child process of the suite, the server that the
// parent has started.
const conformanceURL = "LEASEKIT_PGSTORE_CONFORMANCE_URL"

// TestConformance runs the suite on a server of its own, which it restarts,
// pauses and empties.
func TestConformance(t *testing.T) {
	var server *testserver.Server
	url := os.Getenv(conformanceURL)
	if url == "" {
		server = testserver.StartPostgres(t)
		url = server.URL
	}
	config := suite(t, url)
	config.Restart = func(t testing.TB) { server.Stop(t); server.Start(t) }
	config.Pause = func(t testing.TB) func() {
		server.Pause(t)
		return func() { server.Resume(t) }
	}
	config.Refusals = refusals(t, server)
	conformance.Run(t, config)
}

// refusals are the ways in which server, or another, refuses to write. server
// is nil in a child process, which needs none of them.
func refusals(t *testing.T, server *testserver.Server) []conformance.Refusal {
	if server == nil {
		return nil
	}
	standby := sync.OnceValue(func() *testserver.Server { return startStandby(t, server) })
	as := func(change func(*pgxpool.Config)) func(t testing.TB) (core.LockStore, func()) {
		return func(t testing.TB) (core.LockStore, func()) {
			return newStore(t, newPool(t, server.URL, change), suiteOptions()), func() {}
		}
	}
	return []conformance.Refusal{
		{Name: "Standby", Begin: func(t testing.TB) (core.LockStore, func()) {
			return newStore(t, newPool(t, standby().URL), suiteOptions()), func() {}
		}},
		{Name: "ReadOnlyTransactions", Begin: as(setting("default_transaction_read_only", "on"))},
		{Name: "NoPrivileges", Begin: func(t testing.TB) (core.LockStore, func()) {
			admin := newPool(t, server.URL)
			mustExec(t, admin, "CREATE ROLE nobody LOGIN")
			store, _ := as(func(c *pgxpool.Config) { c.ConnConfig.User = "nobody" })(t)
			return store, func() { mustExec(t, admin, "DROP ROLE nobody") }
		}},
		{Name: "TableRenamed", Begin: func(t testing.TB) (core.LockStore, func()) {
			admin, o := newPool(t, server.URL), suiteOptions()
			mustExec(t, admin, "ALTER TABLE "+table(o)+" RENAME TO hidden")
			return newStore(t, admin, o), func() { mustExec(t, admin, "ALTER TABLE public.hidden RENAME TO "+o.Table) }
		}},
	}
}

func suiteOptions() pgstore.Options {
	return pgstore.Options{Table: "leases_of_the_suite", Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

// suite is what the suite needs on the server at url.
func suite(t *testing.T, url string) conformance.Config {
	admin := newPool(t, url)
	o := suiteOptions()
	if err := pgstore.Migrate(t.Context(), admin, o); err != nil {
		t.Fatal(err)
	}
	return conformance.Config{
		Open: func(t testing.TB) core.LockStore { return newStore(t, newPool(t, url), o) },
		Env:  func(testing.TB) []string { return []string{conformanceURL + "=" + url} },
		OpenOneConnection: func(t testing.TB) core.LockStore {
			return newStore(t, newPool(t, url, maxConns(1)), o)
		},
		OpenRetention: func(t testing.TB, retention time.Duration) (core.LockStore, func() int) {
			o := o
			o.Retention, o.Prefix = retention, rand.Text()+":"
			records := func() int {
				return value[int](t, admin, "SELECT count(*) FROM "+table(o)+" WHERE starts_with(encode(key, 'escape'), $1)", o.Prefix)
			}
			return newStore(t, newPool(t, url), o), records
		},
		Flush: func(t testing.TB) { mustExec(t, admin, "TRUNCATE "+table(o)) },
		// Bytes of WAL: a row lock is in there too.
		Writes: func(t testing.TB) int64 {
			return value[int64](t, admin, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
		},
		NotSupported: map[string]string{
			"DriverRetry":              "pgx never sends a statement twice",
			"ForeignValueIsAnError":    "columns have types: whatever row is there is a lease; TestForeignTable has the foreign table",
			"ClientClockDoesNotMatter": "the store sends no time but the ttl: a wrong clock has no way in",
		},
	}
}
