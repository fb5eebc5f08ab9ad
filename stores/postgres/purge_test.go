package pgstore_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// rows counts the rows of keys.
func rows(t testing.TB, pool *pgxpool.Pool, o pgstore.Options) int {
	t.Helper()
	return value[int](t, pool, "SELECT count(*) FROM "+table(o)+" WHERE key >= '\\x01'")
}

// A hundred thousand keys are locked once, and never again. Once Retention has
// passed, the acquisitions of one other key remove them all.
func TestHundredThousandKeysLockedOnce(t *testing.T) {
	const keys, clients = 100_000, 4
	pool := newPool(t, testserver.StartPostgres(t, "-c", "synchronous_commit=off").URL, maxConns(clients))
	o := newTable(t, pool)
	o.Retention = 2 * time.Second
	stores := make([]*pgstore.Store, clients)
	for i := range stores {
		stores[i] = newStore(t, pool, o)
	}
	start := time.Now()
	var wg sync.WaitGroup
	for i, store := range stores {
		wg.Go(func() {
			for n := range keys / clients {
				key := fmt.Sprintf("order-%08x-%d", rand.Uint32(), n)
				grant, err := store.Acquire(context.Background(), key, "owner", long)
				if err != nil || !grant.Acquired {
					t.Errorf("Acquire(%q): %v, %v", key, grant.Acquired, err)
					return
				}
				if i%2 == 0 {
					continue // crashed
				}
				if err := store.Release(context.Background(), key, "owner"); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	// The leases of those who crashed end now, for the sake of the test's time.
	mustExec(t, pool, "UPDATE "+table(o)+" SET expires_at = least(expires_at, clock_timestamp()) WHERE key >= '\\x01'")
	before := rows(t, pool, o)
	t.Logf("%d keys locked in %v, %d rows left", keys, time.Since(start).Round(time.Millisecond), before)

	time.Sleep(o.Retention)
	start = time.Now()
	token := mustAcquire(t, stores[0], "the one key in use", "owner", long)
	mustRelease(t, stores[0], "the one key in use", "owner")
	acquisitions := 1
	for rows(t, pool, o) > 1 && acquisitions < keys {
		for range 200 {
			next := mustAcquire(t, stores[0], "the one key in use", "owner", long)
			if next <= token {
				t.Fatalf("token %d after %d", next, token)
			}
			token = next
			mustRelease(t, stores[0], "the one key in use", "owner")
			acquisitions++
		}
	}
	left := rows(t, pool, o)
	t.Logf("%d rows left after %d acquisitions in %v", left, acquisitions, time.Since(start).Round(time.Millisecond))
	if left > 1 {
		t.Errorf("%d rows left after %d acquisitions, want the one of the key in use", left, acquisitions)
	}
	if acquisitions >= before {
		t.Errorf("%d acquisitions to purge %d rows, want each to purge more than it adds", acquisitions, before)
	}
	_ = stores[0].Close() // waits for a step that may run
	if n := value[int](t, pool, "SELECT count(*) FROM "+table(o)); n != 2 {
		t.Errorf("%d rows, want 2: the key in use and the cursor", n)
	}
}

// Statements that were prepared while the table had one page, which is read whole
// then, are prepared again when it has grown, though nobody analyzes it.
func TestStatementsArePlannedForTheTableAsItIs(t *testing.T) {
	pool := newPool(t, testserver.StartPostgres(t, "-c", "autovacuum=off").URL, maxConns(1))
	o := newTable(t, pool)
	store := newStore(t, pool, o)
	rounds := func(n int) {
		t.Helper()
		for range n { // from the sixth on a plan is kept
			mustAcquire(t, store, "key", "owner", long)
			mustRenew(t, store, "key", "owner", long, true)
			mustRelease(t, store, "key", "owner")
		}
	}
	query := func(sql string) []string {
		t.Helper()
		rows, err := pool.Query(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return lines
	}
	// plans returns the plans of acquire, renew and release that the pool's
	// connection has kept.
	plans := func(number int) string {
		t.Helper()
		explain := query(fmt.Sprintf(`
			SELECT format('EXPLAIN EXECUTE %%I (%%s)', name, array_to_string(array_fill('NULL'::text, ARRAY[cardinality(parameter_types)]), ','))
			FROM pg_prepared_statements WHERE statement LIKE '%%/* %d */'`, number))
		if len(explain) != 3 {
			t.Fatalf("%d statements of number %d are prepared, want 3", len(explain), number)
		}
		var all []string
		for _, sql := range explain {
			all = append(all, query(sql)...)
		}
		return strings.Join(all, "\n")
	}
	mustAcquire(t, store, "key", "owner", long)
	mustRelease(t, store, "key", "owner")
	mustExec(t, pool, "VACUUM ANALYZE "+table(o))
	rounds(20)
	if !strings.Contains(plans(0), "Seq Scan") {
		t.Log("this server does not read a table of one page whole: the test shows nothing")
	}
	mustExec(t, pool, "INSERT INTO "+table(o)+" SELECT convert_to('key ' || n, 'UTF8'), 'owner', n, 'infinity' FROM generate_series(1, 20000) AS n")
	rounds(200) // a purge step sees it
	if plans := plans(1); strings.Contains(plans, "Seq Scan") {
		t.Errorf("a call reads the whole table of 20,000 rows:\n%s", plans)
	}
}

// A program that acquires one lease in its life takes part in the purge.
func TestShortLivedProgramsPurge(t *testing.T) {
	pool := newPool(t, testserver.Postgres(t).URL, fast)
	o := newTable(t, pool)
	o.Retention = time.Millisecond
	const keys = 1000
	mustExec(t, pool, "INSERT INTO "+table(o)+" SELECT convert_to('key ' || n, 'UTF8'), 'owner', n, 'epoch' FROM generate_series(1, $1) AS n", keys)
	for i := range 50 {
		store, err := pgstore.New(pool, o)
		if err != nil {
			t.Fatal(err)
		}
		mustAcquire(t, store, fmt.Sprint("a program's key ", i%3), "owner", time.Millisecond)
		if err := store.Close(); err != nil { // waits for the step
			t.Fatal(err)
		}
		time.Sleep(2 * time.Millisecond)
		if rows(t, pool, o) <= 3 {
			t.Logf("%d rows were purged by %d programs", keys, i+1)
			return
		}
	}
	t.Errorf("%d rows left of %d after 50 programs", rows(t, pool, o), keys)
}

// What a purge leaves alone.
func TestPurgeSpares(t *testing.T) {
	pool := newPool(t, testserver.Postgres(t).URL, fast)
	for name, c := range map[string]struct {
		row  string // expires_at, waited_until, token
		kept bool
	}{
		"old":                        {"now() - interval '2 h', 'epoch', 5", false},
		"never locked, waited once":  {"'epoch', now() - interval '1 s', 0", false},
		"live":                       {"now() + interval '1 h', 'epoch', 5", true},
		"ended within the retention": {"now() - interval '30 min', 'epoch', 5", true},
		"waited for":                 {"now() - interval '2 h', now() + interval '1 min', 5", true},
		"token ahead of the clock":   {"now() - interval '2 h', 'epoch', 1::bigint << 52", true},
	} {
		t.Run(name, func(t *testing.T) {
			o := newTable(t, pool)
			o.Retention, o.Prefix = time.Hour, "mine:"
			for _, prefix := range []string{"mine", "mine:", "mine;"} {
				mustExec(t, pool, "INSERT INTO "+table(o)+" (key, owner, expires_at, waited_until, token) VALUES (convert_to($1, 'UTF8'), 'o', "+c.row+")", prefix+"key")
			}
			store := newStore(t, pool, o)
			mustAcquire(t, store, "a", "owner", long)
			if err := store.Close(); err != nil { // waits for the step
				t.Fatal(err)
			}
			has := func(key string) bool {
				return value[bool](t, pool, "SELECT EXISTS (SELECT FROM "+table(o)+" WHERE key = convert_to($1, 'UTF8'))", key)
			}
			if got := has("mine:key"); got != c.kept {
				t.Errorf("kept: %v, want %v", got, c.kept)
			}
			if !has("minekey") || !has("mine;key") {
				t.Error("a row of another prefix is gone")
			}
		})
	}
}

// A row that somebody has locked does not hold a purge up, and a purge does not
// hold anybody up.
func TestPurgeWaitsForNobody(t *testing.T) {
	store, pool, o := open(t, fast)
	mustExec(t, pool, "INSERT INTO "+table(o)+" SELECT convert_to('key ' || n, 'UTF8'), 'owner', n, 'epoch' FROM generate_series(1, 20) AS n")
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "SELECT FROM "+table(o)+" WHERE key = 'key 7' FOR SHARE"); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	mustAcquire(t, store, "a", "owner", long)
	if err := store.Close(); err != nil { // waits for the step
		t.Fatal(err)
	}
	if n := rows(t, pool, o); n != 2 {
		t.Errorf("%d rows, want 2: the new one and the locked one", n)
	}
	if took := time.Since(start); took > 4*time.Second {
		t.Errorf("it took %v", took)
	}
}

// Purges, acquisitions and renewals of the same few keys, by many: nobody gets
// an error, tokens grow, and nothing is written to the server's log.
func TestPurgeRacesAcquire(t *testing.T) {
	server := testserver.StartPostgres(t, "-c", "synchronous_commit=off")
	pool := newPool(t, server.URL)
	o := newTable(t, pool)
	o.Retention = time.Microsecond
	var wg sync.WaitGroup
	var mu sync.Mutex
	last := make(map[string]int64)
	for i := range 8 {
		store := newStore(t, newPool(t, server.URL, maxConns(2)), o)
		wg.Go(func() {
			for n := range 300 {
				key, owner := fmt.Sprint("key ", n%5), fmt.Sprint(i, " ", n)
				sent := time.Now()
				grant, err := store.Acquire(t.Context(), key, owner, long)
				if err != nil {
					t.Errorf("Acquire: %v", err)
					return
				}
				if !grant.Acquired {
					if grant.Left <= 0 {
						t.Errorf("not acquired, Left %v, want how long somebody has it", grant.Left)
					}
					continue
				}
				mu.Lock()
				if grant.Token <= last[key] {
					t.Errorf("token %d after %d, sent at %v", grant.Token, last[key], sent)
				}
				last[key] = grant.Token
				mu.Unlock()
				if n%3 == 0 {
					if renewed, err := store.Renew(t.Context(), key, owner, long); err != nil || !renewed {
						t.Errorf("Renew: %v, %v", renewed, err)
					}
				}
				if err := store.Release(t.Context(), key, owner); err != nil {
					t.Errorf("Release: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if lines := logged(t, server, "ERROR", "WARNING"); len(lines) > 0 {
		t.Errorf("the server logged %q, want no errors", lines)
	}
}

// An insert that had to wait had read the clock before the wait: its token was
// lower than that of a lease which was granted, ended and purged meanwhile.
func TestTokenOfAnAcquireThatWaited(t *testing.T) {
	store, pool, o := open(t, fast)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "INSERT INTO "+table(o)+" VALUES ('key', 'o', 1, 'epoch')"); err != nil {
		t.Fatal(err)
	}
	grants := make(chan core.Grant, 1)
	go func() {
		grant, err := store.Acquire(t.Context(), "key", "owner", long)
		if err != nil {
			t.Error(err)
		}
		grants <- grant
	}()
	eventually(t, "Acquire waits", func() bool {
		return value[int](t, pool, "SELECT count(*) FROM pg_locks WHERE NOT granted") > 0
	})
	time.Sleep(1100 * time.Millisecond)
	// What others could have been granted by now.
	token := value[int64](t, pool, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if grant := <-grants; !grant.Acquired || grant.Token <= token {
		t.Errorf("%+v, want acquired with a token above %d", grant, token)
	}
	mustRenew(t, store, "key", "owner", long, true)
}
