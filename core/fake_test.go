package core_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

// request is one call of a scriptedStore. at counts from the store's making.
type request struct {
	op         string
	n          int // of this op, from 1
	at         time.Duration
	key, owner string
	ttl        time.Duration
	bound      time.Duration // how long ctx lets the call take; 0: no deadline
	ctx        context.Context
	ended      error // ctx.Err() when the call came in
}

func (r request) String() string { return fmt.Sprintf("%s@%v", r.op, r.at) }

// scriptedStore is a memory store in front of which a test puts faults: a
// script answers in the place of the store, and may call it. It is no Notifier.
type scriptedStore struct {
	real *memory.Store

	acquire func(ctx context.Context, r request) (core.Grant, error)
	renew   func(ctx context.Context, r request) (bool, error)
	release func(ctx context.Context, r request) error

	start time.Time
	mu    sync.Mutex
	calls []request
	count map[string]int // by op
}

func newScriptedStore(t testing.TB) *scriptedStore {
	return &scriptedStore{real: newMemory(t), start: time.Now(), count: map[string]int{}}
}

func (s *scriptedStore) note(ctx context.Context, op, key, owner string, ttl time.Duration) request {
	r := request{op: op, at: time.Since(s.start), key: key, owner: owner, ttl: ttl, ctx: ctx, ended: ctx.Err()}
	if d, ok := ctx.Deadline(); ok {
		r.bound = time.Until(d)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count[op]++
	r.n = s.count[op]
	s.calls = append(s.calls, r)
	return r
}

func (s *scriptedStore) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	r := s.note(ctx, "acquire", key, owner, ttl)
	if s.acquire != nil {
		return s.acquire(ctx, r)
	}
	return s.real.Acquire(ctx, key, owner, ttl)
}

func (s *scriptedStore) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	r := s.note(ctx, "renew", key, owner, ttl)
	if s.renew != nil {
		return s.renew(ctx, r)
	}
	return s.real.Renew(ctx, key, owner, ttl)
}

func (s *scriptedStore) Release(ctx context.Context, key, owner string) error {
	r := s.note(ctx, "release", key, owner, 0)
	if s.release != nil {
		return s.release(ctx, r)
	}
	return s.real.Release(ctx, key, owner)
}

// grant and confirm are what scripts answer with when the server has done as it
// was asked, whatever has become of the caller's context.
func (s *scriptedStore) grant(r request) (core.Grant, error) {
	return s.real.Acquire(context.Background(), r.key, r.owner, r.ttl)
}

func (s *scriptedStore) confirm(r request) (bool, error) {
	return s.real.Renew(context.Background(), r.key, r.owner, r.ttl)
}

// seen returns the calls of the given kinds so far; of all kinds without any.
func (s *scriptedStore) seen(ops ...string) []request {
	s.mu.Lock()
	defer s.mu.Unlock()
	var calls []request
	for _, c := range s.calls {
		if len(ops) == 0 || strings.Contains(strings.Join(ops, " "), c.op) {
			calls = append(calls, c)
		}
	}
	return calls
}

// times returns when the calls of one kind came in.
func (s *scriptedStore) times(op string) []time.Duration {
	var at []time.Duration
	for _, c := range s.seen(op) {
		at = append(at, c.at)
	}
	return at
}

// notifyingStore is a scriptedStore that can signal.
type notifyingStore struct {
	*scriptedStore
	subscribe func(ctx context.Context, r request) (<-chan struct{}, func(), error)
}

func (s *notifyingStore) Subscribe(ctx context.Context, key string) (<-chan struct{}, func(), error) {
	r := s.note(ctx, "subscribe", key, "", 0)
	if s.subscribe != nil {
		return s.subscribe(ctx, r)
	}
	return s.real.Subscribe(ctx, key)
}

// hang is a call that minds its context; deaf one that does not.
func hang(ctx context.Context) error {
	<-ctx.Done()
	return fmt.Errorf("driver: %w", ctx.Err())
}

func deaf(d time.Duration) { time.Sleep(d) }

var errServer = errors.New("server says no")

