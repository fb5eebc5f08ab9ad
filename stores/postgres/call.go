package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/internal/await"
)

// SQLSTATE codes that the store tells apart. Source: appendix A of the server's
// manual.
const (
	codeReadOnly      = "25006" // read_only_sql_transaction
	codeNoStatement   = "26000" // invalid_sql_statement_name
	codeNoSchema      = "3F000" // invalid_schema_name
	codeSerialization = "40001" // serialization_failure
	codeDeadlock      = "40P01" // deadlock_detected
	codeNoPrivilege   = "42501" // insufficient_privilege
	codeNoColumn      = "42703" // undefined_column
	codeDatatype      = "42804" // datatype_mismatch
	codeNoOperator    = "42883" // undefined_function
	codeNoTable       = "42P01" // undefined_table
	codeDupStatement  = "42P05" // duplicate_prepared_statement
	codeNoUniqueKey   = "42P10" // invalid_column_reference
)

// workersFor returns what runs the calls of db. A call that is left behind when
// its ctx ends has that ctx too, and ends with what the driver bounds it by.
func workersFor(db DB) *await.Workers {
	if prompt(db) {
		return await.Inline("postgres")
	}
	return await.New("postgres")
}

// prompt reports whether the calls of db return by themselves as soon as their
// ctx ends. A plain pool does: pgx then breaks off what it reads, and leaves the
// rest to a goroutine of its own. A pool with hooks, or with a context watcher
// that waits for the server to confirm a cancel, may not, and of another DB
// nothing is known.
func prompt(db DB) (yes bool) {
	pool, ok := db.(*pgxpool.Pool)
	if !ok {
		return false
	}
	c := pool.Config()
	//nolint:staticcheck // BeforeAcquire is deprecated, and still called.
	if c.BeforeAcquire != nil || c.PrepareConn != nil || c.ShouldPing != nil || c.ConnConfig.Tracer != nil {
		return false
	}
	// Two functions cannot be compared, so see what it builds. One that is not
	// pgx's own may want a real connection.
	defer func() {
		if recover() != nil {
			yes = false
		}
	}()
	h, ok := c.ConnConfig.BuildContextWatcherHandler(new(pgconn.PgConn)).(*pgconn.DeadlineContextWatcherHandler)
	return ok && h.DeadlineDelay == 0
}

// ended is the error of a call whose ctx has ended; cause is what the driver
// said, if it said anything.
func ended(ctx context.Context, cause error) error {
	switch err := ctx.Err(); {
	case cause == nil:
		return fmt.Errorf("postgres: %w", err)
	case errors.Is(cause, err):
		return fmt.Errorf("postgres: %w", cause)
	default:
		return fmt.Errorf("postgres: %w: %w", err, cause)
	}
}

// querier is what runs a statement: a pool, or a transaction on one of its
// connections.
type querier interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// exec runs a statement and returns the number of its rows.
func (s *Store) exec(ctx context.Context, sql string, args ...any) (int64, error) {
	var n int64
	err := s.send(ctx, args, func(q querier, args []any) error {
		tag, err := q.Exec(ctx, sql, args...)
		n = tag.RowsAffected()
		return err
	})
	return n, err
}

// query runs a statement, and calls scan when the first row, if there is one,
// can be read.
func (s *Store) query(ctx context.Context, sql string, args []any, scan func(pgx.Rows) error) error {
	return s.send(ctx, args, func(q querier, args []any) error {
		rows, err := q.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		// Close reads to the end: an error of the statement may come after its
		// row.
		defer rows.Close()
		if rows.Next() {
			if err := scan(rows); err != nil {
				return err
			}
		}
		rows.Close()
		return rows.Err()
	})
}

// maxSends bounds how often a statement is sent that the server refused without
// having done anything. Three are expected at most: a pooler, a collision, and
// the one that does it.
const maxSends = 10

// send calls do, and again if the server refused the statement without having
// done anything:
//
//   - Where the default isolation level is REPEATABLE READ or SERIALIZABLE,
//     statements that collide are refused, under SERIALIZABLE also such that only
//     touch the same page. The next time it is sent in a transaction of its own
//     that asks for READ COMMITTED, where it waits instead. That costs three round
//     trips, so it is not the way of the first time.
//   - A pooler in transaction mode may give us another connection than the one
//     that prepared the statement. From then on nothing is prepared.
//   - A transaction of the user's that locks rows of several keys may deadlock
//     with it.
func (s *Store) send(ctx context.Context, args []any, do func(q querier, args []any) error) error {
	collided := false
	for n := 1; ; n++ {
		with, mode := args, s.mode.Load()
		if mode > 0 {
			with = append([]any{pgx.QueryExecMode(mode - 1)}, args...)
		}
		var err error
		if collided {
			err = s.readCommitted(ctx, func(tx pgx.Tx) error { return do(tx, with) })
		} else {
			err = do(s.db, with)
		}
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ended(ctx, err)
		}
		code := sqlState(err)
		switch {
		case n >= maxSends:
			return s.o.explain(err)
		case (code == codeNoStatement || code == codeDupStatement) && mode == 0:
			s.use(pgx.QueryExecModeExec)
			continue // there is nobody to get out of the way of
		case code == codeSerialization:
			collided = true
		case code != codeDeadlock:
			return s.o.explain(err)
		}
		timer := time.NewTimer(pause(n))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ended(ctx, err)
		}
	}
}

// readCommitted runs do in a transaction of that level.
func (s *Store) readCommitted(ctx context.Context, do func(tx pgx.Tx) error) error {
	conn, err := s.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, do)
}

// use sets the mode of all later statements.
func (s *Store) use(mode pgx.QueryExecMode) { s.mode.Store(int32(mode) + 1) }

// pause is a random time to wait after the n-th refusal, so that those who
// collided do not do so again: up to 1 ms, doubling, at most 32 ms.
func pause(n int) time.Duration {
	return rand.N(time.Millisecond<<min(n-1, 5)) + 1
}

// sqlState returns the server's error code, or "".
func sqlState(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}

// explain wraps an error of the driver, and says what to do where the store
// knows.
func (o Options) explain(err error) error {
	switch sqlState(err) {
	case codeNoTable, codeNoSchema:
		return fmt.Errorf("postgres: %w: %s: call pgstore.Migrate or run the DDL of pgstore.Schema: %w", ErrNoTable, o.table(), err)
	case codeNoColumn, codeNoUniqueKey, codeDatatype, codeNoOperator:
		return fmt.Errorf("postgres: table %s is not one that pgstore.Migrate made: %w", o.table(), err)
	case codeNoPrivilege:
		return fmt.Errorf("postgres: the role needs SELECT, INSERT, UPDATE and DELETE on table %s and USAGE on its schema: %w", o.table(), err)
	case codeReadOnly:
		return fmt.Errorf("postgres: the server is a standby, or the role or database is set to default_transaction_read_only; leases need a server that writes: %w", err)
	}
	return fmt.Errorf("postgres: %w", err)
}
