package etcdstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestClassOf(t *testing.T) {
	for _, test := range []struct {
		ttl  time.Duration
		want int64
	}{
		{time.Millisecond, 1},
		{500 * time.Millisecond, 1},
		{501 * time.Millisecond, 2},
		{time.Second, 2},
		{1500 * time.Millisecond, 2},
		{1500*time.Millisecond + 1, 3},
		{2 * time.Second, 3},
		{2*time.Second + 1, 3},
		{30 * time.Second, 31},
		{clientv3.MaxLeaseTTL * time.Second, clientv3.MaxLeaseTTL},
		{math.MaxInt64, clientv3.MaxLeaseTTL},
	} {
		got := classOf(test.ttl)
		if got != test.want {
			t.Errorf("classOf(%v) = %d, want %d", test.ttl, got, test.want)
		}
		if got < clientv3.MaxLeaseTTL && time.Duration(got)*time.Second < test.ttl+reserve {
			t.Errorf("classOf(%v) = %d: less than the reserve is left", test.ttl, got)
		}
	}
}

func TestSinceTakesTheLongerClock(t *testing.T) {
	start := now()
	after := func(mono, wall time.Duration) instant {
		return instant{mono: start.mono.Add(mono), wall: start.wall.Add(wall)}
	}
	for _, test := range []struct {
		name       string
		mono, wall time.Duration
		want       time.Duration
	}{
		{"clocks agree", time.Minute, time.Minute, time.Minute},
		{"machine was suspended", time.Second, time.Hour, time.Hour},
		{"wall clock was set back", time.Minute, -time.Hour, time.Minute},
		{"wall clock was set forward", time.Minute, time.Hour, time.Hour},
	} {
		if got := after(test.mono, test.wall).since(start); got != test.want {
			t.Errorf("%s: since = %v, want %v", test.name, got, test.want)
		}
	}
	if strings.Contains(now().wall.String(), "m=") {
		t.Error("the wall time has a monotonic reading: both clocks would be the same one")
	}
}

func TestLifeAllowsForDrift(t *testing.T) {
	start := now()
	l := &lease{ttl: time.Hour, sent: start}
	later := instant{mono: start.mono.Add(50 * time.Minute), wall: start.wall.Add(50 * time.Minute)}
	if got, want := l.life(later), 9*time.Minute+30*time.Second; got != want {
		t.Errorf("life after 50 minutes of an hour = %v, want %v: one percent of what has passed", got, want)
	}
}

func TestExtendKeepsTheLatest(t *testing.T) {
	start := now()
	at := func(d time.Duration) instant {
		return instant{mono: start.mono.Add(d), wall: start.wall.Add(d)}
	}
	l := &lease{ttl: 10 * time.Second, sent: start}
	l.extend(at(5 * time.Second))
	l.extend(at(3 * time.Second)) // an answer that was overtaken
	if got, want := l.life(at(5*time.Second)), 10*time.Second; got != want {
		t.Errorf("life = %v, want %v", got, want)
	}
}

// bare is a store without a server, for what needs none. Its clock stands at
// t.
func bare(t *instant) *Store {
	s := &Store{clock: func() instant { return *t }}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.leases.init(s)
	s.reaper.init(s)
	s.holds.init(s)
	s.tries.init()
	return s
}

func (i instant) add(d time.Duration) instant {
	return instant{mono: i.mono.Add(d), wall: i.wall.Add(d)}
}

// Holders that die without a release must not fill the memory of those who live
// on.
func TestHoldsThatNobodyReleasesAreForgotten(t *testing.T) {
	clock := now()
	s := bare(&clock)
	const old, few = 50_000, 64
	for i := range old {
		s.holds.add(&hold{id: holdID{fmt.Sprint(i), "owner"}, lease: &lease{ttl: 3 * time.Second, sent: clock}})
	}
	if got := len(s.holds.m); got != old {
		t.Fatalf("%d holds of %d while all are alive", got, old)
	}
	clock = clock.add(5 * time.Second)
	alive := holdID{"alive", "owner"}
	for i := range old {
		h := &hold{id: holdID{fmt.Sprint("new", i), "owner"}, lease: &lease{ttl: time.Hour, sent: clock}}
		if i == 0 {
			h.id = alive
		}
		s.holds.add(h)
		if i > 0 {
			s.holds.remove(h)
		}
	}
	if h, _ := s.holds.get(alive); h == nil {
		t.Error("a hold that is alive was forgotten")
	}
	if len(s.holds.m) != 1 || len(s.holds.queue) > few {
		t.Errorf("%d holds and a queue of %d after as many acquisitions as there were dead ones, want 1 and no more than %d",
			len(s.holds.m), len(s.holds.queue), few)
	}
}

