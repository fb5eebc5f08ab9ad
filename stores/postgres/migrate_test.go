package pgstore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

func TestMigrateByTenAtOnce(t *testing.T) {
	server := testserver.StartPostgres(t)
	for _, isolation := range []string{"read committed", "serializable"} {
		for range 5 {
			o := pgstore.Options{Schema: "Odd \"schema\" " + rand.Text(), Table: "Odd \"table\""}
			pools := make([]*pgxpool.Pool, 10)
			for i := range pools {
				pools[i] = newPool(t, server.URL, setting("default_transaction_isolation", isolation))
				if err := pools[i].Ping(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			errs := make([]error, len(pools))
			for i, pool := range pools {
				wg.Go(func() { errs[i] = pgstore.Migrate(t.Context(), pool, o) })
			}
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
				t.Fatalf("%s: %v", isolation, err)
			}
			store := newStore(t, pools[0], o)
			mustAcquire(t, store, "key", "owner", long)
			if err := pgstore.Migrate(t.Context(), pools[1], o); err != nil {
				t.Fatalf("Migrate once more: %v", err)
			}
			mustBeHeld(t, store, "key")
		}
	}
	if lines := logged(t, server, "ERROR"); len(lines) > 0 {
		t.Errorf("the server logged %q, want no errors", lines)
	}
}

func TestSchemaIsTheDDL(t *testing.T) {
	pool := newPool(t, testserver.Postgres(t).URL)
	for _, o := range []pgstore.Options{
		{Table: "leases_" + rand.Text()},
		{Schema: "schema_" + rand.Text()},
	} {
		ddl, err := pgstore.Schema(o)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // it may be run again
			mustExec(t, pool, ddl)
		}
		if err := pgstore.Migrate(t.Context(), pool, o); err != nil {
			t.Errorf("Migrate after the DDL of Schema: %v", err)
		}
		mustAcquire(t, newStore(t, pool, o), "key", "owner", long)
	}
	if ddl, err := pgstore.Schema(pgstore.Options{Schema: strings.Repeat("x", 64)}); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("Schema with a name of 64 bytes: %q, error %v, want one that matches core.ErrInvalid", ddl, err)
	}
}

// A role that may not create anything calls Migrate at every start.
func TestMigrateNeedsNoRightsWhenDone(t *testing.T) {
	server := testserver.Postgres(t)
	admin := newPool(t, server.URL)
	o := newTable(t, admin)
	role := "role_" + strings.ToLower(rand.Text())
	mustExec(t, admin, "CREATE ROLE "+role+" LOGIN")
	mustExec(t, admin, "GRANT USAGE ON SCHEMA public TO "+role)
	mustExec(t, admin, "GRANT SELECT, INSERT, UPDATE, DELETE ON "+table(o)+" TO "+role)
	t.Cleanup(func() { _, _ = admin.Exec(t.Context(), "DROP OWNED BY "+role+"; DROP ROLE "+role) })

	pool := newPool(t, server.URL, func(c *pgxpool.Config) { c.ConnConfig.User = role })
	if err := pgstore.Migrate(t.Context(), pool, o); err != nil {
		t.Errorf("Migrate of what is there: %v", err)
	}
	store := newStore(t, pool, o)
	mustAcquire(t, store, "key", "owner", long)
	mustRenew(t, store, "key", "owner", long, true)
	mustRelease(t, store, "key", "owner")
	if _, stop, err := store.Subscribe(t.Context(), "key"); err != nil {
		t.Errorf("Subscribe: %v", err)
	} else {
		stop()
	}

	o.Table += "_more"
	err := pgstore.Migrate(t.Context(), pool, o)
	if err == nil || !strings.Contains(err.Error(), "may not create") {
		t.Errorf("Migrate without rights: error %v, want one that says so", err)
	}
}

