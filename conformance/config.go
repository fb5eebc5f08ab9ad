package conformance

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

// The values of a [Config] that are left zero.
const (
	// DefaultTTL is long enough to be judged on a busy machine, and short
	// enough to wait for.
	DefaultTTL = 400 * time.Millisecond
	// DefaultSlack is what a store that compares with a clock needs: the time
	// of an answer on its way, with room.
	DefaultSlack = 100 * time.Millisecond
	// DefaultHandOvers is the number of releases after which a waiter must
	// have been woken every time.
	DefaultHandOvers = 1000
)

// Config tells the suite how to reach a store. Open is all that is needed.
//
// Each optional field lets the suite check one thing more. A rule whose field
// is missing is not run, and the summary lists it as not supported, with the
// field that it needs: a rule is never passed in silence.
type Config struct {
	// Open returns a new client of the same backend at every call: a second
	// call is what a second machine would do. Rules open several, and use
	// random keys, so that the backend may be shared with other tests. What it
	// opens it closes through t.Cleanup. Open may call t.Skip when there is no
	// server to test with.
	//
	// It is called from many goroutines at once, unless Around is set.
	Open func(t testing.TB) core.LockStore

	// TTL is the lease that the rules ask for, and every duration of the suite
	// is derived from it. It must be one that the backend can keep exactly: 2 s
	// for etcd. Default [DefaultTTL]. A rule that the machine was too slow to
	// judge is tried again with a longer one.
	TTL time.Duration

	// Slack is how long after ttl, counted from the answer, a lease may still
	// be seen. Default [DefaultSlack]. Backends that expire leases by a loop of
	// their own need more: document the number, for users wait that long after
	// a crash.
	Slack time.Duration

	// HandOvers is the number of hand-overs that the Notifier group makes.
	// Default [DefaultHandOvers].
	HandOvers int

	// Around, if set, wraps every rule. It exists for stores that live inside
	// the test process:
	//
	//	Around: synctest.Test
	//
	// makes the whole suite run on fake time, in milliseconds and exactly.
	// Each rule then needs a backend of its own, made inside its bubble:
	// [PerRule] makes one. Rules that start processes are not wrapped.
	Around func(t *testing.T, rule func(t *testing.T))

	// Env returns what a child process must find in its environment, as
	// "NAME=value", so that Open in that process reaches the same backend. With
	// it MutualExclusion also runs in several processes: it starts the test
	// binary again, which comes back to the same call of [Run].
	Env func(t testing.TB) []string

	// Restart restarts the server, with the data that it keeps, and returns
	// when it answers again. Rules that use it run while no other rule does;
	// do not share the server with other tests that run in parallel. Clients
	// that were open stay open.
	Restart func(t testing.TB)

	// Pause makes the server silent, as SIGSTOP does or a network that drops
	// every packet, until resume is called. Calls that were sent are executed
	// afterwards. It is used while no other rule runs.
	Pause func(t testing.TB) (resume func())

	// Flush makes the server lose everything that it kept, as FLUSHALL or an
	// empty data folder would. It runs alone, as Restart does.
	Flush func(t testing.TB)

	// Writes returns the number of durable writes that the server has done so
	// far, in any unit that grows by at least 1 with each: bytes of log, Raft
	// index, entries of an oplog. It is read while no other rule runs.
	Writes func(t testing.TB) int64

	// OpenRetention is Open for a store that keeps the record of a key for only
	// retention after its lease has ended, in a place of its own: a prefix, a
	// table. records counts what the server keeps there at the moment.
	// Fence tokens must keep growing all the same.
	OpenRetention func(t testing.TB, retention time.Duration) (store core.LockStore, records func() int)

	// OpenOneConnection is Open for a client that has one single connection to
	// the server.
	OpenOneConnection func(t testing.TB) core.LockStore

	// OpenResending is Open for a client that delivers every request to the
	// server twice, one after the other, and gives its caller the second
	// answer: what a client library does that sends a request again after it
	// lost the answer.
	OpenResending func(t testing.TB) core.LockStore

	// OpenSkewed is Open for a client on a machine whose clock is wrong by
	// skew.
	OpenSkewed func(t testing.TB, skew time.Duration) core.LockStore

	// Foreign puts something that is not a lease where the store keeps the
	// record of key. intact tells whether it is still there, unchanged.
	Foreign func(t testing.TB, key string) (intact func() bool)

	// Refusals are ways in which a server may refuse to write: a read-only
	// replica, a full disk, no rights. The store must report each.
	Refusals []Refusal

	// Faults lets the suite break the network between a client and the server.
	Faults Faults

	// NotSupported names rules ("TokenFitsJSON" or "Fencing/TokenFitsJSON"), or
	// whole groups ("Fencing"), that the store does not claim to keep, with the
	// reason. They are not run, and the summary lists them.
	NotSupported map[string]string

	// KnownFailing names rules, in the same way, that the store is known to
	// break, with the reason. They run and must fail: one that passes is a failure of the
	// test, so that the entry is removed on the day it is mended.
	KnownFailing map[string]string

	// Rules are checked beside those of the contract: those of a package that
	// adds to this one, or what your store promises on top.
	Rules []Rule

	// first is a client that has been closed: for its type.
	first core.LockStore
}

