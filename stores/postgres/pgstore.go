package pgstore

import (
	"context"
	"embed"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/await"
)

// The defaults of [Options].
const (
	DefaultSchema    = "public"
	DefaultTable     = "leasekit_leases"
	DefaultRetention = time.Hour
)

// DB is what the store uses of a [*pgxpool.Pool]. A transaction or a single
// connection does not have Acquire, and so does not compile: a lease must be
// committed when the call returns, and calls come from several goroutines.
type DB interface {
	// Exec runs a statement on any connection.
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	// Query runs a query on any connection, which is busy until the rows are
	// closed.
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	// Acquire takes a connection out of the pool. The store does it in
	// [Migrate], for a statement that was refused because it collided with
	// another, and to learn how to connect where DB has no method Config.
	Acquire(ctx context.Context) (*pgxpool.Conn, error)
}

// checkDB refuses a nil db. A nil *Pool in the interface is not nil, and would
// panic in the first call.
func checkDB(db DB) error {
	if v := reflect.ValueOf(db); db == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return fmt.Errorf("%w: postgres: nil db", core.ErrInvalid)
	}
	return nil
}

// configured is what a [*pgxpool.Pool] has, too, and wrappers may have.
type configured interface{ Config() *pgxpool.Config }

// Options of [New], [Migrate] and [Schema]. Give all three the same.
type Options struct {
	// Schema that the table is in. Default "public". search_path is never used.
	Schema string
	// Table that keeps the leases. Default "leasekit_leases".
	Table string

	// Prefix is put in front of every key, so that several applications can
	// share a table. At most 512 bytes. Default none. Stores exclude each other
	// only if Schema, Table and Prefix are the same: change none of them while
	// programs are running.
	Prefix string

	// Retention is how long the row of a key, which remembers the last fencing
	// token, is kept after its lease has ended; at least 1 s after its last
	// acquisition. Default 1 h. Where stores share rows, the shortest Retention
	// counts.
	Retention time.Duration

	// Listen opens the connection for LISTEN. The store owns it, and closes it.
	// Set it where the pool goes through a pooler that cannot LISTEN, and this
	// one connection can go around it. It has to lead to the pool's database,
	// where it also renews the marks of keys that are waited for: its role needs
	// SELECT, INSERT and UPDATE on the table and USAGE on its schema, LISTEN
	// itself nothing. Without these, Subscribe returns an error, and waiters
	// poll. Default: the pool's own configuration, BeforeConnect and
	// AfterConnect included, but outside the pool.
	Listen func(ctx context.Context) (*pgx.Conn, error)

	// Logger tells when waiters have to poll because there is no connection for
	// LISTEN, and when there has been one for 5 s again. Default slog.Default().
	Logger *slog.Logger
}

// resolve checks o and fills in the defaults.
func (o Options) resolve() (Options, error) {
	if o.Schema == "" {
		o.Schema = DefaultSchema
	}
	if o.Table == "" {
		o.Table = DefaultTable
	}
	if o.Retention == 0 {
		o.Retention = DefaultRetention
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	for _, name := range []string{o.Schema, o.Table} {
		// 63 is NAMEDATALEN - 1: the server cuts longer names off in silence.
		if len(name) > 63 || strings.IndexByte(name, 0) >= 0 {
			return o, fmt.Errorf("%w: schema or table %q: use 1 to 63 bytes without NUL", core.ErrInvalid, name)
		}
	}
	if o.Prefix != "" {
		if err := core.CheckKey(o.Prefix); err != nil {
			return o, fmt.Errorf("prefix: %w", err)
		}
	}
	if o.Retention < 0 {
		return o, fmt.Errorf("%w: retention %v: use 0 for the default, or more", core.ErrInvalid, o.Retention)
	}
	return o, nil
}

// table is the quoted, qualified name.
func (o Options) table() string { return pgx.Identifier{o.Schema, o.Table}.Sanitize() }

//go:embed sql/*.sql
var files embed.FS

// statement returns the text of sql/name.sql for the table of o. Comment lines
// stay here: the server need not parse them, and clients that fill in arguments
// themselves must not find a $1 there.
func (o Options) statement(name string) string {
	text, err := files.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic(err) // the file is part of the package
	}
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "--") {
			b.WriteString(line)
		}
	}
	return strings.ReplaceAll(strings.TrimSpace(b.String()), "{table}", o.table())
}

// statements are those that find a row by its key. A server that prepares them
// while the table has a page or two reads all of it each time, and goes on like
// that when it has grown by a burst of keys, until autovacuum analyzes it, up to
// a minute later: with 200,000 rows a call took 18 ms. So they are prepared
// again when the table is seen to have grown.
type statements struct {
	acquire, renew, release, mark string
}

// statements returns texts that no other number has, so that the client prepares
// them anew.
func (o Options) statements(number int) *statements {
	text := func(name string) string {
		return fmt.Sprintf("%s /* %d */", o.statement(name), number)
	}
	return &statements{acquire: text("acquire"), renew: text("renew"), release: text("release"), mark: text("mark")}
}

