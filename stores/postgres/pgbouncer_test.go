package pgstore_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
)

func TestPgBouncer(t *testing.T) {
	server := testserver.StartPostgres(t, "-c", "synchronous_commit=off")
	for _, poolMode := range []string{"transaction", "session"} {
		t.Run(poolMode, func(t *testing.T) {
			bouncer := testserver.StartPgBouncer(t, server, poolMode)
			for _, m := range modes {
				t.Run(m.String(), func(t *testing.T) {
					pool := newPool(t, bouncer.URL, mode(m))
					o := newTable(t, pool)
					a, b := newStore(t, pool, o), newStore(t, newPool(t, bouncer.URL, mode(m)), o)
					// Others use the same server connections meanwhile, and
					// leave an unnamed statement there that takes what ours do.
					for range 4 {
						other := newPool(t, bouncer.URL, mode(pgx.QueryExecModeExec), maxConns(1))
						stop := make(chan struct{})
						done := make(chan struct{})
						t.Cleanup(func() { close(stop); <-done })
						go func() {
							defer close(done)
							for n := 0; ; n++ {
								select {
								case <-stop:
									return
								default:
									_, _ = other.Exec(context.Background(), "SELECT $1::bytea, $2::bytea, $3::bigint", []byte("k"), []byte("o"), int64(n))
									time.Sleep(time.Millisecond)
								}
							}
						}()
					}
					signals, stop, err := a.Subscribe(t.Context(), "key")
					if err != nil {
						t.Fatalf("Subscribe: %v", err)
					}
					defer stop()
					if poolMode == "transaction" {
						if _, open := <-signals; open {
							t.Error("a signal, want a closed channel: notifications cannot come through")
						}
					}
					for _, key := range oddKeys {
						trip(t, a, b, key)
					}
					if poolMode == "session" {
						mustAcquire(t, b, "key", "owner", long)
						drain(signals)
						mustRelease(t, b, "key", "owner")
						mustSignal(t, signals)
					}
				})
			}
		})
	}
	// One error for a store that prepared statements where it could not, none
	// for one that was told not to.
	for _, line := range logged(t, server, "ERROR") {
		if !strings.Contains(line, "prepared statement") {
			t.Errorf("the server logged %q", line)
		}
	}
}

// The connection for LISTEN can go around the pooler.
func TestListenAroundThePooler(t *testing.T) {
	server := testserver.Postgres(t)
	bouncer := testserver.StartPgBouncer(t, server, "transaction")
	pool := newPool(t, bouncer.URL, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	o := newTable(t, pool)
	o.Listen = func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, server.URL) }
	store := newStore(t, pool, o)
	signals, stop, err := store.Subscribe(t.Context(), "key")
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	mustAcquire(t, store, "key", "owner", long)
	drain(signals)
	mustRelease(t, store, "key", "owner")
	mustSignal(t, signals)
}

// Waiters behind a pooler poll, and get the key.
func TestWaitersPollBehindThePooler(t *testing.T) {
	bouncer := testserver.StartPgBouncer(t, testserver.Postgres(t), "transaction")
	pool := newPool(t, bouncer.URL, mode(pgx.QueryExecModeExec))
	store := newStore(t, pool, newTable(t, pool))
	strategy, err := core.NewStrategy(store, core.Options{TTL: 10 * time.Second, Wait: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, store, "key", "owner", long)
	ran := make(chan error, 1)
	go func() {
		ran <- strategy.Do(t.Context(), "key", func(context.Context) error { return nil })
	}()
	time.Sleep(200 * time.Millisecond) // it polls by now; if not, it has less to wait
	mustRelease(t, store, "key", "owner")
	if err := <-ran; err != nil {
		t.Errorf("Do: %v", err)
	}
}

// mustSignal waits for a value.
func mustSignal(t testing.TB, signals <-chan struct{}) {
	t.Helper()
	select {
	case _, open := <-signals:
		if !open {
			t.Fatal("the channel is closed, want a signal")
		}
	case <-time.After(30 * time.Second):
		t.Fatal("no signal within 30 s")
	}
}

// mustNotSignal gives a signal that should not come a moment to come.
func mustNotSignal(t testing.TB, signals <-chan struct{}) {
	t.Helper()
	select {
	case _, open := <-signals:
		t.Fatalf("a signal (channel open: %v), want none", open)
	case <-time.After(100 * time.Millisecond):
	}
}

// drain takes a signal that may be there.
func drain(signals <-chan struct{}) {
	select {
	case <-signals:
	case <-time.After(50 * time.Millisecond):
	}
}