// An owner may be used again by callers who make their own.
func TestHoldOfTheSameOwnerReplaces(t *testing.T) {
	clock := now()
	s := bare(&clock)
	id := holdID{"key", "owner"}
	first := &hold{id: id, lease: &lease{id: 1, ttl: time.Minute, sent: clock}}
	second := &hold{id: id, lease: &lease{id: 2, ttl: time.Minute, sent: clock}}
	s.holds.add(first)
	s.holds.add(second)
	if l := s.holds.remove(first); l != nil {
		t.Errorf("the first hold is still there, with lease %d", l.id)
	}
	if _, h := s.holds.get(id); h.lease != second.lease {
		t.Error("the second hold is gone")
	}
}

func TestTriesShareAnAnswer(t *testing.T) {
	var ts tries
	ts.init()
	step, mine := ts.enter("key", false, false)
	if step != stepSend {
		t.Fatalf("first call: step %d, want %d", step, stepSend)
	}
	if step, _ := ts.enter("other", false, false); step != stepSend {
		t.Errorf("call for another key: step %d, want %d", step, stepSend)
	}
	step, t2 := ts.enter("key", false, false)
	if step != stepWait || t2 != mine {
		t.Fatalf("second call: step %d, want %d on the first call's try", step, stepWait)
	}
	if step, _ := ts.enter("key", true, false); step != stepAlone {
		t.Errorf("call that has waited: step %d, want %d", step, stepAlone)
	}
	ts.leave("key", mine, true, true)
	if won, err := t2.wait(t.Context()); !won || err != nil {
		t.Errorf("wait = %t, %v; want true, nil", won, err)
	}
	if step, _ := ts.enter("key", false, false); step != stepLook {
		t.Errorf("call after a win: step %d, want %d", step, stepLook)
	}
	if step, _ := ts.enter("key", false, true); step != stepSend {
		t.Errorf("call that has looked: step %d, want %d", step, stepSend)
	}
}

// Only a win says that the key is held now: a loss may be older than the call
// that waits.
func TestTriesDoNotShareALoss(t *testing.T) {
	var ts tries
	ts.init()
	_, mine := ts.enter("key", false, false)
	_, other := ts.enter("key", false, false)
	ts.leave("key", mine, true, false)
	if won, err := other.wait(t.Context()); won || err != nil {
		t.Errorf("wait = %t, %v; want false, nil", won, err)
	}
	if step, _ := ts.enter("key", true, false); step != stepLook {
		t.Errorf("step after somebody's loss: %d, want %d", step, stepLook)
	}
	ts.free("key")
	if step, _ := ts.enter("key", false, false); step != stepSend {
		t.Errorf("step after the key became free: %d, want %d", step, stepSend)
	}
}

func TestTriesWaitEndsWithContext(t *testing.T) {
	var ts tries
	ts.init()
	ts.enter("key", false, false)
	_, other := ts.enter("key", false, false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := other.wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("wait = %v, want %v", err, context.Canceled)
	}
	// A try that is stuck keeps others waiting only for a while.
	start := time.Now()
	if won, err := other.wait(t.Context()); won || err != nil {
		t.Errorf("wait = %t, %v; want false, nil", won, err)
	}
	if d := time.Since(start); d < tryPatience {
		t.Errorf("waited %v, want at least %v", d, tryPatience)
	}
}