// Store keeps leases in a table. It is safe for concurrent use. Make it with
// [New].
type Store struct {
	db      DB
	o       Options
	sql     atomic.Pointer[statements]
	channel string // for NOTIFY
	workers *await.Workers

	// mode is the pgx.QueryExecMode to ask for, plus one; 0 leaves it to the
	// client.
	mode atomic.Int32

	purger   purger
	listener listener
}

// A waiter of core finds out here that releases are notified.
var (
	_ core.LockStore = (*Store)(nil)
	_ core.Notifier  = (*Store)(nil)
)

// New returns a store that keeps its leases in the table that [Migrate] made.
// It does no I/O. db stays the caller's, who closes it after the store.
//
// Some acquisitions start a purge step, one statement that deletes rows which
// nobody has locked for [Options.Retention]. It runs on a goroutine of its own,
// at most one at a time and for at most 5 s, and takes a connection from db
// for about a millisecond.
//
// The first [Store.Subscribe] opens one connection outside of db and a
// goroutine that reads it. Both end 10 s after the last subscription was
// stopped.
//
// Calls of a plain pgx pool run on their callers' goroutines. Those of another
// DB, or of a pool with hooks, run on goroutines of the store's, so that they can
// return when their context ends; each waits a second for another call, or until
// [Store.Close], and then ends.
//
// The error matches [core.ErrInvalid].
func New(db DB, o Options) (*Store, error) {
	if err := checkDB(db); err != nil {
		return nil, err
	}
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	s := &Store{
		db:      db,
		o:       o,
		channel: o.channel(),
		workers: workersFor(db),
	}
	s.sql.Store(o.statements(0))
	s.purger.init(s)
	s.listener.init(s)

	// DescribeExec prepares the unnamed statement in one round trip and executes
	// it in the next: through a pooler that would be whatever statement another
	// client has prepared there meanwhile. Exec is one round trip.
	if c, ok := db.(configured); ok && c.Config().ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeDescribeExec {
		s.use(pgx.QueryExecModeExec)
	}
	return s, nil
}

// Close ends what the store runs by itself: it waits for a purge step, at most
// 5 s, and closes the connection for LISTEN; channels of subscriptions are
// closed. Leases are not released, and the pool is left open: calls that need
// nothing but the pool go on working, so that a late Release is not lost. Close
// may be called more than once. Its error is always nil.
func (s *Store) Close() error {
	s.listener.close()
	s.purger.close()
	s.workers.Close()
	return nil
}

// Acquire implements [core.LockStore].
func (s *Store) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	grant, err := await.Call(ctx, s.workers, func() (core.Grant, error) {
		return s.try(ctx, s.key(key), []byte(owner), micros(ttl))
	})
	if grant.Acquired {
		s.purger.granted()
	}
	return grant, err
}

// maxLooks bounds how often a try looks at a row again that others changed
// while it looked. Each of these looks means that somebody else went on.
const maxLooks = 32

func (s *Store) try(ctx context.Context, key, owner []byte, ttl int64) (core.Grant, error) {
	for range maxLooks {
		var answer *int64
		err := s.query(ctx, s.sql.Load().acquire, []any{key, owner, ttl}, func(row pgx.Rows) error {
			return row.Scan(&answer)
		})
		switch {
		case err != nil:
			return core.Grant{}, err
		case answer == nil:
			// Look again.
		case *answer == 0:
			if _, err := s.exec(ctx, s.sql.Load().release, key, owner, s.channel); err != nil {
				return core.Grant{}, err
			}
		case *answer > 0:
			return core.Grant{Acquired: true, Token: *answer}, nil
		default:
			return core.Grant{Left: left(-*answer)}, nil
		}
	}
	return core.Grant{}, fmt.Errorf("postgres: the row changed %d times while it was looked at", maxLooks)
}

// Renew implements [core.LockStore].
func (s *Store) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return false, err
	}
	return await.Call(ctx, s.workers, func() (bool, error) {
		n, err := s.exec(ctx, s.sql.Load().renew, s.key(key), []byte(owner), micros(ttl))
		return n > 0, err
	})
}

// Release implements [core.LockStore].
func (s *Store) Release(ctx context.Context, key, owner string) error {
	if err := core.CheckKey(key); err != nil {
		return err
	}
	if err := core.CheckOwner(owner); err != nil {
		return err
	}
	_, err := await.Call(ctx, s.workers, func() (struct{}, error) {
		_, err := s.exec(ctx, s.sql.Load().release, s.key(key), []byte(owner), s.channel)
		return struct{}{}, err
	})
	return err
}

// key is the primary key of a key's row.
func (s *Store) key(key string) []byte { return append([]byte(s.o.Prefix), key...) }

// micros rounds d up to microseconds, which is what the server keeps.
func micros(d time.Duration) int64 {
	us := d.Microseconds()
	if d > time.Duration(us)*time.Microsecond {
		us++
	}
	return us
}
