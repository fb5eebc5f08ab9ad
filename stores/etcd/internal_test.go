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
	s := &Store{clock: func() instant { return *t }, timing: defaultTiming}
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
		s.holds.put(holdID{fmt.Sprint(i), "owner"}, &lease{ttl: 3 * time.Second, sent: clock}, 1, 1)
	}
	if got := len(s.holds.m); got != old {
		t.Fatalf("%d holds of %d while all are alive", got, old)
	}
	clock = clock.add(5 * time.Second)
	alive := holdID{"alive", "owner"}
	for i := range old {
		id := holdID{fmt.Sprint("new", i), "owner"}
		if i == 0 {
			id = alive
		}
		s.holds.put(id, &lease{ttl: time.Hour, sent: clock}, 2, 2)
		if i > 0 {
			s.holds.end(id, 3)
		}
	}
	if s.holds.get(alive).lease == nil {
		t.Error("a hold that is alive was forgotten")
	}
	if len(s.holds.m) != 1 || len(s.holds.queue) > few {
		t.Errorf("%d holds and a queue of %d after as many acquisitions as there were dead ones, want 1 and no more than %d",
			len(s.holds.m), len(s.holds.queue), few)
	}
}

// Answers arrive in any order. What counts is the order in which etcd gave them:
// a lease that the key hangs on must be neither used again nor revoked.
func TestHoldsGoByRevision(t *testing.T) {
	clock := now()
	id := holdID{"key", "owner"}
	fresh := func(id clientv3.LeaseID) *lease { return &lease{id: id, ttl: time.Minute, sent: clock} }
	check := func(t *testing.T, what string, got *lease, want clientv3.LeaseID) {
		t.Helper()
		var id clientv3.LeaseID
		if got != nil {
			id = got.id
		}
		if id != want {
			t.Errorf("%s: lease %d, want %d", what, id, want)
		}
	}
	acquired := func(t *testing.T) *Store {
		s := bare(&clock)
		check(t, "free after the acquisition", s.holds.put(id, fresh(1), 10, 10), 0)
		return s
	}
	t.Run("two moves noted in order", func(t *testing.T) {
		s := acquired(t)
		check(t, "free after the first", s.holds.put(id, fresh(2), 10, 11), 1)
		check(t, "free after the second", s.holds.put(id, fresh(3), 10, 12), 2)
		check(t, "held on", s.holds.get(id).lease, 3)
	})
	t.Run("two moves noted in the wrong order", func(t *testing.T) {
		s := acquired(t)
		check(t, "free after the second", s.holds.put(id, fresh(3), 10, 12), 1)
		check(t, "free after the first", s.holds.put(id, fresh(2), 10, 11), 2)
		check(t, "held on", s.holds.get(id).lease, 3)
	})
	t.Run("acquired again before the release is noted", func(t *testing.T) {
		s := acquired(t)
		check(t, "free after the second acquisition", s.holds.put(id, fresh(2), 20, 20), 1)
		check(t, "free after the release", s.holds.end(id, 15), 0)
		check(t, "held on", s.holds.get(id).lease, 2)
	})
	t.Run("released before the move is noted", func(t *testing.T) {
		s := acquired(t)
		check(t, "free after the release", s.holds.end(id, 12), 1)
		check(t, "free after the move", s.holds.put(id, fresh(2), 10, 11), 0)
		check(t, "free after another acquisition", s.holds.put(id, fresh(3), 20, 20), 2)
	})
	t.Run("seen to be gone", func(t *testing.T) {
		s := acquired(t)
		s.holds.gone(id, 9)
		check(t, "held on, when an earlier one is gone", s.holds.get(id).lease, 1)
		s.holds.gone(id, 10)
		check(t, "held on, when it is gone", s.holds.get(id).lease, 0)
		if len(s.holds.m) != 0 {
			t.Error("the hold is still there")
		}
	})
	t.Run("swept during a move", func(t *testing.T) {
		s := acquired(t)
		clock = clock.add(2 * time.Minute)
		s.holds.put(holdID{"other", "owner"}, fresh(9), 11, 11)
		check(t, "held on after the sweep", s.holds.get(id).lease, 0)
		check(t, "free after the move", s.holds.put(id, fresh(2), 10, 12), 0)
		check(t, "held on", s.holds.get(id).lease, 2)
	})
	t.Run("ghosts", func(t *testing.T) {
		s := acquired(t)
		ghost := fresh(7)
		s.holds.haunt(id, ghost)
		seen := s.holds.get(id)
		s.holds.haunt(id, fresh(8))
		check(t, "held on", seen.lease, 1)
		check(t, "free after the release", s.holds.end(id, 12), 1)
		if got := len(s.holds.get(id).ghosts); got != 2 {
			t.Errorf("%d ghosts after the release, want 2", got)
		}
		s.holds.banish(id, seen.ghosts)
		if got := s.holds.get(id).ghosts; len(got) != 1 || got[0].id != 8 {
			t.Errorf("ghosts %v, want the one that came later", got)
		}
		check(t, "free after an acquisition on a ghost", s.holds.put(id, s.holds.get(id).ghosts[0], 20, 20), 0)
		check(t, "free after its release", s.holds.end(id, 21), 0)
		s.holds.banish(id, s.holds.get(id).ghosts)
		if len(s.holds.m) != 0 {
			t.Error("the hold is still there")
		}
	})
}

