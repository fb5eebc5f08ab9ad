package pgstore_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testlog"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// mustSubscribe subscribes, and stops at the end of the test.
func mustSubscribe(t testing.TB, store *pgstore.Store, key string) (signals <-chan struct{}, stop func()) {
	t.Helper()
	signals, stop, err := store.Subscribe(t.Context(), key)
	if err != nil {
		t.Fatalf("Subscribe(%q): %v", key, err)
	}
	t.Cleanup(stop)
	return signals, stop
}

// listeners counts the connections of the server that did LISTEN last.
func listeners(t testing.TB, admin *pgxpool.Pool, application string) int {
	t.Helper()
	return value[int](t, admin, "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1", application)
}

// Whoever never waits has no second connection, and one connection serves all
// keys and waiters.
func TestListenConnection(t *testing.T) {
	t.Parallel()
	server := testserver.Postgres(t)
	admin := newPool(t, server.URL)
	application := "test of the listen connection"
	pool := newPool(t, server.URL, maxConns(1), setting("application_name", application), func(c *pgxpool.Config) {
		// What the pool does to its connections is done to this one.
		c.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error { c.User = "postgres"; return nil }
		c.ConnConfig.User = "nobody of that name"
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET work_mem = '1MB'")
			return err
		}
	})
	store := newStore(t, pool, newTable(t, admin))
	mustAcquire(t, store, "key 0", "owner", long)
	mustRelease(t, store, "key 0", "owner")
	if n := listeners(t, admin, application); n != 1 {
		t.Errorf("%d connections before anybody waits, want the pool's one", n)
	}
	var stops []func()
	for i := range 50 {
		for range 3 {
			_, stop := mustSubscribe(t, store, fmt.Sprint("key ", i))
			stops = append(stops, stop)
		}
	}
	if n := listeners(t, admin, application); n != 2 {
		t.Errorf("%d connections with 150 subscriptions, want 2", n)
	}
	if n := pool.Stat().TotalConns(); n != 1 {
		t.Errorf("%d connections in the pool, want 1", n)
	}
	for _, stop := range stops {
		stop()
	}
	eventually(t, "the connection is closed when nobody has waited for a while", func() bool {
		return listeners(t, admin, application) == 1
	})
	// And opened again.
	signals, _ := mustSubscribe(t, store, "key 0")
	mustAcquire(t, store, "key 0", "owner", long)
	drain(signals)
	mustRelease(t, store, "key 0", "owner")
	mustSignal(t, signals)
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "Close closes it", func() bool { return listeners(t, admin, application) == 1 })
	if _, open := <-signals; open {
		t.Error("a signal after Close, want a closed channel")
	}
	if _, _, err := store.Subscribe(t.Context(), "key 0"); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("Subscribe after Close: error %v, want one that says so", err)
	}
	// What is held can still be released.
	mustAcquire(t, store, "key 0", "owner", long)
	mustRelease(t, store, "key 0", "owner")
}

