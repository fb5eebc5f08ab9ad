// Package pgstore keeps leases in a table of PostgreSQL, through the pool of
// github.com/jackc/pgx/v5.
//
//	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
//	…
//	err = pgstore.Migrate(ctx, pool, pgstore.Options{})
//	…
//	store, err := pgstore.New(pool, pgstore.Options{})
//	…
//	defer store.Close()
//	strategy, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second})
//
// Each method is one statement, sent outside of any transaction: nothing is
// pinned while a callback runs, so the store works with a pool of one
// connection that the callback uses too, and through a pooler in transaction
// mode. A try on a held key only reads. Waiters are woken by NOTIFY, which is
// sent only for keys that somebody waits for.
//
// # Clock
//
// The server's clock_timestamp() decides when a lease ends, never a client's
// clock, a transaction's start, or a time zone. Where a statement had to wait
// for a row's lock, a renewal reads the clock after the wait. Times are kept in
// microseconds; a finer ttl is rounded up. The instant after a lease has ended
// the key can be acquired. A clock that is stepped forward ends leases early:
// then only the fencing token protects.
//
// # Atomicity
//
// Acquire, Renew and Release are single statements of their own transaction,
// decided by the row's lock and the primary key; the owner is compared under
// that lock. This is so under READ COMMITTED, the server's default, and there
// no statement ends in an error because of another. Where the role or the
// database has REPEATABLE READ or SERIALIZABLE as its default, the server
// refuses statements that collide, and writes an ERROR line to its log for
// each. The store sends such a statement again, which is safe, because it did
// nothing, and the second time in a transaction that asks for READ COMMITTED.
//
// When ctx ends, pgx closes the connection in use and asks the server to cancel
// the statement, which shows in the server's log as well. Whether the statement
// was executed is then unknown.
//
// # Fencing
//
// A token is max(last + 1, the server's clock in microseconds). The row, and
// with it the last token, is kept for [Options.Retention] after the lease has
// ended, and deleted only when its token is below the clock; so are tokens
// growing after a purge, a TRUNCATE, or a restore of an old backup, as long as
// the clock of the server that grants is past the time of the last grant.
//
// Work in the same database can be fenced by the lease's row itself. Inside your
// own transaction, with $1 = the key and $2 = the token,
//
//	SELECT FROM public.leasekit_leases WHERE key = convert_to($1, 'UTF8') AND token = $2 FOR SHARE
//
// finds a row if there is no successor yet, and makes a successor wait for your
// commit. A renewal of your own waits for it as well, so keep it short.
//
// # Limits
//
// PostgreSQL 14 or newer, any encoding, any collation. The role needs SELECT,
// INSERT, UPDATE and DELETE on the table and USAGE on its schema.
//
// A lease is as durable as a commit. With synchronous_commit = off the server
// may forget the last leases when it crashes, and with asynchronous
// replication a failover may: two holders are then possible, and the token
// protects. A standby refuses every call, also those that would not write; so
// does a role with default_transaction_read_only. Use
// target_session_attrs=read-write where a connection string names several
// hosts.
//
// A transaction that stays open for hours anywhere in the database keeps
// vacuum, and the pruning of this table's pages, from working, and makes each
// call slower, as with every table that is updated often.
//
// Store runs two things by itself, both documented at [New] and ended by
// [Store.Close]: a purge after some acquisitions, and one connection for LISTEN
// while somebody waits.
package pgstore
