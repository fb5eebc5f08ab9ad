package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/leasekit/leasekit/internal/testserver"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// fakeClock lets the servers that this test starts see a clock that can be set.
// It returns how: by that much against the true time.
//
// It is for servers alone. libfaketime replaces functions of the C library, and
// a program in Go reads the clock without it: the clock of a client cannot be
// set in this way. Nor does it go together with the allocator of Redis, which
// asks for the time before libfaketime is ready.
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
	t.Setenv("LD_PRELOAD", library)
	t.Setenv("FAKETIME_TIMESTAMP_FILE", file)
	t.Setenv("FAKETIME_NO_CACHE", "1")
	// A clock is set; what counts the seconds since the start is not.
	t.Setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
	return set
}

// The clock of a server is set while it runs, as by an administrator or by NTP
// after a long time without it.
func TestPostgresClockStepped(t *testing.T) {
	for _, test := range []struct {
		name string
		step time.Duration
	}{
		{"back", -time.Hour},
		{"forward", time.Hour},
	} {
		t.Run(test.name, func(t *testing.T) {
			set := fakeClock(t)
			server := testserver.StartPostgres(t)
			at := new(current)
			at.set(server.Addr)
			admin := postgresPool(t, at)
			check(t, pgstore.Migrate(t.Context(), admin, pgstore.Options{}))
			offBy := func() time.Duration {
				return time.Until(postgresValue[time.Time](t, admin, "SELECT clock_timestamp()"))
			}
			if skew := offBy(); skew.Abs() > time.Minute {
				t.Fatalf("the server's clock is off by %v before it was set", skew)
			}
			story := hold{
				topology: "PostgreSQL, one server", fault: fmt.Sprintf("the server's clock is set %s by %v", test.name, test.step.Abs()),
				holder: postgresStore(t, postgresPool(t, at)), rival: postgresStore(t, postgresPool(t, at)),
				ttl: 9 * time.Second,
				strike: func(string, int64) {
					set(test.step)
					if skew := offBy(); (skew - test.step).Abs() > time.Minute {
						t.Fatalf("the server's clock is off by %v, want %v: libfaketime does not work here", skew, test.step)
					}
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
