package integration

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/conformance/history"
	"github.com/leasekit/leasekit/core"
)

// patience bounds everything that a test waits for. It is long because a busy
// machine is no finding.
const patience = 60 * time.Second

// resource is what a lease protects. As docs/contract.md asks of it, it keeps
// the highest token that it has seen, and refuses a lower one.
type resource struct {
	mu      sync.Mutex
	highest int64
}

// write reports whether the write was accepted.
func (r *resource) write(token int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if token < r.highest {
		return false
	}
	r.highest = token
	return true
}

// outcome logs the row that docs/topologies.md has of this test.
func outcome(t *testing.T, topology, fault, what string) {
	t.Helper()
	t.Logf("%s | %s | %s", topology, fault, what)
}

// check fails the test on an error.
func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until done.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not %s after %v", what, patience)
		}
	}
}

// receive waits for a value.
func receive[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("no %s after %v", what, patience)
		panic("unreachable")
	}
}

// acquire tries until the server answers, yes or no, with an owner of its own
// for each try. A try that failed is undone, as the strategy does it.
func acquire(t testing.TB, store core.LockStore, key string, ttl time.Duration) (core.Grant, string) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		owner := rand.Text()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		grant, err := store.Acquire(ctx, key, owner, ttl)
		if err != nil {
			releaseCtx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			_ = store.Release(releaseCtx, key, owner)
			cancel()
		}
		cancel()
		if err == nil {
			return grant, owner
		}
		if time.Now().After(end) {
			t.Fatalf("Acquire: %v", err)
		}
	}
}

// hold is a story: a strategy holds a key, a fault happens, and a rival tries to
// acquire the key while the holder has not been told of anything.
type hold struct {
	topology, fault string
	// holder and rival may be stores on different servers.
	holder, rival core.LockStore
	// ttl is long enough for the rival to come before its end.
	ttl time.Duration
	// strike is the fault. settle, if set, is what ends it, once the rival has
	// its answer.
	strike func(key string, token int64)
	settle func()
}

// kept tells the story where the lease must survive: the rival is refused, the
// holder renews and goes on writing, and the history is linearizable.
func (h hold) kept(t *testing.T) {
	t.Helper()
	recorder, lease, protected, grant, renewed := h.tell(t, false)
	if grant.Acquired {
		t.Fatalf("the rival got token %d while the lease of token %d is alive", grant.Token, lease.Token())
	}
	receive(t, "renewal", renewed)
	if err := lease.Err(); err != nil {
		t.Errorf("the holder lost its lease: %v", err)
	}
	if !protected.write(lease.Token()) {
		t.Error("the holder's write was refused, with no other holder about")
	}
	// A connection of before the fault may fail the release; the lease then
	// ends by itself.
	if err := lease.Release(); err != nil {
		t.Logf("release: %v", err)
	}
	rival := recorder.Record(h.rival, 1)
	var next core.Grant
	eventually(t, "free", func() bool {
		next, _ = acquire(t, rival, lease.Key(), h.ttl)
		return next.Acquired
	})
	if next.Token <= lease.Token() {
		t.Errorf("the successor's token is %d, want more than %d", next.Token, lease.Token())
	}
	result := history.Check(recorder.History(), history.Options{})
	if !result.OK() {
		t.Errorf("not linearizable: %v", result.Violation)
	}
	outcome(t, h.topology, h.fault, "linearizable; the lease survived, the rival was refused; tokens grow")
}

// lost tells the story where the grant is lost: for some time there are two
// holders, which is expected and shown, and the token tells them apart.
func (h hold) lost(t *testing.T) {
	t.Helper()
	began := time.Now()
	recorder, lease, protected, grant, _ := h.tell(t, true)
	took := time.Since(began)
	if !grant.Acquired {
		t.Fatalf("the rival was refused (%+v): the fault did not lose the lease, so that this test shows nothing", grant)
	}
	if grant.Token <= lease.Token() {
		t.Fatalf("the successor's token is %d, want more than %d", grant.Token, lease.Token())
	}
	if !protected.write(grant.Token) {
		t.Error("the successor's write was refused")
	}
	if protected.write(lease.Token()) {
		t.Error("the late write of the first holder was accepted")
	}
	// It learns of it with its next renewal, at the latest at its deadline.
	receive(t, "loss", lease.Done())
	if err := lease.Err(); !errors.Is(err, core.ErrLost) {
		t.Errorf("the first holder was told %v, want %v", err, core.ErrLost)
	}
	_ = lease.Release()

	result := history.Check(recorder.History(), history.Options{})
	if result.Violation == nil {
		if took > h.ttl*9/10 {
			t.Skipf("inconclusive: the machine took %v, so that a lease of %v may have ended by itself", took, h.ttl)
		}
		t.Fatalf("the history is linearizable (%v), although two held the key", result)
	}
	if want := "1 (Exclusion)"; result.Violation.Rule != want {
		t.Errorf("rule %s is said to be broken, want %s:\n%v", result.Violation.Rule, want, result.Violation)
	}
	t.Logf("as expected: %v", result.Violation)
	outcome(t, h.topology, h.fault, "NOT linearizable: two holders; the successor's token is greater, the late write was refused, the holder got ErrLost")
}

// lateRenewals is a store whose renewals wait until told is closed.
type lateRenewals struct {
	core.LockStore
	told <-chan struct{}
}

func (s lateRenewals) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	select {
	case <-s.told:
		return s.LockStore.Renew(ctx, key, owner, ttl)
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// tell lets the holder acquire and write once, strikes, and returns the rival's
// answer. renewed has a value when the holder has renewed after that. If the
// holder is to be late, its renewals wait until then: they would tell it first
// if the fault takes its time.
func (h hold) tell(t *testing.T, late bool) (recorder *history.Recorder, lease *core.Lease, protected *resource, grant core.Grant, renewed chan struct{}) {
	t.Helper()
	recorder, protected = history.NewRecorder(), new(resource)
	renewed = make(chan struct{}, 1)
	told := make(chan struct{}) // closed when the rival has its answer
	holder := recorder.Record(h.holder, 0)
	if late {
		holder = lateRenewals{holder, told}
	}
	strategy, err := core.NewStrategy(holder, core.Options{
		TTL:    h.ttl,
		Logger: slog.New(slog.DiscardHandler),
		Hooks: core.Hooks{Renewed: func(context.Context, core.Event) {
			select {
			case <-told:
			default:
				return
			}
			select {
			case renewed <- struct{}{}:
			default:
			}
		}},
	})
	check(t, err)
	key := rand.Text()
	lease, err = strategy.Acquire(t.Context(), key)
	check(t, err)
	if !protected.write(lease.Token()) {
		t.Fatal("the first write was refused")
	}
	h.strike(key, lease.Token())
	grant, _ = acquire(t, recorder.Record(h.rival, 1), key, h.ttl)
	close(told)
	if h.settle != nil {
		h.settle()
	}
	return recorder, lease, protected, grant, renewed
}
