package integration

import (
	"context"
	"crypto/rand"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/conformance/faults"
	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

func postgresPool(t testing.TB, at *current) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://postgres@127.0.0.1/postgres?sslmode=disable&connect_timeout=5")
	check(t, err)
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		host, port, err := net.SplitHostPort(at.get())
		if err != nil {
			return err
		}
		n, err := strconv.ParseUint(port, 10, 16)
		c.Host, c.Port = host, uint16(n)
		return err
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	check(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func postgresStore(t testing.TB, pool *pgxpool.Pool) *pgstore.Store {
	t.Helper()
	store, err := pgstore.New(pool, pgstore.Options{})
	check(t, err)
	t.Cleanup(func() { _ = store.Close() })
	return store
}

func postgresValue[T any](t testing.TB, pool *pgxpool.Pool, query string) (v T) {
	t.Helper()
	check(t, pool.QueryRow(t.Context(), query).Scan(&v))
	return v
}

// A primary with a standby, which replication reaches through a network that is
// cut. The primary dies and the standby takes its place, with the clients.
func TestPostgresFailover(t *testing.T) {
	for _, test := range []struct {
		name, topology, fault string
		synchronous           bool
	}{
		{"asynchronous", "PostgreSQL, primary and asynchronous standby", "standby cut off before the grant; primary killed -9, standby promoted", false},
		{"synchronous", "PostgreSQL, primary and synchronous standby", "standby cut off after the grant; primary killed -9, standby promoted", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			primary := testserver.StartPostgres(t)
			network := faults.NewProxy(t, primary.Addr)
			at, atStandby := new(current), new(current)
			at.set(primary.Addr)
			admin := postgresPool(t, at)
			check(t, pgstore.Migrate(t.Context(), admin, pgstore.Options{}))
			standby := testserver.StartPostgresStandby(t, network.Addr())
			atStandby.set(standby.Addr)
			onStandby := postgresPool(t, atStandby)
			eventually(t, "streaming", func() bool {
				return postgresValue[int](t, admin, "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND replay_lsn = pg_current_wal_lsn()") == 1
			})
			if test.synchronous {
				// After the copy was made, so that the standby, once promoted,
				// does not wait for a standby of its own.
				_, err := admin.Exec(t.Context(), "ALTER SYSTEM SET synchronous_standby_names = '*'")
				check(t, err)
				_, err = admin.Exec(t.Context(), "SELECT pg_reload_conf()")
				check(t, err)
				eventually(t, "synchronous", func() bool {
					return postgresValue[int](t, admin, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") == 1
				})
			} else {
				network.Set(faults.Blackhole())
			}

			story := hold{
				topology: test.topology, fault: test.fault,
				holder: postgresStore(t, postgresPool(t, at)), rival: postgresStore(t, postgresPool(t, at)),
				ttl: 12 * time.Second,
			}
			story.strike = func(string, int64) {
				if test.synchronous {
					// What the standby has not got is not answered.
					network.Set(faults.Blackhole())
					ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
					grant, err := story.rival.Acquire(ctx, rand.Text(), rand.Text(), time.Minute)
					cancel()
					if err == nil {
						t.Errorf("a grant that no standby has was acknowledged: %+v", grant)
					}
				}
				primary.Kill(t)
				if !postgresValue[bool](t, onStandby, "SELECT pg_promote()") {
					t.Fatal("the standby was not promoted")
				}
				at.set(standby.Addr)
			}
			if test.synchronous {
				story.kept(t)
			} else {
				story.lost(t)
			}
		})
	}
}