// NOTIFY makes commits wait for each other, so that only releases that somebody
// waits for may use it.
func TestNotifiesOnlyWhenSomebodyWaits(t *testing.T) {
	store, pool, o := open(t, fast)
	ear, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ear.Close(context.Background()) }()
	signals, stop := mustSubscribe(t, store, "other key")
	if _, open := <-signals; !open {
		t.Fatal("the channel is closed, want the signal of a new connection")
	}
	// Old and new programs that run side by side must agree on it.
	sum := sha256.Sum256([]byte(table(o)))
	channel := fmt.Sprintf("leasekit_%x", sum[:16])
	if _, err := ear.Exec(t.Context(), "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
		t.Fatal(err)
	}
	// heard waits for as many as there should be, and then for more.
	heard := func(want int) int {
		for n := 0; ; n++ {
			patience := 10 * time.Second
			if n >= want {
				patience = 200 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			_, err := ear.WaitForNotification(ctx)
			cancel()
			if err != nil {
				return n
			}
		}
	}
	rounds := func(key string) {
		for range 20 {
			mustAcquire(t, store, key, "owner", long)
			mustRenew(t, store, key, "owner", long, true)
			mustRelease(t, store, key, "stranger")
			mustRelease(t, store, key, "owner")
			mustRelease(t, store, key, "owner")
		}
	}
	rounds("key")
	if n := heard(0); n != 0 {
		t.Errorf("%d notifications for a key that nobody waits for, want none", n)
	}
	rounds("other key")
	if n := heard(20); n != 20 {
		t.Errorf("%d notifications for 20 releases of a key that somebody waits for, want 20", n)
	}
	stop()
	// The mark runs out by itself. Do not wait for that.
	mustExec(t, pool, "UPDATE "+table(o)+" SET waited_until = clock_timestamp() WHERE key = 'other key'")
	rounds("other key")
	if n := heard(0); n != 0 {
		t.Errorf("%d notifications after the mark has run out, want none", n)
	}
}

// A hundred waiters for one key write its row once.
func TestSubscriptionsWriteOnce(t *testing.T) {
	store, pool, o := open(t, fast)
	other := newStore(t, pool, o)
	mustAcquire(t, store, "key", "owner", long)
	version := func() string {
		return value[string](t, pool, "SELECT xmin::text || ctid::text FROM "+table(o)+" WHERE key = 'key'")
	}
	before := version()
	mustSubscribe(t, store, "key")
	marked := version()
	if marked == before {
		t.Fatal("the row has not been marked")
	}
	for range 50 {
		mustSubscribe(t, store, "key")
		_, stop := mustSubscribe(t, other, "key")
		stop() // so that the next one asks the server
		mustBeHeld(t, store, "key")
	}
	if after := version(); after != marked {
		t.Errorf("row version %s after a hundred more subscriptions, want %s", after, marked)
	}
}

// A mark is renewed as long as somebody waits, also one that was lost.
func TestMarksAreRenewed(t *testing.T) {
	t.Parallel()
	store, pool, o := open(t, fast)
	signals, _ := mustSubscribe(t, store, "key")
	mustSubscribe(t, store, "another key")
	remaining := "SELECT count(*) FROM " + table(o) + " WHERE waited_until > clock_timestamp() + interval '30 s'"
	mustExec(t, pool, "UPDATE "+table(o)+" SET waited_until = clock_timestamp() + interval '20 s'")
	eventually(t, "the marks are renewed", func() bool { return value[int](t, pool, remaining) == 2 })
	mustExec(t, pool, "TRUNCATE "+table(o))
	eventually(t, "the marks are made again", func() bool { return value[int](t, pool, remaining) == 2 })
	mustAcquire(t, store, "key", "owner", long)
	drain(signals)
	mustRelease(t, store, "key", "owner")
	mustSignal(t, signals)
}

// Somebody has locked the row: Subscribe waits, for a release could not be
// heard without the mark.
func TestSubscribeToALockedRow(t *testing.T) {
	store, pool, o := open(t, fast)
	mustAcquire(t, store, "key", "owner", long)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "SELECT FROM "+table(o)+" FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	mustEndWith(t, func(ctx context.Context) error {
		_, _, err := store.Subscribe(ctx, "key")
		return err
	})
	subscribed := make(chan (<-chan struct{}))
	go func() {
		signals, _ := mustSubscribe(t, store, "key")
		subscribed <- signals
	}()
	select {
	case <-subscribed:
		t.Error("subscribed while the row could not be marked")
	case <-time.After(100 * time.Millisecond):
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	signals := <-subscribed
	mustRelease(t, store, "key", "owner")
	mustSignal(t, signals)
}

