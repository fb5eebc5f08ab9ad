package pgstore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// What pgx calls its query modes.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement,
	pgx.QueryExecModeCacheDescribe,
	pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

// A lease taken inside a transaction would be invisible to others until the
// commit, and one connection cannot be used by two goroutines.
func TestDB(t *testing.T) {
	db := reflect.TypeFor[pgstore.DB]()
	if !reflect.TypeFor[*pgxpool.Pool]().Implements(db) {
		t.Error("a pgxpool.Pool is no pgstore.DB")
	}
	for _, other := range []reflect.Type{
		reflect.TypeFor[pgx.Tx](), reflect.TypeFor[*pgxpool.Tx](), reflect.TypeFor[*pgx.Conn](), reflect.TypeFor[*pgxpool.Conn](),
	} {
		if other.Implements(db) {
			t.Errorf("%v is a pgstore.DB, want that it does not compile", other)
		}
	}
}

func TestNewChecksItsArguments(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/nowhere") // New does no I/O
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for name, try := range map[string]func() (*pgstore.Store, error){
		"nil":                func() (*pgstore.Store, error) { return pgstore.New(nil, pgstore.Options{}) },
		"typed nil":          func() (*pgstore.Store, error) { return pgstore.New((*pgxpool.Pool)(nil), pgstore.Options{}) },
		"negative retention": func() (*pgstore.Store, error) { return pgstore.New(pool, pgstore.Options{Retention: -1}) },
		"NUL in schema":      func() (*pgstore.Store, error) { return pgstore.New(pool, pgstore.Options{Schema: "a\x00"}) },
		"long table": func() (*pgstore.Store, error) {
			return pgstore.New(pool, pgstore.Options{Table: strings.Repeat("x", 64)})
		},
		"long prefix": func() (*pgstore.Store, error) {
			return pgstore.New(pool, pgstore.Options{Prefix: strings.Repeat("x", 513)})
		},
		"prefix not UTF-8": func() (*pgstore.Store, error) { return pgstore.New(pool, pgstore.Options{Prefix: "\xff"}) },
	} {
		if store, err := try(); store != nil || !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%s: store %v, error %v, want an error that matches core.ErrInvalid", name, store != nil, err)
		}
	}
	store, err := pgstore.New(pool, pgstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := store.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
}

// What New refuses would be a panic in Migrate, too.
func TestMigrateChecksItsArguments(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/nowhere")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for name, err := range map[string]error{
		"nil":        pgstore.Migrate(t.Context(), nil, pgstore.Options{}),
		"typed nil":  pgstore.Migrate(t.Context(), (*pgxpool.Pool)(nil), pgstore.Options{}),
		"long table": pgstore.Migrate(t.Context(), pool, pgstore.Options{Table: strings.Repeat("x", 64)}),
	} {
		if !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%s: error %v, want one that matches core.ErrInvalid", name, err)
		}
	}
}

// trip uses everything that a store can do, with two clients.
func trip(t *testing.T, a, b *pgstore.Store, key string) {
	t.Helper()
	token := mustAcquire(t, a, key, "label/0123456789abcdef0123456789abcdef", long)
	mustBeHeld(t, b, key)
	mustRenew(t, b, key, "stranger", long, false)
	mustRelease(t, b, key, "stranger")
	mustRenew(t, a, key, "label/0123456789abcdef0123456789abcdef", 2*long, true)

	var infos []core.LeaseInfo
	for info, err := range b.Leases(t.Context(), core.LeaseQuery{Key: key}) {
		if err != nil {
			t.Fatalf("Leases: %v", err)
		}
		infos = append(infos, info)
	}
	if len(infos) != 1 || infos[0].Key != key || infos[0].Label != "label" || infos[0].Token != token || infos[0].Left <= long || infos[0].Left > 2*long {
		t.Fatalf("Leases(%q): %+v, want the one lease of token %d", key, infos, token)
	}

	signals, stop, err := b.Subscribe(t.Context(), key)
	if err != nil {
		t.Fatalf("Subscribe: %v", err)
	}
	defer stop()
	mustRelease(t, a, key, "label/0123456789abcdef0123456789abcdef")
	select {
	case <-signals: // a value, or closed: poll
	case <-time.After(30 * time.Second):
		t.Fatal("no signal within 30 s after the release")
	}
	if next := mustAcquire(t, b, key, "other", long); next <= token {
		t.Fatalf("token %d after %d, want a greater one", next, token)
	}
	if was, broken, err := a.Break(t.Context(), key); err != nil || !broken || was.Key != key || was.Token <= token {
		t.Fatalf("Break: %+v, %v, error %v, want the lease", was, broken, err)
	}
	if was, broken, err := a.Break(t.Context(), key); err != nil || broken || was != (core.LeaseInfo{}) {
		t.Fatalf("Break once more: %+v, %v, error %v, want nothing", was, broken, err)
	}
	mustRenew(t, b, key, "other", long, false)
}

