package pgstore_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

func ExampleNew() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	store, err := pgstore.New(pool, pgstore.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()

	strategy, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second, Wait: time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	err = strategy.Do(ctx, "nightly-report", func(ctx context.Context) error {
		// The row that the report is written to refuses a holder that was
		// paused for longer than its lease.
		token, _ := core.TokenFor(ctx, "nightly-report")
		tag, err := pool.Exec(ctx,
			"UPDATE reports SET body = $1, fence = $2 WHERE id = $3 AND fence <= $2",
			"…", token, "nightly")
		if err == nil && tag.RowsAffected() == 0 {
			err = fmt.Errorf("a later holder has written")
		}
		return err
	})
	if err != nil && !core.IsRejection(err) {
		log.Print(err)
	}
}

// Each process calls Migrate at its start; when the table is there it does
// nothing and needs no rights.
func ExampleMigrate() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := pgstore.Migrate(ctx, pool, pgstore.Options{}); err != nil {
		log.Fatal(err)
	}
}

// For a migration tool.
func ExampleSchema() {
	ddl, err := pgstore.Schema(pgstore.Options{Table: "locks"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(ddl)
	// Output:
	// CREATE TABLE IF NOT EXISTS "public"."locks" (
	// 	-- The store's prefix and the key. A key that begins with a NUL byte belongs
	// 	-- to the purge, which keeps its position there.
	// 	key pg_catalog.bytea NOT NULL,
	// 	-- Who holds the lease, or held it last. Empty: nobody ever did.
	// 	owner pg_catalog.bytea NOT NULL,
	// 	-- Fencing token of the present or the last lease.
	// 	token bigint NOT NULL,
	// 	-- When the lease ends or ended. It is live while this is in the future.
	// 	expires_at timestamp with time zone NOT NULL,
	// 	-- Until then a release notifies, because somebody waits for the key.
	// 	waited_until timestamp with time zone NOT NULL DEFAULT 'epoch',
	// 	PRIMARY KEY (key)
	// ) WITH (fillfactor = 50);
}

// What the subscription of a waiter looks like without a strategy.
func ExampleStore_Subscribe() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	store, err := pgstore.New(pool, pgstore.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()

	signals, stop, err := store.Subscribe(ctx, "nightly-report")
	if err != nil {
		log.Fatal(err)
	}
	defer stop()
	for range signals {
		grant, err := store.Acquire(ctx, "nightly-report", "a random owner", time.Minute)
		if err != nil || grant.Acquired {
			break
		}
	}
}