// When the connection breaks, releases may go unnoticed: everybody is woken
// when it is back, and signals go on.
func TestListenConnectionBreaks(t *testing.T) {
	application := "breaks " + rand.Text()
	pool := newPool(t, testserver.Postgres(t).URL, fast)
	o := newTable(t, pool)
	new(dials).listenAs(pool, &o, application)
	store := newStore(t, pool, o)
	keys := []string{"a", "b", "c"}
	var signals []<-chan struct{}
	for _, key := range keys {
		s, _ := mustSubscribe(t, store, key)
		signals = append(signals, s)
	}
	for range 3 {
		for _, s := range signals {
			drain(s)
		}
		if hangUp(t, pool, application) == 0 {
			t.Fatal("no connection to break")
		}
		for i := range keys {
			mustSignal(t, signals[i]) // it is back
		}
		for i, key := range keys {
			mustAcquire(t, store, key, "owner", long)
			drain(signals[i])
			mustRelease(t, store, key, "owner")
			mustSignal(t, signals[i])
		}
	}
}

// A connection that cannot be opened is an error at once, for the waiter has to
// poll; later ones do not wait for it either, and it is tried again.
func TestListenFails(t *testing.T) {
	server := testserver.Postgres(t)
	pool := newPool(t, server.URL, fast)
	o := newTable(t, pool)
	refused := errors.New("no connection for you")
	var mu sync.Mutex
	dials, fail := 0, true
	o.Listen = func(ctx context.Context) (*pgx.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		dials++
		if fail {
			return nil, refused
		}
		return pgx.Connect(ctx, server.URL)
	}
	store := newStore(t, pool, o)
	for range 20 {
		if _, _, err := store.Subscribe(t.Context(), "key"); !errors.Is(err, refused) {
			t.Fatalf("Subscribe: error %v, want %v", err, refused)
		}
	}
	mu.Lock()
	if dials > 5 {
		t.Errorf("%d attempts to connect for 20 subscriptions within a moment", dials)
	}
	fail = false
	mu.Unlock()
	var signals <-chan struct{}
	eventually(t, "it is tried again", func() bool {
		s, stop, err := store.Subscribe(t.Context(), "key")
		if err == nil {
			t.Cleanup(stop)
			signals = s
		}
		return err == nil
	})
	mustAcquire(t, store, "key", "owner", long)
	drain(signals)
	mustRelease(t, store, "key", "owner")
	mustSignal(t, signals)
}

// dials counts the connections that listen to what a Listen of its opens.
type dials struct {
	mu    sync.Mutex
	times []time.Time
}

func (d *dials) listen(config *pgx.ConnConfig) func(context.Context) (*pgx.Conn, error) {
	return func(ctx context.Context) (*pgx.Conn, error) {
		d.mu.Lock()
		d.times = append(d.times, time.Now())
		d.mu.Unlock()
		return pgx.ConnectConfig(ctx, config)
	}
}

// since returns when the n-th dial and those after it were.
func (d *dials) since(n int) []time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.times[min(n, len(d.times)):])
}

// mustPause checks that the pauses between dials double. Each takes what it has
// to at least; how much longer is up to the machine.
func mustPause(t *testing.T, dials []time.Time) {
	t.Helper()
	want := 100 * time.Millisecond
	for i, at := range dials[1:] {
		gap := at.Sub(dials[i])
		if gap < want {
			t.Errorf("dial %d of %d came %v after the one before, want %v at least", i+2, len(dials), gap, want)
		}
		if want *= 2; gap > 5*time.Second {
			want = 100 * time.Millisecond // the machine stood still, or this one was fine
		}
	}
}

// mustRecover waits until the log says that all is well again, and wants it to
// have said little else.
func mustRecover(t *testing.T, book *testlog.Book) {
	t.Helper()
	eventually(t, "the log says that it is well again", func() bool { return book.Count("level=INFO") == 1 })
	if n := book.Count("\n"); n != 2 {
		t.Errorf("%d lines in the log, want two, however often it broke", n)
	}
}