// Faults says how to reach the server through a proxy:
//
//	Faults: conformance.Faults{Addr: "127.0.0.1:6379", Open: openAt}
//
// The connection must not be encrypted or compressed: the proxy recognizes
// requests by the key in them. A client that learns of other addresses from the
// server, and connects to those, gets around the proxy: turn that off.
type Faults struct {
	// Addr of the server that Config.Open talks to, "host:port".
	Addr string
	// Open is Config.Open for a client that connects to addr instead.
	Open func(t testing.TB, addr string) core.LockStore
}

// Refusal is one way in which a server refuses to write.
type Refusal struct {
	// Name as in a test's name: "ReadOnlyReplica".
	Name string
	// Begin makes the server refuse, and returns a client of it and a function
	// that ends the refusal. While it lasts no other rule runs. A replica that
	// always refuses has an empty end.
	Begin func(t testing.TB) (store core.LockStore, end func())
}

// PerRule returns a function that calls newBackend once for each rule, and gives
// the same backend to all calls within that rule. It is for stores whose
// backend is a value in the test process:
//
//	backend := conformance.PerRule(func(t testing.TB) *server { return newServer() })
//	conformance.Run(t, conformance.Config{
//		Around: synctest.Test,
//		Open:   func(t testing.TB) core.LockStore { return newClient(backend(t)) },
//	})
func PerRule[B any](newBackend func(t testing.TB) B) func(t testing.TB) B {
	// Each attempt at a rule has a context of its own, which ends with it.
	var mu sync.Mutex
	backends := make(map[context.Context]B)
	return func(t testing.TB) B {
		mu.Lock()
		defer mu.Unlock()
		ctx := t.Context()
		backend, ok := backends[ctx]
		if !ok {
			backend = newBackend(t)
			backends[ctx] = backend
			context.AfterFunc(ctx, func() {
				mu.Lock()
				defer mu.Unlock()
				delete(backends, ctx)
			})
		}
		return backend
	}
}

// Run checks every rule of the contract on the store of c. Call it from a test:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, conformance.Config{Open: open})
//	}
//
// Each rule is a subtest, TestConformance/Fencing/TokenGrowsAfterRelease, and
// can be run alone. Rules run in parallel, whatever the number of cores, for
// they mostly wait; Run returns when all are done. A rule that is broken prints what the store did, what it should have done, and the sentence
// of the contract. The last thing logged is a summary of what was checked, not
// supported, and known to fail.
func Run(t *testing.T, c Config) { t.Helper(); run(t, c) }

// Benchmark measures the store of c, in sub-benchmarks whose names benchstat
// understands (op=acquire-release, op=held-try, op=renew, op=do, op=contended).
// It uses Open, and leases of 30 s.
//
//	func BenchmarkConformance(b *testing.B) {
//		conformance.Benchmark(b, conformance.Config{Open: open})
//	}
func Benchmark(b *testing.B, c Config) { b.Helper(); benchmark(b, c) }

// Rule is one promise of the contract and the code that tries to break it.
type Rule struct {
	// Group and Name are the names of the subtests.
	Group, Name string
	// Sentence of the contract that the rule checks. It is printed when it is
	// broken.
	Sentence string
	// Needs, if set, returns why the rule cannot be checked with this Config
	// ("set Config.Restart"), or "".
	Needs func(c *Config) string
	// Busy puts the rule after those that watch the clock, because it keeps the
	// store busy with many calls and cares little for time.
	Busy bool
	// Alone makes the rule run while no other does, after the Busy ones,
	// because it disturbs them or would be disturbed.
	Alone bool
	// Last puts a rule that runs Alone after the others that do, because it
	// leaves its mark on the server: it restarts it.
	Last bool
	// Process keeps the rule out of Config.Around, because it starts processes.
	Process bool
	// Check returns normally if the rule held; it calls [T.Broken] if not.
	Check func(t *T)
}