// oddKeys differ in a byte, and are the same to some collation, encoding or
// normal form.
var oddKeys = []string{
	"a", "A", "a ", " a", "\u00e1", "a\u0301", "\u00df", "ss", "\u017f", "i", "I", "\u0130", "\u0131",
	"'", `"`, `\`, `\\`, `\x61`, "%", "$1", "$$", "--", "/*", "a\nb", "a\tb", "\x01", "\u007f",
	"\U0001f600", "\u03a9", "\u2126", strings.Repeat("x", 512), strings.Repeat("x", 511), strings.Repeat("\U0001f600", 128),
}

func TestModes(t *testing.T) {
	pool := newPool(t, testserver.Postgres(t).URL)
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) {
			o := newTable(t, pool)
			o.Retention = time.Millisecond
			a := newStore(t, newPool(t, testserver.Postgres(t).URL, mode(m), fast), o)
			b := newStore(t, newPool(t, testserver.Postgres(t).URL, mode(m), fast), o)
			for range 2 { // the second time from the cache
				for _, key := range oddKeys {
					trip(t, a, b, key)
				}
			}
			for _, key := range oddKeys {
				mustAcquire(t, a, key, "owner", long)
			}
			for _, key := range oddKeys {
				mustBeHeld(t, b, key)
			}
		})
	}
}

// A database may have any encoding, and a role any settings.
func TestDatabases(t *testing.T) {
	server := testserver.StartPostgres(t, "-c", "fsync=off") // CREATE DATABASE syncs a thousand files
	admin := newPool(t, server.URL)
	databases := map[string]string{
		"LATIN1":    "ENCODING 'LATIN1' LOCALE 'C'",
		"SQL_ASCII": "ENCODING 'SQL_ASCII' LOCALE 'C'",
		"EUC_JP":    "ENCODING 'EUC_JP' LOCALE 'C'",
		"ICU":       "ENCODING 'UTF8' LOCALE 'C' LOCALE_PROVIDER icu ICU_LOCALE 'und-u-ks-level1'",
	}
	for name, options := range databases {
		t.Run(name, func(t *testing.T) {
			database := "db_" + strings.ToLower(rand.Text())
			if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+database+" TEMPLATE template0 "+options); err != nil {
				t.Skipf("this server cannot have such a database: %v", err)
			}
			t.Cleanup(func() { mustDrop(t, admin, database) })
			url := strings.Replace(server.URL, "/postgres?", "/"+database+"?", 1)
			for _, m := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
				// pgx speaks UTF-8 in the simple protocol, and says so if the
				// server does not.
				utf8 := setting("client_encoding", "UTF8")
				pool := newPool(t, url, mode(m), utf8, fast)
				o := newTable(t, pool)
				a, b := newStore(t, pool, o), newStore(t, newPool(t, url, mode(m), utf8, fast), o)
				for _, key := range oddKeys {
					trip(t, a, b, key)
				}
			}
			// And what the server chooses by itself.
			pool := newPool(t, url)
			o := newTable(t, pool)
			a, b := newStore(t, pool, o), newStore(t, newPool(t, url), o)
			for _, key := range oddKeys {
				trip(t, a, b, key)
			}
		})
	}
}

func mustDrop(t testing.TB, admin *pgxpool.Pool, database string) {
	if _, err := admin.Exec(context.Background(), "DROP DATABASE "+database+" WITH (FORCE)"); err != nil {
		t.Error(err)
	}
}

// Nothing depends on search_path, the time zone, or how values are printed.
func TestSettings(t *testing.T) {
	server := testserver.Postgres(t)
	admin := newPool(t, server.URL)
	evil := "evil_" + strings.ToLower(rand.Text())
	for _, sql := range []string{
		"CREATE SCHEMA IF NOT EXISTS " + evil,
		"CREATE FUNCTION " + evil + ".clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''epoch''::timestamptz'",
		"CREATE FUNCTION " + evil + ".pg_notify(text, text) RETURNS text LANGUAGE sql AS 'SELECT ''''::text'",
		"CREATE FUNCTION " + evil + ".encode(bytea, text) RETURNS text LANGUAGE sql AS 'SELECT ''''::text'",
		"CREATE FUNCTION " + evil + ".shorter(double precision, interval) RETURNS interval LANGUAGE sql AS 'SELECT interval ''1 us'''",
		"CREATE FUNCTION " + evil + ".shorter(bigint, interval) RETURNS interval LANGUAGE sql AS 'SELECT interval ''1 us'''",
		"CREATE OPERATOR " + evil + ".* (FUNCTION = " + evil + ".shorter, LEFTARG = bigint, RIGHTARG = interval)",
		"CREATE DOMAIN " + evil + ".bytea AS pg_catalog.int4",
		"CREATE DOMAIN " + evil + ".text AS pg_catalog.int4",
	} {
		mustExec(t, admin, sql)
	}
	for name, settings := range map[string]map[string]string{
		"empty search_path":  {"search_path": ""},
		"hostile path":       {"search_path": evil + ", pg_catalog"},
		"TimeZone":           {"timezone": "Pacific/Apia"},
		"POSIX TimeZone":     {"timezone": "XYZ-14:30"},
		"printing":           {"datestyle": "SQL, DMY", "intervalstyle": "sql_standard", "bytea_output": "escape", "extra_float_digits": "-15"},
		"plans":              {"plan_cache_mode": "force_generic_plan", "enable_indexscan": "off", "enable_bitmapscan": "off"},
		"custom plans":       {"plan_cache_mode": "force_custom_plan", "enable_seqscan": "off"},
		"asynchronous":       {"synchronous_commit": "off"},
		"repeatable read":    {"default_transaction_isolation": "repeatable read"},
		"serializable":       {"default_transaction_isolation": "serializable", "default_transaction_deferrable": "on"},
		"row security":       {"row_security": "off"},
		"backslash in quote": {"backslash_quote": "off", "escape_string_warning": "on"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, m := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
				configure := func(c *pgxpool.Config) {
					fast(c)
					maps.Copy(c.ConnConfig.RuntimeParams, settings)
					c.ConnConfig.DefaultQueryExecMode = m
				}
				pool := newPool(t, server.URL, configure)
				o := newTable(t, pool)
				a, b := newStore(t, pool, o), newStore(t, newPool(t, server.URL, configure), o)
				for _, key := range oddKeys {
					trip(t, a, b, key)
				}
			}
		})
	}
}

// Eight clients on one key, at every isolation level.
func TestIsolationLevels(t *testing.T) {
	server := testserver.StartPostgres(t, "-c", "synchronous_commit=off")
	admin := newPool(t, server.URL)
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			// As a DBA would do it.
			role := "role_" + strings.ReplaceAll(level, " ", "_")
			mustExec(t, admin, "CREATE ROLE "+role+" SUPERUSER LOGIN")
			mustExec(t, admin, "ALTER ROLE "+role+" SET default_transaction_isolation = '"+level+"'")
			as := func(c *pgxpool.Config) { c.ConnConfig.User = role }
			o := newTable(t, admin)
			o.Retention = time.Millisecond // so that purges take part
			before := len(logged(t, server, "ERROR"))

			var wg sync.WaitGroup
			var mu sync.Mutex
			holders, tokens, wins := 0, []int64(nil), 0
			for i := range 8 {
				store := newStore(t, newPool(t, server.URL, as, maxConns(2)), o)
				wg.Go(func() {
					for n := range 60 {
						owner := fmt.Sprint(i, " ", n)
						// Beside it, keys that nobody else uses and that get old.
						other := fmt.Sprint("key ", i, " ", n)
						if _, err := store.Acquire(t.Context(), other, owner, time.Millisecond); err != nil {
							t.Errorf("Acquire of another key: %v", err)
						}
						grant, err := store.Acquire(t.Context(), "contended", owner, long)
						if err != nil {
							t.Errorf("Acquire: %v", err)
						}
						if !grant.Acquired {
							continue
						}
						mu.Lock()
						if holders++; holders > 1 {
							t.Errorf("%d holders", holders)
						}
						tokens = append(tokens, grant.Token)
						wins++
						mu.Unlock()
						if renewed, err := store.Renew(t.Context(), "contended", owner, long); err != nil || !renewed {
							t.Errorf("Renew: %v, %v", renewed, err)
						}
						mu.Lock()
						holders--
						mu.Unlock()
						if err := store.Release(t.Context(), "contended", owner); err != nil {
							t.Errorf("Release: %v", err)
						}
					}
				})
			}
			wg.Wait()
			if !slices.IsSorted(tokens) || len(slices.Compact(slices.Clone(tokens))) != len(tokens) {
				t.Errorf("tokens %v, want that they grow", tokens)
			}
			lines := logged(t, server, "ERROR")[before:]
			t.Logf("%d of %d tries won, %d errors in the server's log", wins, 8*60, len(lines))
			if level == "read committed" && len(lines) > 0 {
				t.Errorf("the server logged %q, want no errors", lines)
			}
		})
	}
}

// An UPDATE that waits for a row's lock has read the clock before the wait: a
// renewal said yes a second after the lease had expired.
func TestRenewThatWaitedForTheRowLock(t *testing.T) {
	for name, lock := range map[string]string{
		"FOR UPDATE": "SELECT FROM %s FOR UPDATE",
		"FOR SHARE":  "SELECT FROM %s FOR SHARE",
		"UPDATE":     "UPDATE %s SET waited_until = now()",
	} {
		t.Run(name, func(t *testing.T) {
			store, pool, o := open(t, fast)
			const ttl = 2 * time.Second // until somebody waits
			mustAcquire(t, store, "key", "owner", ttl)
			row := "SELECT (expires_at, token, owner)::text FROM " + table(o)
			before := value[string](t, pool, row)

			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.Background()) }()
			if _, err := tx.Exec(t.Context(), strings.ReplaceAll(lock, "%s", table(o))); err != nil {
				t.Fatal(err)
			}
			type answer struct {
				renewed bool
				err     error
			}
			answers := make(chan answer, 1)
			go func() {
				renewed, err := store.Renew(t.Context(), "key", "owner", long)
				answers <- answer{renewed, err}
			}()
			eventually(t, "the renewal waits for the lock", func() bool {
				return value[int](t, pool, "SELECT count(*) FROM pg_locks WHERE NOT granted") > 0
			})
			eventually(t, "the lease has expired", func() bool {
				return value[bool](t, pool, "SELECT expires_at < clock_timestamp() FROM "+table(o))
			})
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if a := <-answers; a.err != nil || a.renewed {
				t.Errorf("Renew: %v, error %v, want false: the lease had expired", a.renewed, a.err)
			}
			if after := value[string](t, pool, row); after != before {
				t.Errorf("the row is %s, was %s, want it unchanged", after, before)
			}
			mustAcquire(t, store, "key", "successor", long)
		})
	}
}

// The same for the other methods: what they say after a wait is right.
func TestCallsThatWaitedForTheRowLock(t *testing.T) {
	store, pool, o := open(t, fast)
	// Until one's own renewal or release the lock of others changes nothing.
	hold := func(t *testing.T, key string, during func()) {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(context.Background()) }()
		if _, err := tx.Exec(t.Context(), "SELECT FROM "+table(o)+" WHERE key = convert_to($1, 'UTF8') FOR UPDATE", key); err != nil {
			t.Fatal(err)
		}
		during()
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	waiting := func() bool { return value[int](t, pool, "SELECT count(*) FROM pg_locks WHERE NOT granted") > 0 }

	t.Run("a try on a held key does not wait", func(t *testing.T) {
		mustAcquire(t, store, "held", "owner", long)
		hold(t, "held", func() {
			mustBeHeld(t, store, "held")
			mustRenew(t, store, "held", "stranger", long, false)
			mustRelease(t, store, "held", "stranger")
		})
	})
	t.Run("Acquire", func(t *testing.T) {
		token := mustAcquire(t, store, "expired", "owner", time.Millisecond)
		time.Sleep(2 * time.Millisecond)
		grants := make(chan core.Grant, 1)
		hold(t, "expired", func() {
			go func() {
				grant, err := store.Acquire(t.Context(), "expired", "next", long)
				if err != nil {
					t.Error(err)
				}
				grants <- grant
			}()
			eventually(t, "Acquire waits", waiting)
		})
		if grant := <-grants; !grant.Acquired || grant.Token <= token {
			t.Errorf("%+v, want acquired with a token above %d", grant, token)
		}
		mustBeHeld(t, store, "expired")
	})
	t.Run("Release", func(t *testing.T) {
		mustAcquire(t, store, "released", "owner", long)
		done := make(chan error, 1)
		hold(t, "released", func() {
			go func() { done <- store.Release(t.Context(), "released", "owner") }()
			eventually(t, "Release waits", waiting)
		})
		if err := <-done; err != nil {
			t.Errorf("Release: %v", err)
		}
		mustAcquire(t, store, "released", "next", long)
	})
	// docs: a lease's row fences work in the same database.
	t.Run("FOR SHARE makes a successor wait", func(t *testing.T) {
		token := mustAcquire(t, store, "fenced", "owner", short)
		const fence = "SELECT 1 FROM %s WHERE key = convert_to($1, 'UTF8') AND token = $2 FOR SHARE"
		sql := strings.ReplaceAll(fence, "%s", table(o))
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(context.Background()) }()
		if tag, err := tx.Exec(t.Context(), sql, "fenced", token); err != nil || tag.RowsAffected() != 1 {
			t.Fatalf("%d rows, error %v, want the lease's", tag.RowsAffected(), err)
		}
		next := make(chan int64, 1)
		eventually(t, "the lease has expired", func() bool {
			return value[bool](t, pool, "SELECT expires_at < clock_timestamp() FROM "+table(o)+" WHERE key = 'fenced'")
		})
		go func() {
			grant, err := store.Acquire(t.Context(), "fenced", "next", long)
			if err != nil {
				t.Error(err)
			}
			next <- grant.Token
		}()
		eventually(t, "the successor waits", waiting)
		select {
		case <-next:
			t.Error("a successor was granted the key during the transaction")
		default:
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := <-next; got <= token {
			t.Errorf("token %d after %d", got, token)
		}
		if n := mustExec(t, pool, sql, "fenced", token); n != 0 {
			t.Errorf("%d rows for the old token, want 0: it is fenced off", n)
		}
	})
}

// A callback uses the pool's only connection, and a waiter waits on it, too.
func TestPoolOfOne(t *testing.T) {
	store, pool, _ := open(t, maxConns(1))
	strategy, err := core.NewStrategy(store, core.Options{TTL: 5 * time.Second, Wait: core.WaitForever})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 5 {
				err := strategy.Do(ctx, "key", func(ctx context.Context) error {
					tx, err := pool.Begin(ctx) // holds the connection
					if err != nil {
						return err
					}
					if _, err := tx.Exec(ctx, "SELECT pg_sleep(0.01)"); err != nil {
						return err
					}
					return tx.Commit(ctx)
				})
				if err != nil {
					t.Errorf("Do: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if n := pool.Stat().TotalConns(); n > 1 {
		t.Errorf("%d connections in the pool, want 1", n)
	}
	// A callback that is longer than the lease, and takes the connection only
	// now and then, does not lose it.
	err = strategy.Do(ctx, "key", func(ctx context.Context) error {
		for until := time.Now().Add(7 * time.Second); time.Now().Before(until); {
			if _, err := pool.Exec(ctx, "SELECT pg_sleep(0.05)"); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Errorf("Do: %v", err)
	}
}

// Renewals, releases and new acquisitions of one key stay on their page and
// touch no index.
func TestUpdatesAreHOT(t *testing.T) {
	// Without autovacuum, whose snapshots keep old versions from being pruned.
	pool := newPool(t, testserver.StartPostgres(t, "-c", "autovacuum=off").URL, maxConns(1), fast)
	o := newTable(t, pool)
	store := newStore(t, pool, o)
	const rounds, keys = 2000, 20
	for i := range rounds {
		key := fmt.Sprint("key ", i%keys)
		mustAcquire(t, store, key, "owner of some length, as real ones have", long)
		mustRenew(t, store, key, "owner of some length, as real ones have", long, true)
		mustRelease(t, store, key, "owner of some length, as real ones have")
	}
	mustExec(t, pool, "SELECT pg_stat_force_next_flush()")
	updates := value[int64](t, pool, "SELECT pg_stat_get_tuples_updated($1::regclass)", table(o))
	hot := value[int64](t, pool, "SELECT pg_stat_get_tuples_hot_updated($1::regclass)", table(o))
	size := value[int64](t, pool, "SELECT pg_relation_size($1::regclass)", table(o))
	index := value[int64](t, pool, "SELECT pg_indexes_size($1::regclass)", table(o))
	t.Logf("%d updates, %.2f %% of them HOT; the table has %d bytes, its index %d", updates, 100*float64(hot)/float64(updates), size, index)
	if updates < 3*rounds-keys || hot*100 < updates*99 {
		t.Errorf("%d updates, %d of them HOT, want at least %d and 99 %%", updates, hot, 3*rounds-keys)
	}
	if size > 64<<10 {
		t.Errorf("the table has grown to %d bytes for %d keys", size, keys)
	}
}

// Errors of the server reach the caller, so that errors.As finds them.
func TestServerErrorsArePassedOn(t *testing.T) {
	server := testserver.Postgres(t)
	for name, c := range map[string]struct{ parameter, value, code string }{
		"lock_timeout":      {"lock_timeout", "50ms", "55P03"},
		"statement_timeout": {"statement_timeout", "50ms", "57014"},
	} {
		t.Run(name, func(t *testing.T) {
			store, pool, o := open(t, fast)
			mustAcquire(t, store, "key", "secret owner", long)
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.Background()) }()
			if _, err := tx.Exec(t.Context(), "SELECT FROM "+table(o)+" FOR UPDATE"); err != nil {
				t.Fatal(err)
			}
			impatient := newStore(t, newPool(t, server.URL, setting(c.parameter, c.value)), o)
			_, renew := impatient.Renew(t.Context(), "key", "secret owner", long)
			release := impatient.Release(t.Context(), "key", "secret owner")
			for call, err := range map[string]error{"Renew": renew, "Release": release} {
				if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != c.code || !strings.HasPrefix(err.Error(), "postgres: ") {
					t.Errorf("%s: error %v, want one that wraps SQLSTATE %s", call, err, c.code)
				} else if strings.Contains(err.Error(), "secret") {
					t.Errorf("%s: error %v has the owner in it", call, err)
				}
			}
		})
	}
	t.Run("no server", func(t *testing.T) {
		store := newStore(t, newPool(t, "postgres://postgres@127.0.0.1:1/postgres?sslmode=disable"), pgstore.Options{})
		_, err := store.Acquire(t.Context(), "key", "owner", long)
		if _, ok := errors.AsType[*pgconn.ConnectError](err); !ok {
			t.Errorf("Acquire: error %v, want one that wraps pgx's", err)
		}
	})
}

// mustEndWith cancels ctx in the middle of call.
func mustEndWith(t *testing.T, call func(ctx context.Context) error) {
	t.Helper()
	const bound = 50 * time.Millisecond
	var late time.Duration
	for range 5 { // a busy machine may be late; the store would be so every time
		ctx, cancel := context.WithCancel(t.Context())
		var ended time.Time
		timer := time.AfterFunc(50*time.Millisecond, func() { ended = time.Now(); cancel() })
		err := call(ctx)
		returned := time.Now()
		timer.Stop()
		if ctx.Err() == nil {
			t.Fatalf("error %v before ctx ended", err)
		}
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("error %v, want one that matches context.Canceled", err)
		}
		if late = returned.Sub(ended); late <= bound {
			return
		}
	}
	t.Errorf("returned %v after ctx ended, want at most %v", late, bound)
}

// stubborn is a context watcher that gives the server a minute to confirm the
// cancel, which pgx allows.
type stubborn struct {
	*pgconn.CancelRequestContextWatcherHandler
}

// wrapped is a DB of which the store knows nothing.
type wrapped struct{ pgstore.DB }

func TestEveryCallEndsWithContext(t *testing.T) {
	server := testserver.StartPostgres(t)
	admin := newPool(t, server.URL)
	o := newTable(t, admin)
	dbs := map[string]func(t *testing.T) (pool *pgxpool.Pool, begin func()){
		"plain pool": func(t *testing.T) (*pgxpool.Pool, func()) { return newPool(t, server.URL), func() {} },
		"one connection, taken": func(t *testing.T) (*pgxpool.Pool, func()) {
			pool := newPool(t, server.URL, maxConns(1))
			return pool, func() {
				conn, err := pool.Acquire(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(conn.Release)
			}
		},
		"wrapped": func(t *testing.T) (*pgxpool.Pool, func()) { return newPool(t, server.URL), func() {} },
		"watcher that waits for the server": func(t *testing.T) (*pgxpool.Pool, func()) {
			return newPool(t, server.URL, func(c *pgxpool.Config) {
				c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
					return stubborn{&pgconn.CancelRequestContextWatcherHandler{Conn: conn, CancelRequestDelay: 0, DeadlineDelay: time.Minute}}
				}
			}), func() {}
		},
		"watcher that needs a connection": func(t *testing.T) (*pgxpool.Pool, func()) {
			return newPool(t, server.URL, func(c *pgxpool.Config) {
				c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
					_ = conn.Conn().RemoteAddr()
					return &pgconn.DeadlineContextWatcherHandler{Conn: conn.Conn(), DeadlineDelay: time.Minute}
				}
			}), func() {}
		},
		"hook that hangs": func(t *testing.T) (*pgxpool.Pool, func()) {
			var hanging atomic.Bool
			hang := make(chan struct{})
			pool := newPool(t, server.URL, func(c *pgxpool.Config) {
				c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
					if hanging.Load() {
						<-hang
					}
					return true, nil
				}
			})
			t.Cleanup(func() { close(hang) }) // before the pool is closed
			return pool, func() { hanging.Store(true) }
		},
	}
	for name, open := range dbs {
		t.Run(name, func(t *testing.T) {
			pool, begin := open(t)
			var db pgstore.DB = pool
			if name == "wrapped" {
				db = wrapped{pool}
			}
			store, err := pgstore.New(db, o) // closed by nobody: Close waits for a purge, and the server is silent
			if err != nil {
				t.Fatal(err)
			}
			key := t.Name()
			// By another store, whose purge is over when it is closed: one that had
			// the connection would let the first call dial another, and miss what
			// is tested here.
			holder := newStore(t, pool, o)
			mustAcquire(t, holder, key, "owner", long)
			if err := holder.Close(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the connection is idle", func() bool {
				s := pool.Stat()
				return s.AcquiredConns() == 0 && s.IdleConns() > 0
			})
			begin()
			server.Pause(t)
			defer server.Resume(t)
			mustEndWith(t, func(ctx context.Context) error {
				_, err := store.Acquire(ctx, key+"2", "owner", long)
				return err
			})
			mustEndWith(t, func(ctx context.Context) error {
				_, err := store.Renew(ctx, key, "owner", long)
				return err
			})
			mustEndWith(t, func(ctx context.Context) error { return store.Release(ctx, key, "owner") })
			mustEndWith(t, func(ctx context.Context) error {
				_, _, err := store.Break(ctx, key)
				return err
			})
			mustEndWith(t, func(ctx context.Context) error {
				_, _, err := store.Subscribe(ctx, key)
				return err
			})
			mustEndWith(t, func(ctx context.Context) error {
				for _, err := range store.Leases(ctx, core.LeaseQuery{}) {
					if err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

// What was acknowledged is there after a crash.
func TestLeasesSurviveACrash(t *testing.T) {
	server := testserver.StartPostgres(t)
	pool := newPool(t, server.URL)
	o := newTable(t, pool)
	store := newStore(t, pool, o)
	signals, stop, err := store.Subscribe(t.Context(), "held 0")
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	token := make(map[string]int64)
	for i := range 50 {
		key := fmt.Sprint("held ", i)
		token[key] = mustAcquire(t, store, key, "owner", time.Hour)
		mustRenew(t, store, key, "owner", time.Hour, true)
		mustAcquire(t, store, fmt.Sprint("released ", i), "owner", time.Hour)
		mustRelease(t, store, fmt.Sprint("released ", i), "owner")
	}
	drain(signals)
	server.Kill(t)
	if _, err := store.Acquire(t.Context(), "held 0", "other", long); err == nil {
		t.Error("an answer without a server")
	}
	server.Start(t)
	eventually(t, "the pool has connections again", func() bool {
		_, err := store.Acquire(t.Context(), "held 0", "other", long)
		return err == nil
	})
	for i := range 50 {
		key := fmt.Sprint("held ", i)
		mustBeHeld(t, store, key)
		mustRenew(t, store, key, "owner", time.Hour, true)
		mustRelease(t, store, key, "owner")
		if next := mustAcquire(t, store, key, "next", long); next <= token[key] {
			t.Errorf("token %d after %d", next, token[key])
		}
		mustAcquire(t, store, fmt.Sprint("released ", i), "next", long)
	}
	mustSignal(t, signals) // whoever waited is woken
}
