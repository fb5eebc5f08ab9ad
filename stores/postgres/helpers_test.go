package pgstore_test

import (
	"context"
	"crypto/rand"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

func TestMain(m *testing.M) { testserver.Main(m) }

const (
	long  = time.Minute
	short = 50 * time.Millisecond
)

// newPool connects to url; change may set the pool's configuration.
func newPool(t testing.TB, url string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(config)
	}
	// Not t.Context(): that ends before the cleanups do.
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func maxConns(n int32) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.MaxConns = n }
}

func mode(m pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = m }
}

// setting makes every connection begin with a run-time parameter.
func setting(name, value string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[name] = value }
}

// fast spares tests that are not about durability the disk.
func fast(c *pgxpool.Config) { setting("synchronous_commit", "off")(c) }

// newTable makes a table for this test alone, and returns the options for it.
func newTable(t testing.TB, pool *pgxpool.Pool) pgstore.Options {
	t.Helper()
	o := pgstore.Options{Table: "leases_" + strings.ToLower(rand.Text()), Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if err := pgstore.Migrate(t.Context(), pool, o); err != nil {
		t.Fatal(err)
	}
	return o
}

// newStore opens a store that is closed at the end of the test.
func newStore(t testing.TB, db pgstore.DB, o pgstore.Options) *pgstore.Store {
	t.Helper()
	store, err := pgstore.New(db, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return store
}

// open gives a test a table, a pool and a store on the shared server.
func open(t testing.TB, change ...func(*pgxpool.Config)) (*pgstore.Store, *pgxpool.Pool, pgstore.Options) {
	t.Helper()
	pool := newPool(t, testserver.Postgres(t).URL, change...)
	o := newTable(t, pool)
	return newStore(t, pool, o), pool, o
}

func mustAcquire(t testing.TB, store core.LockStore, key, owner string, ttl time.Duration) int64 {
	t.Helper()
	grant, err := store.Acquire(t.Context(), key, owner, ttl)
	if err != nil || !grant.Acquired {
		t.Fatalf("Acquire(%q): acquired %v, error %v, want acquired", key, grant.Acquired, err)
	}
	return grant.Token
}

func mustRelease(t testing.TB, store core.LockStore, key, owner string) {
	t.Helper()
	if err := store.Release(t.Context(), key, owner); err != nil {
		t.Fatalf("Release(%q): %v", key, err)
	}
}

func mustRenew(t testing.TB, store core.LockStore, key, owner string, ttl time.Duration, want bool) {
	t.Helper()
	got, err := store.Renew(t.Context(), key, owner, ttl)
	if err != nil || got != want {
		t.Fatalf("Renew(%q): %v, error %v, want %v", key, got, err, want)
	}
}

func mustBeHeld(t testing.TB, store core.LockStore, key string) {
	t.Helper()
	grant, err := store.Acquire(t.Context(), key, "a contender", long)
	if err != nil || grant.Acquired || grant.Left <= 0 {
		t.Fatalf("Acquire(%q): acquired %v, left %v, error %v, want that it is held", key, grant.Acquired, grant.Left, err)
	}
}

// mustExec runs SQL and returns the number of rows.
func mustExec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) int64 {
	t.Helper()
	tag, err := pool.Exec(t.Context(), sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return tag.RowsAffected()
}

// value returns the single value of a query.
func value[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// table is the qualified name of the table of o.
func table(o pgstore.Options) string {
	schema := o.Schema
	if schema == "" {
		schema = pgstore.DefaultSchema
	}
	return pgx.Identifier{schema, o.Table}.Sanitize()
}

// eventually waits until ok says so.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// logged returns the lines of a server's log that contain one of words.
func logged(t testing.TB, s *testserver.Server, words ...string) []string {
	t.Helper()
	text, err := os.ReadFile(s.LogFile)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(string(text)) {
		for _, word := range words {
			if strings.Contains(line, word) {
				found = append(found, strings.TrimSpace(line))
				break
			}
		}
	}
	return found
}