// listenAs has the connections for LISTEN of a store on o named application.
func (d *dials) listenAs(pool *pgxpool.Pool, o *pgstore.Options, application string) {
	config := pool.Config().ConnConfig
	config.RuntimeParams["application_name"] = application
	o.Listen = d.listen(config)
}

// hangUp breaks all connections that are named application.
func hangUp(t *testing.T, pool *pgxpool.Pool, application string) (broken int64) {
	t.Helper()
	return mustExec(t, pool, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", application)
}

// newRole makes a role that can connect, with rights on the table of o.
func newRole(t *testing.T, admin *pgxpool.Pool, o pgstore.Options, rights string) (name string) {
	t.Helper()
	name = "role_" + strings.ToLower(rand.Text())
	mustExec(t, admin, "CREATE ROLE "+name+" LOGIN")
	t.Cleanup(func() {
		for _, sql := range []string{"DROP OWNED BY ", "DROP ROLE "} {
			if _, err := admin.Exec(context.Background(), sql+name); err != nil {
				t.Errorf("%s%s: %v", sql, name, err)
			}
		}
	})
	if rights != "" {
		mustExec(t, admin, "GRANT "+rights+" ON "+table(o)+" TO "+name)
	}
	return name
}

// What the role of Options.Listen needs, and that Subscribe does not take a
// connection for good that cannot keep the marks: the store would open one after
// the other, 220 a second, while its waiters relied on signals.
func TestListenRights(t *testing.T) {
	t.Parallel()
	admin := newPool(t, testserver.Postgres(t).URL, fast)
	for name, tt := range map[string]struct {
		rights   string
		noUsage  bool
		database string
		wrong    string // in the error; "" if there is none
	}{
		"all":              {rights: "SELECT, INSERT, UPDATE"},
		"none":             {noUsage: true, wrong: "the role needs"},
		"no SELECT":        {rights: "INSERT, UPDATE", wrong: "the role needs"},
		"no INSERT":        {rights: "SELECT, UPDATE", wrong: "the role needs"},
		"no UPDATE":        {rights: "SELECT, INSERT", wrong: "the role needs"},
		"no USAGE":         {rights: "SELECT, INSERT, UPDATE", noUsage: true, wrong: "the role needs"},
		"another database": {rights: "SELECT, INSERT, UPDATE", database: "template1", wrong: "is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			o := pgstore.Options{Schema: "schema_" + strings.ToLower(rand.Text())}
			if err := pgstore.Migrate(t.Context(), admin, o); err != nil {
				t.Fatal(err)
			}
			o = store2(o)
			config := admin.Config().ConnConfig
			config.User = newRole(t, admin, o, tt.rights)
			if tt.database != "" {
				config.Database = tt.database
			}
			if !tt.noUsage {
				mustExec(t, admin, "GRANT USAGE ON SCHEMA "+o.Schema+" TO "+config.User)
			}
			var dials dials
			var book testlog.Book
			o.Listen, o.Logger = dials.listen(config), book.Logger()
			store := newStore(t, admin, o)

			if tt.wrong == "" {
				signals, _ := mustSubscribe(t, store, "key")
				mustAcquire(t, store, "key", "owner", long)
				drain(signals)
				mustRelease(t, store, "key", "owner")
				mustSignal(t, signals)
				if n := book.Count("\n"); n != 0 {
					t.Errorf("%d lines in the log, want none", n)
				}
				return
			}
			// Each of these waits for the next dial, or is refused in the pause.
			for len(dials.since(0)) < 4 {
				_, stop, err := store.Subscribe(t.Context(), "key")
				if err == nil {
					stop()
					t.Fatal("subscribed, want an error")
				}
				if !strings.Contains(err.Error(), tt.wrong) || !strings.Contains(err.Error(), "pgstore.Options.Listen") {
					t.Fatalf("error %v, want one with %q that names the option", err, tt.wrong)
				}
				time.Sleep(time.Millisecond)
			}
			mustPause(t, dials.since(0))
			if n := book.Count("level=WARN"); n != 1 || book.Count("\n") != 1 {
				t.Errorf("%d warnings, %d lines in the log, want one", n, book.Count("\n"))
			}
		})
	}
}