func TestHeldKeysAreBounded(t *testing.T) {
	var ts tries
	ts.init()
	for i := range maxHeld + 10_000 {
		ts.leave(fmt.Sprint(i), nil, true, false)
	}
	if got := len(ts.held); got > maxHeld {
		t.Errorf("%d keys remembered, want at most %d", got, maxHeld)
	}
}

func TestErrorKinds(t *testing.T) {
	for _, test := range []struct {
		err                          error
		refusal, transient, notFound bool
	}{
		{nil, false, false, false},
		{rpctypes.ErrLeaseNotFound, true, false, true},
		{rpctypes.ErrGRPCLeaseNotFound, true, false, true},
		{rpctypes.ErrTooManyRequests, true, false, false},
		{rpctypes.ErrNoSpace, true, false, false},
		{rpctypes.ErrPermissionDenied, true, false, false},
		{rpctypes.ErrNoLeader, false, true, false},
		{rpctypes.ErrLeaderChanged, false, true, false},
		{rpctypes.ErrTimeout, false, true, false},
		{rpctypes.ErrGRPCTimeoutDueToLeaderFail, false, true, false},
		{status.Error(codes.Unavailable, "connection refused"), false, true, false},
		{status.Error(codes.Internal, "stream terminated"), false, false, false},
		// Not etcd's word: a proxy's, or the client's own, about a message
		// that may have arrived.
		{status.Error(codes.ResourceExhausted, "message larger than max"), false, false, false},
		{status.Error(codes.NotFound, "no such host"), false, false, false},
		{context.DeadlineExceeded, false, false, false},
		{fmt.Errorf("wrapped: %w", rpctypes.ErrNoLeader), false, true, false},
	} {
		if got := isRefusal(test.err); got != test.refusal {
			t.Errorf("isRefusal(%v) = %t, want %t", test.err, got, test.refusal)
		}
		if got := isTransient(test.err); got != test.transient {
			t.Errorf("isTransient(%v) = %t, want %t", test.err, got, test.transient)
		}
		if got := isLeaseNotFound(test.err); got != test.notFound {
			t.Errorf("isLeaseNotFound(%v) = %t, want %t", test.err, got, test.notFound)
		}
	}
}

func TestWrap(t *testing.T) {
	alive, ended := t.Context(), func() context.Context {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return ctx
	}()
	if err := wrap(ended, nil); err != nil {
		t.Errorf("wrap(nil) = %v", err)
	}
	err := wrap(ended, rpctypes.ErrNoLeader)
	if !errors.Is(err, context.Canceled) || !errors.Is(err, rpctypes.ErrNoLeader) {
		t.Errorf("wrap = %q: does not match the context's error and the driver's", err)
	}
	if err := wrap(ended, context.Canceled); strings.Count(err.Error(), "canceled") != 1 {
		t.Errorf("wrap = %q: says it twice", err)
	}
	if _, ok := errors.AsType[rpctypes.EtcdError](wrap(alive, rpctypes.ErrNoSpace)); !ok {
		t.Error("errors.As does not reach the driver's error")
	}
}

// A renewal during an election took longer than what the lease seemed to have
// left. An acquisition of another key swept the hold meanwhile, and the lease
// that the key had just been moved to was revoked as if the key were released:
// the renewal said yes, and the key was gone.
func TestHoldThatIsSweptDuringAMoveKeepsItsNewLease(t *testing.T) {
	clock := now()
	s := bare(&clock)
	id := holdID{"key", "owner"}
	h := &hold{id: id, lease: &lease{id: 1, ttl: 3 * time.Second, sent: clock}}
	s.holds.add(h)
	clock = clock.add(4 * time.Second)
	moved := &lease{id: 2, ttl: 3 * time.Second, sent: clock}
	s.holds.add(&hold{id: holdID{"other", "owner"}, lease: &lease{id: 3, ttl: time.Minute, sent: clock}})
	if got, _ := s.holds.get(id); got != nil {
		t.Fatal("the hold was not swept: this test proves nothing")
	}
	s.holds.moved(h, id, moved)
	if _, got := s.holds.get(id); got.lease != moved {
		t.Errorf("the key hangs on %v, want the lease that it was moved to", got.lease)
	}
}