func TestTriesTakeTurns(t *testing.T) {
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
	ts.leave("key", mine, true)
	if err := t2.wait(t.Context(), tryPatience); err != nil {
		t.Errorf("wait = %v", err)
	}
	// The answer may be older than the call that has waited for it.
	if step, _ := ts.enter("key", true, false); step != stepLook {
		t.Errorf("call that has waited, after the answer: step %d, want %d", step, stepLook)
	}
	if step, _ := ts.enter("key", false, true); step != stepSend {
		t.Errorf("call that has looked: step %d, want %d", step, stepSend)
	}
}

func TestTriesSendAtOnceAfterARelease(t *testing.T) {
	var ts tries
	ts.init()
	_, mine := ts.enter("key", false, false)
	ts.leave("key", mine, true)
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
	if err := other.wait(ctx, tryPatience); !errors.Is(err, context.Canceled) {
		t.Errorf("wait = %v, want %v", err, context.Canceled)
	}
	// A try that is stuck keeps others waiting only for a while.
	start := time.Now()
	if err := other.wait(t.Context(), tryPatience); err != nil {
		t.Errorf("wait = %v", err)
	}
	if d := time.Since(start); d < tryPatience {
		t.Errorf("waited %v, want at least %v", d, tryPatience)
	}
}

func TestHeldKeysAreBounded(t *testing.T) {
	var ts tries
	ts.init()
	for i := range maxHeld + 10_000 {
		ts.leave(fmt.Sprint(i), nil, true)
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
		{rpctypes.ErrNoSpace, false, false, false}, // executed, perhaps
		{rpctypes.ErrGRPCNoSpace, false, false, false},
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
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:1"}}) // never used
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	s := &Store{client: client}
	if err := s.wrap(ended, nil); err != nil {
		t.Errorf("wrap(nil) = %v", err)
	}
	err = s.wrap(ended, rpctypes.ErrNoLeader)
	if !errors.Is(err, context.Canceled) || !errors.Is(err, rpctypes.ErrNoLeader) {
		t.Errorf("wrap = %q: does not match the context's error and the driver's", err)
	}
	if err := s.wrap(ended, context.Canceled); strings.Count(err.Error(), "canceled") != 1 {
		t.Errorf("wrap = %q: says it twice", err)
	}
	if _, ok := errors.AsType[rpctypes.EtcdError](s.wrap(alive, rpctypes.ErrNoSpace)); !ok {
		t.Error("errors.As does not reach the driver's error")
	}
}
