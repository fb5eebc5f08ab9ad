// Package sqlitestore is an example of a store of one's own: leases in a SQLite
// file, which exclude all processes of one machine. Read it from top to bottom,
// put your database in its place, and run the test beside it until it passes.
//
// # Clock
//
// SQLite's own 'now', read by the statement that compares it, after it has got
// the write lock: a statement that had to wait does not decide by an old time.
// The wall clock of the machine must not be stepped.
//
// # Atomicity
//
// One statement a method. SQLite runs one writing statement at a time.
//
// # Fencing
//
// A record outlives its lease by an hour and keeps the token. The next one is
// max(last + 1, clock in microseconds), so that tokens go on growing when the
// record has been purged or the file deleted.
//
// # Limits
//
// One machine, a local disk. Leases end up to a millisecond late, because SQLite
// tells milliseconds. Waiters poll: there is no core.Notifier.
package sqlitestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/leasekit/leasekit/core"
)

const (
	// now is the time in milliseconds, rounded down. A lease is therefore alive
	// until now is past expires, not until it is reached: never too short.
	now = `CAST(round(unixepoch('subsec') * 1000) AS INTEGER)`

	schema = `
CREATE TABLE IF NOT EXISTS leases (
	key     TEXT PRIMARY KEY,
	owner   TEXT NOT NULL,
	token   INTEGER NOT NULL,
	expires INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS leases_expires ON leases (expires);`

	// A key that is held conflicts, and fails the WHERE: no row is returned
	// and nothing is written.
	acquire = `
INSERT INTO leases AS l (key, owner, token, expires) VALUES (?1, ?2, ` + now + ` * 1000, ` + now + ` + ?3)
ON CONFLICT (key) DO UPDATE
SET owner = excluded.owner, token = max(l.token + 1, excluded.token), expires = excluded.expires
WHERE l.expires < ` + now + `
RETURNING token`

	left = `SELECT expires - ` + now + ` + 1 FROM leases WHERE key = ?1 AND expires >= ` + now

	renew = `UPDATE leases SET expires = ` + now + ` + ?3 WHERE key = ?1 AND owner = ?2 AND expires >= ` + now

	release = `UPDATE leases SET expires = ` + now + ` - 1, owner = '' WHERE key = ?1 AND owner = ?2 AND expires >= ` + now

	// Two records go for each that an acquisition may have added, but none
	// whose token the clock has not passed.
	purge = `
DELETE FROM leases WHERE key IN (
	SELECT key FROM leases WHERE expires < ` + now + ` - ?1 AND token < ` + now + ` * 1000 ORDER BY expires LIMIT 2)`
)

// Store is a [core.LockStore] in a SQLite file. All methods are safe for
// concurrent use.
type Store struct {
	db *sql.DB
	// Retention is how long a record is kept after its lease has ended.
	// Default one hour. Set it before the first call.
	Retention time.Duration
}

var _ core.LockStore = (*Store)(nil)

// Open opens the file, and makes it and its table when they are not there.
func Open(ctx context.Context, file string) (*Store, error) {
	// SQLite itself waits for a lock only for a moment, call does the rest. The
	// log is not synced at each commit: a power cut may lose the last leases,
	// whose holders it ends too, and tokens grow by the clock.
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=busy_timeout(10)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)")
	if err != nil {
		return nil, fmt.Errorf("sqlite: %w", err)
	}
	db.SetMaxOpenConns(4)
	s := &Store{db: db, Retention: time.Hour}
	_, err = s.exec(ctx, schema)
	return s, err
}

// Close closes the file. Leases stay.
func (s *Store) Close() error { return s.db.Close() }

// Acquire implements [core.LockStore].
func (s *Store) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	token, err := s.number(ctx, acquire, key, owner, ceil(ttl))
	if err == nil {
		// The lease is ours whether or not this works; the next one tries again.
		_, _ = s.exec(ctx, purge, ceil(s.Retention))
		return core.Grant{Acquired: true, Token: token}, nil
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return core.Grant{}, err
	}
	// Held. How much longer is a hint, so that a lease that ends in between,
	// no row again, does no harm.
	wait, err := s.number(ctx, left, key)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return core.Grant{}, err
	}
	return core.Grant{Left: time.Duration(wait) * time.Millisecond}, nil
}

// Renew implements [core.LockStore].
func (s *Store) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return false, err
	}
	n, err := s.exec(ctx, renew, key, owner, ceil(ttl))
	return n == 1, err
}

// Release implements [core.LockStore].
func (s *Store) Release(ctx context.Context, key, owner string) error {
	if err := core.CheckAll(key, owner, core.MinTTL); err != nil {
		return err
	}
	_, err := s.exec(ctx, release, key, owner)
	return err
}

// number runs a statement that returns one number, or no row.
func (s *Store) number(ctx context.Context, statement string, args ...any) (int64, error) {
	return call(ctx, func() (n int64, err error) {
		err = s.db.QueryRowContext(ctx, statement, args...).Scan(&n)
		return n, err
	})
}

// exec runs a statement and returns the number of rows that it changed.
func (s *Store) exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return call(ctx, func() (int64, error) {
		result, err := s.db.ExecContext(ctx, statement, args...)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	})
}

// call returns when f does, or when ctx ends, whatever the driver does then: f
// has the same ctx, and comes to its end without us. While another connection
// has the file, f is called again, which is safe: it has done nothing.
func call(ctx context.Context, f func() (int64, error)) (int64, error) {
	type answer struct {
		n   int64
		err error
	}
	done := make(chan answer, 1)
	go func() {
		n, err := f()
		for isBusy(err) && ctx.Err() == nil {
			time.Sleep(rand.N(5 * time.Millisecond))
			n, err = f()
		}
		done <- answer{n, err}
	}()
	var a answer
	select {
	case a = <-done:
	case <-ctx.Done():
		a.err = ctx.Err()
	}
	switch {
	case a.err == nil:
		return a.n, nil
	case ctx.Err() != nil: // the driver says "interrupted"
		return 0, fmt.Errorf("sqlite: %w", ctx.Err())
	}
	return 0, fmt.Errorf("sqlite: %w", a.err)
}

func isBusy(err error) bool {
	e := new(sqlite.Error)
	return errors.As(err, &e) && e.Code()&0xff == sqlite3.SQLITE_BUSY
}

// ceil is d in milliseconds, rounded up: a lease may be longer than asked for.
func ceil(d time.Duration) int64 {
	ms := d.Milliseconds()
	if d%time.Millisecond > 0 { // adding first would overflow for the longest d
		ms++
	}
	return ms
}