// The connection breaks, and may not do any more what it could: those who have
// subscribed keep their channels, those who come are refused, and both go on
// when it is mended.
func TestListenRightsAreLost(t *testing.T) {
	t.Parallel()
	admin := newPool(t, testserver.Postgres(t).URL, fast)
	o := newTable(t, admin)
	config := admin.Config().ConnConfig
	config.User = newRole(t, admin, o, "SELECT, INSERT, UPDATE")
	var dials dials
	var book testlog.Book
	o.Listen, o.Logger = dials.listen(config), book.Logger()
	store := newStore(t, admin, o)
	signals, _ := mustSubscribe(t, store, "key")
	mustSignal(t, signals)

	mustExec(t, admin, "REVOKE ALL ON "+table(o)+" FROM "+config.User)
	mustExec(t, admin, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", config.User)
	eventually(t, "it is dialled again", func() bool { return len(dials.since(1)) >= 4 })
	mustPause(t, dials.since(1))
	for range 3 {
		if _, stop, err := store.Subscribe(t.Context(), "other key"); err == nil {
			stop()
			t.Error("subscribed, want an error")
		}
	}
	select {
	case _, open := <-signals:
		t.Errorf("a signal without a connection (channel open: %v)", open)
	default:
	}
	mustExec(t, admin, "GRANT SELECT, INSERT, UPDATE ON "+table(o)+" TO "+config.User)
	mustSignal(t, signals)
	mustAcquire(t, store, "key", "owner", long)
	drain(signals)
	mustRelease(t, store, "key", "owner")
	mustSignal(t, signals)
	mustSubscribe(t, store, "other key")
	mustRecover(t, &book)
}

// A connection that breaks as soon as it listens is no success.
func TestListenConnectionBreaksAtOnce(t *testing.T) {
	t.Parallel()
	application := "breaks at once " + rand.Text()
	pool := newPool(t, testserver.Postgres(t).URL, fast)
	o := newTable(t, pool)
	var dials dials
	dials.listenAs(pool, &o, application)
	var book testlog.Book
	o.Logger = book.Logger()
	store := newStore(t, pool, o)
	signals, _ := mustSubscribe(t, store, "key")
	for range 5 {
		mustSignal(t, signals) // it is there
		hangUp(t, pool, application)
	}
	mustPause(t, dials.since(0))
	// Now the pauses are so long that whoever comes meets one.
	eventually(t, "Subscribe is refused in a pause", func() bool {
		_, stop, err := store.Subscribe(t.Context(), "other key")
		if err == nil {
			stop()
			hangUp(t, pool, application)
		}
		return err != nil
	})
	mustSignal(t, signals)
	mustRecover(t, &book)
}

// Where statements that collide are refused, a mark that could not be renewed is
// renewed the next time. The connection is as good as before.
func TestMarkCollides(t *testing.T) {
	t.Parallel()
	application := "collides " + rand.Text()
	pool := newPool(t, testserver.Postgres(t).URL, fast)
	o := newTable(t, pool)
	var dials dials
	dials.listenAs(pool, &o, application)
	store := newStore(t, pool, o)
	signals, _ := mustSubscribe(t, store, "key")
	// The sequence counts what is rolled back, too.
	name := "collides_" + strings.ToLower(rand.Text())
	for _, sql := range []string{
		"CREATE SEQUENCE " + name,
		"CREATE FUNCTION " + name + `() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF pg_catalog.current_setting('application_name') = '` + application + `' THEN
				PERFORM pg_catalog.nextval('public.` + name + `');
				RAISE serialization_failure;
			END IF;
			RETURN NEW;
		END $$`,
		"CREATE TRIGGER collides BEFORE INSERT OR UPDATE ON " + table(o) + " FOR EACH ROW EXECUTE FUNCTION " + name + "()",
		"UPDATE " + table(o) + " SET waited_until = clock_timestamp() + interval '20 s'",
	} {
		mustExec(t, pool, sql)
	}
	eventually(t, "a mark collides twice", func() bool {
		return value[int](t, pool, "SELECT last_value FROM "+name) >= 2
	})
	if n := len(dials.since(0)); n != 1 {
		t.Errorf("%d connections, want the one", n)
	}
	mustAcquire(t, store, "key", "owner", long)
	drain(signals)
	mustRelease(t, store, "key", "owner")
	mustSignal(t, signals)
}

// A DB that does not tell its configuration lends a connection to look at.
func TestListenWithoutConfig(t *testing.T) {
	pool := newPool(t, testserver.Postgres(t).URL, maxConns(1))
	store := newStore(t, wrapped{pool}, newTable(t, pool))
	signals, _ := mustSubscribe(t, store, "key")
	mustAcquire(t, store, "key", "owner", long)
	drain(signals)
	mustRelease(t, store, "key", "owner")
	mustSignal(t, signals)
}

// Stores of one table hear each other, and no others.
func TestSignalsAreForOneTableAndPrefix(t *testing.T) {
	store, pool, o := open(t, fast)
	prefixed := o
	prefixed.Prefix = "key"
	neighbour := newStore(t, pool, prefixed)
	elsewhere := newStore(t, pool, newTable(t, pool))
	signals, _ := mustSubscribe(t, store, "key")
	drain(signals)
	for _, s := range []*pgstore.Store{neighbour, elsewhere} {
		mustSubscribe(t, s, "key") // so that it notifies
		mustAcquire(t, s, "key", "owner", long)
		mustRelease(t, s, "key", "owner")
	}
	mustNotSignal(t, signals)
	// The prefix and the key are the key of the table.
	mustSubscribe(t, neighbour, "s")
	mustAcquire(t, store, "keys", "owner", long)
	mustBeHeld(t, neighbour, "s")
	all, _ := mustSubscribe(t, neighbour, "s")
	mustRelease(t, store, "keys", "owner")
	mustSignal(t, all)
}

// A waiter is woken by a release, by a break, and by the end of a lease.
func TestWaiterIsWoken(t *testing.T) {
	store, _, _ := open(t)
	strategy, err := core.NewStrategy(store, core.Options{TTL: long, Wait: core.WaitForever})
	if err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func(){
		"release": func() { mustRelease(t, store, "key", "owner") },
		"break": func() {
			if _, broken, err := store.Break(t.Context(), "key"); err != nil || !broken {
				t.Errorf("Break: %v, %v", broken, err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			// The best of some: a busy machine is late now and then, a poll would
			// be late most times.
			best := time.Hour
			for range 5 {
				mustAcquire(t, store, "key", "owner", long)
				held := make(chan time.Time, 1)
				go func() {
					if err := strategy.Do(t.Context(), "key", func(context.Context) error { held <- time.Now(); return nil }); err != nil {
						t.Errorf("Do: %v", err)
					}
				}()
				// By then it polls once a second.
				time.Sleep(700 * time.Millisecond)
				released := time.Now()
				end()
				best = min(best, (<-held).Sub(released))
				eventually(t, "the waiter has released the key", func() bool {
					grant, err := store.Acquire(t.Context(), "key", "next", long)
					if err != nil {
						t.Fatal(err)
					}
					return grant.Acquired
				})
				mustRelease(t, store, "key", "next")
			}
			t.Logf("held %v after the end of the lease", best)
			if best > 100*time.Millisecond {
				t.Errorf("held %v after the end of the lease, want much less than a poll", best)
			}
		})
	}
}
