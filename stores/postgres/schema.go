package pgstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/leasekit/leasekit/internal/await"
)

// migrateLock is the advisory lock that [Migrate] takes: "leasekit" in ASCII.
// It keeps two sessions from creating the same table at once, which PostgreSQL
// answers with a unique violation in its catalog, IF NOT EXISTS or not.
const migrateLock = 0x6c656173656b6974

// ErrNoTable is in every error of a store whose table is not there: call
// [Migrate], or run the DDL that [Schema] returns.
var ErrNoTable = errors.New("the table is missing")

// Schema returns the DDL of the store's table, for those who have a migration
// tool: CREATE SCHEMA IF NOT EXISTS unless the schema is "public", and CREATE
// TABLE IF NOT EXISTS. The error matches [core.ErrInvalid].
func Schema(o Options) (string, error) {
	o, err := o.resolve()
	if err != nil {
		return "", err
	}
	return o.ddl(o.Schema != DefaultSchema), nil
}

func (o Options) ddl(withSchema bool) string {
	text := o.statement("schema") + "\n"
	if withSchema {
		text = "CREATE SCHEMA IF NOT EXISTS " + pgx.Identifier{o.Schema}.Sanitize() + ";\n\n" + text
	}
	return text
}

// Migrate makes the store's table, and its schema if there is none of that
// name. Any number of processes may call it at once, at every start: if the
// table is there it only looks, which needs no rights, and on a standby works
// as well. It takes one connection from db while it runs.
//
// A table of the same name that looks different is an error, and is left as it
// is. Columns that you have added are not minded if they have a default.
func Migrate(ctx context.Context, db DB, o Options) error {
	if err := checkDB(db); err != nil {
		return err
	}
	o, err := o.resolve()
	if err != nil {
		return err
	}
	w := workersFor(db)
	defer w.Close()
	_, err = await.Call(ctx, w, func() (struct{}, error) {
		err := o.migrate(ctx, db)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			err = ended(ctx, err)
		case sqlState(err) == codeNoPrivilege:
			err = fmt.Errorf("postgres: the role may not create table %s, let one that may run the DDL of pgstore.Schema: %w", o.table(), err)
		default:
			err = o.explain(err)
		}
		return struct{}{}, err
	})
	return err
}

func (o Options) migrate(ctx context.Context, db DB) error {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()

	if there, err := o.check(ctx, conn); there || err != nil {
		return err
	}
	// READ COMMITTED, because what is looked at after the lock was taken must
	// show what its last holder has done.
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock($1::bigint)", exec, int64(migrateLock)); err != nil {
			return err
		}
		if there, err := o.check(ctx, tx); there || err != nil {
			return err
		}
		// CREATE SCHEMA asks for the right to make one even if it exists.
		var exists bool
		err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace AS n WHERE n.nspname = $1::pg_catalog.text)",
			exec, o.Schema).Scan(&exists)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, o.ddl(!exists), pgx.QueryExecModeSimpleProtocol)
		return err
	})
}

// exec is the mode for statements that are sent once: one round trip, nothing
// prepared, any pooler.
const exec = pgx.QueryExecModeExec

// check reports whether the table is there; an error if it is of another kind.
func (o Options) check(ctx context.Context, q interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}) (there bool, err error) {
	rows, err := q.Query(ctx, o.statement("layout"), exec, o.Schema, o.Table)
	if err != nil {
		return false, err
	}
	defer rows.Close()
	if !rows.Next() {
		return false, rows.Err()
	}
	var columns string
	var keyed bool
	if err := rows.Scan(&columns, &keyed); err != nil {
		return false, err
	}
	has := strings.Split(columns, ", ")
	for _, column := range []string{
		"expires_at timestamp with time zone",
		"key bytea",
		"owner bytea",
		"token bigint",
		"waited_until timestamp with time zone",
	} {
		if !slices.Contains(has, column) {
			return false, fmt.Errorf("table %s exists, but has no column %q; it has %q", o.table(), column, columns)
		}
	}
	if !keyed {
		return false, fmt.Errorf("table %s exists, but its column key is not unique", o.table())
	}
	rows.Close()
	return true, rows.Err()
}