func TestMissingTableNamesTheFix(t *testing.T) {
	pool := newPool(t, testserver.Postgres(t).URL)
	for name, o := range map[string]pgstore.Options{
		"table":  {Table: "leases_" + rand.Text()},
		"schema": {Schema: "schema_" + rand.Text()},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore(t, pool, o)
			const secret = "the secret owner"
			_, acquire := store.Acquire(t.Context(), "key", secret, long)
			_, renew := store.Renew(t.Context(), "key", secret, long)
			release := store.Release(t.Context(), "key", secret)
			_, _, subscribe := store.Subscribe(t.Context(), "key")
			_, _, breaks := store.Break(t.Context(), "key")
			for call, err := range map[string]error{"Acquire": acquire, "Renew": renew, "Release": release, "Subscribe": subscribe, "Break": breaks} {
				if !errors.Is(err, pgstore.ErrNoTable) || !strings.Contains(err.Error(), "pgstore.Migrate") || !strings.Contains(err.Error(), table(store2(o))) {
					t.Errorf("%s: error %v, want one that names the table and pgstore.Migrate", call, err)
				}
				if err != nil && strings.Contains(err.Error(), secret) {
					t.Errorf("%s: error %v has the owner in it", call, err)
				}
			}
			if _, err := store.Acquire(t.Context(), "key", secret, long); err == nil {
				t.Fatal("acquired without a table")
			}
			if err := pgstore.Migrate(t.Context(), pool, o); err != nil {
				t.Fatal(err)
			}
			mustAcquire(t, store, "key", secret, long) // the same store goes on
		})
	}
}

// store2 fills in the default of the table's name.
func store2(o pgstore.Options) pgstore.Options {
	if o.Table == "" {
		o.Table = pgstore.DefaultTable
	}
	return o
}

func TestForeignTable(t *testing.T) {
	pool := newPool(t, testserver.Postgres(t).URL)
	for name, ddl := range map[string]string{
		"other columns":  "CREATE TABLE %s (id bigint PRIMARY KEY, name text)",
		"other types":    "CREATE TABLE %s (key text PRIMARY KEY, owner text, token bigint, expires_at timestamptz, waited_until timestamptz)",
		"no primary key": "CREATE TABLE %s (key bytea, owner bytea, token bigint, expires_at timestamptz, waited_until timestamptz)",
		"wider key":      "CREATE TABLE %s (key bytea, owner bytea, token bigint, expires_at timestamptz, waited_until timestamptz, PRIMARY KEY (key, owner))",
		"view":           "CREATE VIEW %s AS SELECT 1 AS key",
	} {
		t.Run(name, func(t *testing.T) {
			o := pgstore.Options{Table: "foreign_" + rand.Text()}
			mustExec(t, pool, strings.ReplaceAll(ddl, "%s", table(o)))
			store := newStore(t, pool, o)
			_, acquire := store.Acquire(t.Context(), "key", "owner", long)
			for call, err := range map[string]error{"Acquire": acquire, "Migrate": pgstore.Migrate(t.Context(), pool, o)} {
				if err == nil || errors.Is(err, pgstore.ErrNoTable) || !strings.Contains(err.Error(), table(o)) {
					t.Errorf("%s: error %v, want one that names the table", call, err)
				}
			}
			if n := value[int](t, pool, "SELECT count(*) FROM "+table(o)); n > 1 {
				t.Errorf("%d rows, want the table untouched", n)
			}
		})
	}
}

// What a DBA does to the table in the middle of things.
func TestTableChangesUnderTheStore(t *testing.T) {
	store, pool, o := open(t, maxConns(1))
	for _, sql := range []string{
		"ALTER TABLE %s ADD COLUMN note text NOT NULL DEFAULT ''",
		"VACUUM FULL %s",
		"ALTER TABLE %s SET (fillfactor = 70)",
		"TRUNCATE %s",
		"DEALLOCATE ALL",
		"DISCARD ALL",
		"DROP TABLE %s",
	} {
		t.Run(sql, func(t *testing.T) {
			token := mustAcquire(t, store, "key", "owner", long)
			mustRenew(t, store, "key", "owner", long, true)
			mustRelease(t, store, "key", "owner")
			mustExec(t, pool, strings.ReplaceAll(sql, "%s", table(o)))
			if err := pgstore.Migrate(t.Context(), pool, o); err != nil {
				t.Fatal(err)
			}
			if next := mustAcquire(t, store, "key", "owner", long); next <= token {
				t.Errorf("token %d after %d, want a greater one", next, token)
			}
			mustBeHeld(t, store, "key")
			mustRenew(t, store, "key", "owner", long, true)
			mustRelease(t, store, "key", "owner")
		})
	}
}

func TestMigrateEndsWithContext(t *testing.T) {
	server := testserver.Postgres(t)
	pool := newPool(t, server.URL, maxConns(1))
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	mustEndWith(t, func(ctx context.Context) error {
		return pgstore.Migrate(ctx, pool, pgstore.Options{Table: "leases_" + rand.Text()})
	})
}
