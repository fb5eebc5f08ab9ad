package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// fakeClock lets the servers that this test starts see a clock that can be set.
// It returns how: by that much against the true time.
//
// It is for servers alone. libfaketime replaces functions of the C library, and
// a program in Go reads the clock without it: the clock of a client cannot be
// set in this way.
func fakeClock(t *testing.T) (set func(offset time.Duration)) {
	t.Helper()
	var library string
	for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1", "/usr/lib64/faketime/libfaketime.so.1"} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			library = found[0]
		}
	}
	if library == "" {
		t.Skip("no libfaketime.so.1 found: install it (Debian: apt-get install libfaketime)")
	}
	// Not t.TempDir, which another user, whom a server may run as, cannot enter.
	dir, err := os.MkdirTemp("", "leasekit-clock-") //nolint:usetesting // see above
	check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	check(t, os.Chmod(dir, 0o755))
	file := filepath.Join(dir, "offset")
	set = func(offset time.Duration) {
		t.Helper()
		// Renamed, so that nobody reads half a number.
		check(t, os.WriteFile(file+".new", fmt.Appendf(nil, "%+d\n", int64(offset.Seconds())), 0o644))
		check(t, os.Rename(file+".new", file))
	}
	set(0)
	// The C library's own malloc for Redis, whose allocator asks for the time
	// before libfaketime is ready. A program that has no other gets no other.
	t.Setenv("LD_PRELOAD", library+" libc.so.6")
	t.Setenv("FAKETIME_TIMESTAMP_FILE", file)
	t.Setenv("FAKETIME_NO_CACHE", "1")
	// A clock is set; what counts the seconds since the start is not.
	t.Setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
	return set
}

// stepClock tells the story of a server whose clock is set while it runs, as by
// an administrator or by NTP after a long time without it. start starts the
// server and returns what asks for its time, and two stores on it.
func stepClock(t *testing.T, topology string, start func(t *testing.T) (now func() time.Time, holder, rival core.LockStore)) {
	for _, test := range []struct {
		name string
		step time.Duration
	}{
		{"back", -time.Hour},
		{"forward", time.Hour},
	} {
		t.Run(test.name, func(t *testing.T) {
			set := fakeClock(t)
			now, holder, rival := start(t)
			if skew := time.Until(now()); skew.Abs() > time.Minute {
				t.Fatalf("the server's clock is off by %v before it was set", skew)
			}
			story := hold{
				topology: topology, fault: fmt.Sprintf("the server's clock is set %s by %v", test.name, test.step.Abs()),
				holder: holder, rival: rival,
				ttl: 9 * time.Second,
				strike: func(string, int64) {
					set(test.step)
					// A thread that is just reading the file may read the time
					// as it was once more.
					seen := 0
					eventually(t, fmt.Sprintf("the server's clock off by %v, as libfaketime makes it", test.step), func() bool {
						if skew := time.Until(now()); (skew - test.step).Abs() > time.Minute {
							seen = -1
						}
						seen++
						return seen == 5
					})
				},
			}
			if test.step > 0 {
				story.lost(t)
			} else {
				story.kept(t)
			}
		})
	}
}

func TestRedisClockStepped(t *testing.T) {
	stepClock(t, "Redis, one server", func(t *testing.T) (func() time.Time, core.LockStore, core.LockStore) {
		server := testserver.StartRedis(t)
		admin, _ := redisAt(t, server.Addr)
		now := func() time.Time {
			now, err := admin.Time(t.Context()).Result()
			check(t, err)
			return now
		}
		holder, _ := redisAt(t, server.Addr)
		rival, _ := redisAt(t, server.Addr)
		return now, redisStore(t, holder), redisStore(t, rival)
	})
}

func TestPostgresClockStepped(t *testing.T) {
	stepClock(t, "PostgreSQL, one server", func(t *testing.T) (func() time.Time, core.LockStore, core.LockStore) {
		at := new(current)
		at.set(testserver.StartPostgres(t).Addr)
		admin := postgresPool(t, at)
		check(t, pgstore.Migrate(t.Context(), admin, pgstore.Options{}))
		now := func() time.Time {
			return postgresValue[time.Time](t, admin, "SELECT clock_timestamp()")
		}
		return now, postgresStore(t, postgresPool(t, at)), postgresStore(t, postgresPool(t, at))
	})
}

func TestMongoClockStepped(t *testing.T) {
	stepClock(t, "stand-in for MongoDB, one server", func(t *testing.T) (func() time.Time, core.LockStore, core.LockStore) {
		addr := testserver.StartMongo(t).Addr
		admin := mongoLeases(t, addr)
		check(t, mongostore.EnsureIndexes(t.Context(), admin))
		now := func() time.Time {
			var hello struct{ LocalTime time.Time }
			check(t, admin.Database().RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&hello))
			return hello.LocalTime
		}
		return now, mongoStore(t, mongoLeases(t, addr)), mongoStore(t, mongoLeases(t, addr))
	})
}