func newMemory(t testing.TB) *memory.Store {
	t.Helper()
	s, err := memory.New(memory.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// newStrategy logs nowhere unless o says where.
func newStrategy(t testing.TB, store core.LockStore, o core.Options) *core.Strategy {
	t.Helper()
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s, err := core.NewStrategy(store, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// occupy takes key on store for somebody else, and returns what lets it go.
func occupy(t testing.TB, store core.LockStore, key string, ttl time.Duration) (free func()) {
	t.Helper()
	g, err := store.Acquire(context.Background(), key, "somebody else", ttl)
	if err != nil || !g.Acquired {
		t.Fatalf("occupying %q: %+v, %v", key, g, err)
	}
	return func() {
		if err := store.Release(context.Background(), key, "somebody else"); err != nil {
			t.Errorf("releasing %q: %v", key, err)
		}
	}
}

// wantFree fails unless key can be acquired at once; wantHeld if it can.
func wantFree(t testing.TB, store core.LockStore, key string) {
	t.Helper()
	if !probe(t, store, key) {
		t.Errorf("key %q is held, want it free", key)
	}
}

func wantHeld(t testing.TB, store core.LockStore, key string) {
	t.Helper()
	if probe(t, store, key) {
		t.Errorf("key %q is free, want it held", key)
	}
}

// wantFreeAfter checks that key is held for rest from now on, and free then.
func wantFreeAfter(t testing.TB, store core.LockStore, key string, rest time.Duration) {
	t.Helper()
	if rest > 0 {
		time.Sleep(rest - time.Nanosecond)
		wantHeld(t, store, key)
		time.Sleep(time.Nanosecond)
	}
	wantFree(t, store, key)
}

func probe(t testing.TB, store core.LockStore, key string) (free bool) {
	t.Helper()
	ctx := context.Background()
	g, err := store.Acquire(ctx, key, "probe", time.Minute)
	if err != nil {
		t.Errorf("probing %q: %v", key, err)
	}
	if g.Acquired {
		if err := store.Release(ctx, key, "probe"); err != nil {
			t.Errorf("probing %q: %v", key, err)
		}
	}
	return g.Acquired
}

// wantCalls compares the calls that a store has seen with "op@time" each.
func wantCalls(t testing.TB, s *scriptedStore, want ...string) {
	t.Helper()
	var got []string
	for _, c := range s.seen() {
		got = append(got, c.String())
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("store saw %v, want %v", got, want)
	}
}

// hookCall is one call of a hook.
type hookCall struct {
	hook      string
	at        time.Duration
	goroutine string
	ctx       context.Context
	core.Event
}

// recorder keeps the calls of all hooks, in order.
type recorder struct {
	start time.Time
	mu    sync.Mutex
	calls []hookCall
}

func newRecorder() *recorder { return &recorder{start: time.Now()} }

// hooks returns hooks that record; also, if not nil, runs after that.
func (r *recorder) hooks(also func(hook string, ctx context.Context, e core.Event)) core.Hooks {
	hook := func(name string) func(context.Context, core.Event) {
		return func(ctx context.Context, e core.Event) {
			r.mu.Lock()
			r.calls = append(r.calls, hookCall{name, time.Since(r.start), goroutine(), ctx, e})
			r.mu.Unlock()
			if also != nil {
				also(name, ctx, e)
			}
		}
	}
	return core.Hooks{
		Waiting: hook("Waiting"), Acquired: hook("Acquired"), Rejected: hook("Rejected"), AcquireFailed: hook("AcquireFailed"),
		Renewed: hook("Renewed"), RenewFailed: hook("RenewFailed"), Lost: hook("Lost"),
		Released: hook("Released"), ReleaseFailed: hook("ReleaseFailed"),
	}
}

func (r *recorder) seen() []hookCall {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]hookCall(nil), r.calls...)
}

// names returns the names of the hooks in the order of their calls.
func (r *recorder) names() string {
	var names []string
	for _, c := range r.seen() {
		names = append(names, c.hook)
	}
	return strings.Join(names, " ")
}

// one returns the only call of a hook.
func (r *recorder) one(t testing.TB, hook string) hookCall {
	t.Helper()
	var found []hookCall
	for _, c := range r.seen() {
		if c.hook == hook {
			found = append(found, c)
		}
	}
	if len(found) != 1 {
		t.Fatalf("hook %s ran %d times, want once; all: %s", hook, len(found), r.names())
	}
	return found[0]
}

// goroutine names the calling goroutine.
func goroutine() string {
	buf := make([]byte, 64)
	stack := string(buf[:runtime.Stack(buf, false)])
	name, _, _ := strings.Cut(stack, " [")
	return name
}

// goroutinesOf counts the goroutines, of all tests, that have a function of pkg
// on their stack.
func goroutinesOf(pkg string) int {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	count := 0
	for stack := range strings.SplitSeq(string(buf), "\n\n") {
		if strings.Contains(stack, pkg) {
			count++
		}
	}
	return count
}

type ctxKey struct{}

// nothing is a callback.
func nothing(context.Context) error { return nil }

// mustNotRun is a callback that fails the test.
func mustNotRun(t testing.TB) func(context.Context) error {
	return func(context.Context) error {
		t.Error("the callback ran")
		return nil
	}
}

// until is a callback that works for d, whatever its context says, and then
// returns err.
func until(d time.Duration, err error) func(context.Context) error {
	return func(context.Context) error {
		time.Sleep(d)
		return err
	}
}

// bubble runs f in a bubble with a clock of its own, which fails when f leaves
// a goroutine behind.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f(t)
		time.Sleep(3 * time.Hour) // calls that mind no context have ended then
	})
}
