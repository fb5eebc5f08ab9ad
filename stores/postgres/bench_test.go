package pgstore_test

import (
	"context"
	"crypto/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
)

func BenchmarkConformance(b *testing.B) {
	pool := newPool(b, testserver.Postgres(b).URL)
	o := newTable(b, pool)
	conformance.Benchmark(b, conformance.Config{
		Open: func(t testing.TB) core.LockStore { return newStore(t, pool, o) },
	})
}

// BenchmarkRatio alternates the store with the least that the database could be
// asked to do, on the same pool, so that a busy machine slows both. It reports
// medians, and their ratio as x/floor.
//
//   - acquire-release beside two UPDATEs by primary key, on a table with the same
//     columns;
//   - fresh-key, acquired and released once, beside an INSERT and an UPDATE;
//   - held-try beside a SELECT by primary key;
//   - renew beside an UPDATE.
func BenchmarkRatio(b *testing.B) {
	pool := newPool(b, testserver.Postgres(b).URL)
	o := newTable(b, pool)
	store := newStore(b, pool, o)
	floor := newTable(b, pool) // for the raw statements
	const owner = "0123456789abcdef0123456789abcdef"

	exec := func(b *testing.B, ctx context.Context, sql string, args ...any) {
		if tag, err := pool.Exec(ctx, strings.ReplaceAll(sql, "{table}", table(floor)), args...); err != nil || tag.RowsAffected() != 1 {
			b.Fatalf("%d rows, error %v", tag.RowsAffected(), err)
		}
	}
	const insert = "INSERT INTO {table} (key, owner, token, expires_at) VALUES ($1, $2, 1, now())"
	const update = "UPDATE {table} SET owner = $2, token = token + 1, expires_at = now() WHERE key = $1"
	acquire := func(b *testing.B, ctx context.Context, key string, want bool) {
		if grant, err := store.Acquire(ctx, key, owner, long); err != nil || grant.Acquired != want {
			b.Fatalf("acquired %v, error %v, want %v", grant.Acquired, err, want)
		}
	}
	release := func(b *testing.B, ctx context.Context, key string) {
		if err := store.Release(ctx, key, owner); err != nil {
			b.Fatal(err)
		}
	}

	for _, c := range []struct {
		op        string
		ours, raw func(b *testing.B, ctx context.Context, key string)
		setup     func(b *testing.B, ctx context.Context, key string)
	}{{
		op:    "acquire-release",
		setup: func(b *testing.B, ctx context.Context, key string) { exec(b, ctx, insert, []byte(key), []byte(owner)) },
		ours:  func(b *testing.B, ctx context.Context, key string) { acquire(b, ctx, key, true); release(b, ctx, key) },
		raw: func(b *testing.B, ctx context.Context, key string) {
			exec(b, ctx, update, []byte(key), []byte(owner))
			exec(b, ctx, update, []byte(key), []byte(owner))
		},
	}, {
		op:    "fresh-key",
		setup: func(*testing.B, context.Context, string) {},
		ours: func(b *testing.B, ctx context.Context, _ string) {
			key := rand.Text()
			acquire(b, ctx, key, true)
			release(b, ctx, key)
		},
		raw: func(b *testing.B, ctx context.Context, _ string) {
			key := []byte(rand.Text())
			exec(b, ctx, insert, key, []byte(owner))
			exec(b, ctx, update, key, []byte(owner))
		},
	}, {
		op: "held-try",
		setup: func(b *testing.B, ctx context.Context, key string) {
			acquire(b, ctx, key, true)
			exec(b, ctx, insert, []byte(key), []byte(owner))
		},
		ours: func(b *testing.B, ctx context.Context, key string) { acquire(b, ctx, key, false) },
		raw: func(b *testing.B, ctx context.Context, key string) {
			exec(b, ctx, "SELECT expires_at FROM {table} WHERE key = $1", []byte(key))
		},
	}, {
		op: "renew",
		setup: func(b *testing.B, ctx context.Context, key string) {
			acquire(b, ctx, key, true)
			exec(b, ctx, insert, []byte(key), []byte(owner))
		},
		ours: func(b *testing.B, ctx context.Context, key string) {
			if renewed, err := store.Renew(ctx, key, owner, long); err != nil || !renewed {
				b.Fatalf("renewed %v, error %v", renewed, err)
			}
		},
		raw: func(b *testing.B, ctx context.Context, key string) { exec(b, ctx, update, []byte(key), []byte(owner)) },
	}} {
		b.Run("op="+c.op, func(b *testing.B) {
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			key := rand.Text()
			c.setup(b, ctx, key)
			var ours, raw []time.Duration
			for b.Loop() {
				start := time.Now()
				c.ours(b, ctx, key)
				middle := time.Now()
				c.raw(b, ctx, key)
				ours, raw = append(ours, middle.Sub(start)), append(raw, time.Since(middle))
			}
			a, f := median(ours), median(raw)
			b.ReportMetric(float64(a.Nanoseconds()), "ours-ns/op")
			b.ReportMetric(float64(f.Nanoseconds()), "floor-ns/op")
			b.ReportMetric(float64(a)/float64(f), "x/floor")
			b.ReportMetric(0, "ns/op") // of both together: of no use
		})
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// BenchmarkWrapped is what it costs that a pool with a hook cannot be trusted to
// end with its context.
func BenchmarkWrapped(b *testing.B) {
	for name, hook := range map[string]func(c *pgxpool.Config){
		"pool=plain": func(*pgxpool.Config) {},
		"pool=hooked": func(c *pgxpool.Config) {
			c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { return true, nil }
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			pool := newPool(b, testserver.Postgres(b).URL, hook)
			store := newStore(b, pool, newTable(b, pool))
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			mustAcquire(b, store, "key", "owner", time.Hour)
			for b.Loop() {
				if grant, err := store.Acquire(ctx, "key", "other", long); err != nil || grant.Acquired {
					b.Fatal(grant, err)
				}
			}
		})
	}
}
