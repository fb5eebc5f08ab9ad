package pgstore_test

import (
	"context"
	"crypto/rand"
	"io"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// TestConformance runs the suite on a server of its own, which it restarts,
// pauses and empties.
func TestConformance(t *testing.T) {
	const name = "alone"
	if url := parentURL(name); url != "" {
		conformance.Run(t, suite(t, url, url, name))
		return
	}
	server := testserver.StartPostgres(t, "-c", "autovacuum=off") // it writes
	config := suite(t, server.URL, server.URL, name)
	config.Restart = func(t testing.TB) { server.Stop(t); server.Start(t) }
	config.Pause = func(t testing.TB) func() {
		server.Pause(t)
		return func() { server.Resume(t) }
	}
	config.Refusals = refusals(t, server, suiteOptions(name))
	conformance.Run(t, config)
}

// The whole suite through a pooler in transaction mode, with pgx's defaults:
// prepared statements, which PgBouncer 1.18 does not know. LISTEN goes around
// it; TestPgBouncer has a store that cannot.
func TestConformanceThroughPgBouncer(t *testing.T) {
	const name = "pgbouncer"
	if url := parentURL(name); url != "" {
		conformance.Run(t, suite(t, url, url, name))
		return
	}
	server := testserver.StartPostgres(t, "-c", "synchronous_commit=off", "-c", "autovacuum=off")
	bouncer := testserver.StartPgBouncer(t, server, "transaction")
	conformance.Run(t, suite(t, server.URL, bouncer.URL, name))
}

// The whole suite under SERIALIZABLE, where statements that collide fail.
func TestConformanceSerializable(t *testing.T) {
	const name = "serializable"
	if url := parentURL(name); url != "" {
		conformance.Run(t, suite(t, url, url, name))
		return
	}
	server := testserver.StartPostgres(t, "-c", "synchronous_commit=off", "-c", "autovacuum=off")
	conformance.Run(t, suite(t, server.URL, server.URL+"&default_transaction_isolation=serializable", name))
}

// parentURL is, in a child process of the suite, the server of its parent.
func parentURL(name string) string { return os.Getenv(envName(name)) }

func envName(name string) string { return "LEASEKIT_PGSTORE_" + strings.ToUpper(name) + "_URL" }

// refusals are the ways in which server, or another, refuses to write.
func refusals(t *testing.T, server *testserver.Server, o pgstore.Options) []conformance.Refusal {
	standby := sync.OnceValue(func() *testserver.Server { return testserver.StartPostgresStandby(t, server.Addr) })
	as := func(change func(*pgxpool.Config)) func(t testing.TB) (core.LockStore, func()) {
		return func(t testing.TB) (core.LockStore, func()) {
			return newStore(t, newPool(t, server.URL, change), o), func() {}
		}
	}
	return []conformance.Refusal{
		{Name: "Standby", Begin: func(t testing.TB) (core.LockStore, func()) {
			return newStore(t, newPool(t, standby().URL), o), func() {}
		}},
		{Name: "ReadOnlyTransactions", Begin: as(setting("default_transaction_read_only", "on"))},
		{Name: "NoPrivileges", Begin: func(t testing.TB) (core.LockStore, func()) {
			admin := newPool(t, server.URL)
			mustExec(t, admin, "CREATE ROLE nobody LOGIN")
			store, _ := as(func(c *pgxpool.Config) { c.ConnConfig.User = "nobody" })(t)
			return store, func() { mustExec(t, admin, "DROP ROLE nobody") }
		}},
		{Name: "TableRenamed", Begin: func(t testing.TB) (core.LockStore, func()) {
			admin := newPool(t, server.URL)
			mustExec(t, admin, "ALTER TABLE "+table(o)+" RENAME TO hidden")
			return newStore(t, admin, o), func() { mustExec(t, admin, "ALTER TABLE public.hidden RENAME TO "+o.Table) }
		}},
	}
}

func suiteOptions(name string) pgstore.Options {
	return pgstore.Options{Table: "leases_" + name, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

// address is the host:port of a URL.
func address(t testing.TB, rawURL string) string {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}

// suite is what the suite needs to test stores that connect to url; direct is
// the way to the same server with nothing between.
func suite(t *testing.T, direct, url, name string) conformance.Config {
	admin := newPool(t, direct)
	o := suiteOptions(name)
	o.Listen = func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, direct) }
	if address(t, direct) == address(t, url) {
		o.Listen = nil // the default
	}
	if err := pgstore.Migrate(t.Context(), admin, o); err != nil {
		t.Fatal(err)
	}
	config := conformance.Config{
		Open: func(t testing.TB) core.LockStore { return newStore(t, newPool(t, url), o) },
		Env:  func(testing.TB) []string { return []string{envName(name) + "=" + url} },
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
	// The proxy looks for the key in what the client sends. Through a pooler the
	// store sends it in hexadecimal.
	if addr := address(t, url); o.Listen == nil {
		config.Faults = conformance.Faults{Addr: addr, Open: func(t testing.TB, proxy string) core.LockStore {
			return newStore(t, newPool(t, strings.ReplaceAll(url, addr, proxy)), o)
		}}
	}
	return config
}
