package mongostore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

const patience = 20 * time.Second

func subscribe(t testing.TB, s core.Notifier, key string) (<-chan struct{}, func()) {
	t.Helper()
	signals, stop, err := s.Subscribe(t.Context(), key)
	if err != nil {
		t.Fatalf("Subscribe(%q): %v", key, err)
	}
	t.Cleanup(stop)
	return signals, stop
}

func mustSignal(t testing.TB, signals <-chan struct{}, what string) {
	t.Helper()
	select {
	case _, open := <-signals:
		if !open {
			t.Fatalf("%s: the channel was closed, want a signal", what)
		}
	case <-time.After(patience):
		t.Fatalf("%s: no signal within %v", what, patience)
	}
}

func mustClose(t testing.TB, signals <-chan struct{}, what string) {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case _, open := <-signals:
			if !open {
				return
			}
		case <-deadline:
			t.Fatalf("%s: the channel was not closed within %v", what, patience)
		}
	}
}

// mustBeSilent wants no signal but the one that a stream gives which broke, and
// was opened again, as it does when the server stands still; r records it.
func mustBeSilent(t testing.TB, r *recorder, signals <-chan struct{}, what string) {
	t.Helper()
	select {
	case _, open := <-signals:
		if n := opens(r.take()); !open || n < 2 {
			t.Fatalf("%s: a signal (open: %v, %d streams), want none", what, open, n)
		}
	case <-time.After(100 * time.Millisecond):
	}
}

// opens counts the change streams among commands.
func opens(commands []bson.Raw) (n int) {
	for _, c := range commands {
		if strings.Contains(c.String(), "$changeStream") {
			n++
		}
	}
	return n
}

// Releases are signalled, and what else happens in the collection is not.
func TestSignals(t *testing.T) {
	var r recorder
	coll := newCollection(t)
	s := newStore(t, through(t, coll, testserver.Mongo(t).URL, r.option()), mongostore.Options{Prefix: "a/"})
	other := newStore(t, coll, mongostore.Options{Prefix: "b/"})
	signals, _ := subscribe(t, s, "k")
	mustAcquire(t, s, "k", "me", time.Minute)
	if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); !ok || err != nil {
		t.Fatal(ok, err)
	}
	mustRelease(t, s, "k", "stranger")
	mustAcquire(t, s, "k2", "me", time.Minute)
	mustRelease(t, s, "k2", "me")
	mustAcquire(t, other, "k", "me", time.Minute)
	mustRelease(t, other, "k", "me")
	mustBeSilent(t, &r, signals, "acquired, renewed, released elsewhere")
	mustRelease(t, s, "k", "me")
	mustSignal(t, signals, "released")

	mustAcquire(t, s, "k", "me", time.Minute)
	if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: "a/k"}}); err != nil {
		t.Fatal(err)
	}
	mustSignal(t, signals, "deleted by hand")
	mustAcquire(t, s, "k", "me", time.Minute)
	doc := document(t, coll, "a/k")
	doc["owner"] = ""
	if _, err := coll.ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: "a/k"}}, doc); err != nil {
		t.Fatal(err)
	}
	mustSignal(t, signals, "replaced by hand")
	mustAcquire(t, s, "k", "me", time.Minute)
}

// After a signal the next try goes straight for the lease.
func TestSignalEndsReads(t *testing.T) {
	var r recorder
	coll := newCollection(t)
	s := newStore(t, through(t, coll, testserver.Mongo(t).URL, r.option()), mongostore.Options{})
	other := newStore(t, coll, mongostore.Options{})
	mustAcquire(t, other, "k", "you", time.Minute)
	mustBeHeld(t, s, "k")
	signals, _ := subscribe(t, s, "k")
	mustRelease(t, other, "k", "you")
	mustSignal(t, signals, "released")
	r.take()
	mustAcquire(t, s, "k", "me", time.Minute)
	for _, c := range r.take() {
		if name := commandName(c); name == "aggregate" {
			t.Errorf("Acquire after a signal sent a read first")
		}
	}
}

// One change stream for all waiters of a store. It is opened when somebody waits,
// and closed some time after.
func TestOneStream(t *testing.T) {
	var r recorder
	coll := newCollection(t)
	s := newStore(t, through(t, coll, testserver.Mongo(t).URL, r.option()), mongostore.Options{})
	mustAcquire(t, s, "k", "me", time.Minute)
	if n := opens(r.take()); n != 0 {
		t.Errorf("%d change streams although nobody waits", n)
	}
	var stops []func()
	var all []<-chan struct{}
	for i := range 200 {
		signals, stop := subscribe(t, s, fmt.Sprint("k", i%50))
		stops, all = append(stops, stop), append(all, signals)
	}
	for i := range 50 {
		mustAcquire(t, s, fmt.Sprint("k", i), "me", time.Minute)
		mustRelease(t, s, fmt.Sprint("k", i), "me")
	}
	for _, signals := range all {
		mustSignal(t, signals, "200 waiters on 50 keys")
	}
	// One that breaks, because the server stood still, is opened again.
	if n := opens(r.take()); n < 1 || n > 3 {
		t.Errorf("%d change streams for 200 waiters, want 1", n)
	}
	for _, stop := range stops {
		stop()
	}
	// A waiter that comes soon finds the stream still open.
	signals, stop := subscribe(t, s, "k0")
	mustAcquire(t, s, "k0", "me", time.Minute)
	mustRelease(t, s, "k0", "me")
	mustSignal(t, signals, "released")
	stop()
	closed := func() bool {
		return slices.ContainsFunc(r.take(), func(c bson.Raw) bool { return commandName(c) == "killCursors" })
	}
	for deadline := time.Now().Add(patience); !closed(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the change stream was not closed")
		}
	}
	time.Sleep(300 * time.Millisecond)
	if got := r.names(); got != "" {
		t.Errorf("sent %q after the last waiter had gone, want nothing", got)
	}
	signals, _ = subscribe(t, s, "k0")
	mustAcquire(t, s, "k0", "me", time.Minute)
	mustRelease(t, s, "k0", "me")
	mustSignal(t, signals, "released, seen by a second stream")
}

func TestCloseEndsSubscriptions(t *testing.T) {
	s := newStore(t, newCollection(t), mongostore.Options{})
	signals, stop := subscribe(t, s, "k")
	mustAcquire(t, s, "k", "me", time.Minute)
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	mustClose(t, signals, "Close")
	stop()
	stop()
	if _, _, err := s.Subscribe(t.Context(), "k"); err == nil {
		t.Error("Subscribe after Close returned no error")
	}
	// What is held can still be released.
	if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); !ok || err != nil {
		t.Errorf("Renew after Close returned %v, %v, want true, nil", ok, err)
	}
	mustRelease(t, s, "k", "me")
	mustAcquire(t, s, "k", "you", time.Minute)
}

func TestCloseWithoutUse(t *testing.T) {
	s := newStore(t, connect(t, "mongodb://127.0.0.1:1").Database("d").Collection("c"), mongostore.Options{})
	if err := s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

// refuseStreams answers as a mongod that is no replica set does.
func refuseStreams(opened *atomic.Int64) func(string, bson.Raw) trick {
	return func(command string, request bson.Raw) trick {
		if command != "aggregate" || !strings.Contains(request.String(), "$changeStream") {
			return trick{}
		}
		opened.Add(1)
		return trick{instead: bson.D{{Key: "ok", Value: 0.0}, {Key: "code", Value: int32(40573)}, {Key: "codeName", Value: "Location40573"}, {Key: "errmsg", Value: "The $changeStream stage is only supported on replica sets"}}}
	}
}

// Where there are no change streams, one error says so, and then waiters poll
// without a further question.
func TestNoChangeStreams(t *testing.T) {
	coll := newCollection(t)
	var opened atomic.Int64
	w := newWire(t, testserver.Mongo(t), refuseStreams(&opened))
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	if _, _, err := s.Subscribe(t.Context(), "k"); err == nil || !strings.Contains(err.Error(), "only supported on replica sets") {
		t.Errorf("Subscribe returned %v, want the server's error", err)
	}
	for range 3 {
		signals, stop, err := s.Subscribe(t.Context(), "k")
		if err != nil {
			t.Fatalf("Subscribe: %v", err)
		}
		mustClose(t, signals, "no change streams")
		stop()
	}
	if n := opened.Load(); n != 1 {
		t.Errorf("asked %d times for a change stream, want 1", n)
	}
	handOver(t, s, newStore(t, coll, mongostore.Options{}))
}

func TestPollOnly(t *testing.T) {
	var r recorder
	coll := newCollection(t)
	s := newStore(t, through(t, coll, testserver.Mongo(t).URL, r.option()), mongostore.Options{PollOnly: true})
	signals, stop := subscribe(t, s, "k")
	mustClose(t, signals, "PollOnly")
	stop()
	handOver(t, s, newStore(t, coll, mongostore.Options{}))
	if n := opens(r.take()); n != 0 {
		t.Errorf("%d change streams, want none", n)
	}
}

// handOver lets a strategy on s wait for a key that other holds.
func handOver(t *testing.T, s, other core.LockStore) time.Duration {
	t.Helper()
	mustAcquire(t, other, "handed over", "you", time.Minute)
	strategy, err := core.NewStrategy(s, core.Options{Wait: patience})
	if err != nil {
		t.Fatal(err)
	}
	var released atomic.Int64
	began := time.Now()
	time.AfterFunc(300*time.Millisecond, func() {
		released.Store(int64(time.Since(began)))
		if err := other.Release(context.WithoutCancel(t.Context()), "handed over", "you"); err != nil {
			t.Errorf("Release: %v", err)
		}
	})
	var took time.Duration
	err = strategy.Do(t.Context(), "handed over", func(context.Context) error {
		took = time.Since(began) - time.Duration(released.Load())
		return nil
	})
	if err != nil {
		t.Errorf("Do: %v", err)
	}
	return took
}

// A network that fails for a while: the stream comes back, and whoever waited is
// told of what was released meanwhile.
func TestStreamComesBack(t *testing.T) {
	coll := newCollection(t)
	var broken atomic.Bool
	var getMores atomic.Int64
	w := newWire(t, testserver.Mongo(t), func(command string, request bson.Raw) trick {
		if command == "getMore" {
			getMores.Add(1)
		}
		stream := command == "getMore" || command == "aggregate" && strings.Contains(request.String(), "$changeStream")
		return trick{lose: broken.Load() && stream}
	})
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	other := newStore(t, coll, mongostore.Options{})
	for _, outage := range []time.Duration{300 * time.Millisecond, 7 * time.Second} {
		a, stopA := subscribe(t, s, "a")
		for n := getMores.Load(); getMores.Load() == n; {
			time.Sleep(time.Millisecond)
		}
		mustAcquire(t, other, "a", "you", time.Minute)
		broken.Store(true)
		mustRelease(t, other, "a", "you")
		mustAcquire(t, other, "b", "you", time.Minute)
		b, stopB := subscribe(t, s, "b")
		time.Sleep(outage)
		broken.Store(false)
		mustSignal(t, a, "released during an outage")
		mustRelease(t, other, "b", "you")
		mustSignal(t, b, "released after an outage")
		stopA()
		stopB()
	}
}

// A server that is not there now may be there for the next waiter.
func TestFailedStreamIsAnErrorOnce(t *testing.T) {
	coll := newCollection(t)
	var broken atomic.Bool
	broken.Store(true)
	w := newWire(t, testserver.Mongo(t), func(_ string, request bson.Raw) trick {
		if !broken.Load() || !strings.Contains(request.String(), "$changeStream") {
			return trick{}
		}
		// The driver tries again at once for as long as it has time, and each
		// try leaves a cursor on the server.
		time.Sleep(100 * time.Millisecond)
		return trick{lose: true}
	})
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	if _, _, err := s.Subscribe(t.Context(), "k"); err == nil {
		t.Fatal("Subscribe returned no error, want one")
	}
	broken.Store(false)
	time.Sleep(500 * time.Millisecond) // a try may be on its way yet
	signals, _ := subscribe(t, s, "k")
	mustAcquire(t, s, "k", "me", time.Minute)
	mustRelease(t, s, "k", "me")
	mustSignal(t, signals, "released")
}

// Dropping the collection ends the stream on the server.
func TestStreamOutlivesDrop(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{})
	mustAcquire(t, s, "k", "me", time.Minute)
	signals, _ := subscribe(t, s, "k")
	if err := coll.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustSignal(t, signals, "the collection was dropped")
	mustAcquire(t, s, "k", "me", time.Minute)
	// The signal may have been that of the drop, before the stream is back.
	for deadline := time.Now().Add(patience); ; {
		mustRelease(t, s, "k", "me")
		select {
		case <-signals:
			return
		case <-time.After(200 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatal("no signal after a release in a collection made anew")
		}
		mustAcquire(t, s, "k", "me", time.Minute)
	}
}

// The client's Timeout is for calls that should be over by then. A stream should
// not.
func TestClientTimeoutSparesStream(t *testing.T) {
	var r recorder
	coll := newCollection(t)
	hasty := through(t, coll, testserver.Mongo(t).URL, r.option(), options.Client().SetTimeout(500*time.Millisecond))
	s, other := newStore(t, hasty, mongostore.Options{}), newStore(t, coll, mongostore.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	signals, stop, err := s.Subscribe(ctx, "k")
	if err != nil {
		t.Fatalf("Subscribe: %v", err)
	}
	defer stop()
	time.Sleep(3 * time.Second)
	// It would be six or so; one more is for a server that stands still.
	if n := opens(r.take()); n < 1 || n > 3 {
		t.Errorf("%d change streams in 3 s without events, want 1", n)
	}
	mustAcquire(t, other, "k", "me", time.Minute)
	mustRelease(t, other, "k", "me")
	mustSignal(t, signals, "released")
}

// The stream occupies a connection. If there is no other it gives it back, and
// waiters poll: a renewal must not wait for a getMore.
func TestOnlyConnectionIsNotTaken(t *testing.T) {
	coll := newCollection(t)
	one := options.Client().SetMaxPoolSize(1)
	s := newStore(t, through(t, coll, testserver.Mongo(t).URL, one), mongostore.Options{})
	mustAcquire(t, s, "held", "me", time.Minute)
	signals, _ := subscribe(t, s, "k")
	mustClose(t, signals, "a pool of one connection")
	quickest := time.Hour
	for range 10 {
		began := time.Now()
		if ok, err := s.Renew(t.Context(), "held", "me", time.Minute); !ok || err != nil {
			t.Fatal(ok, err)
		}
		quickest = min(quickest, time.Since(began))
	}
	if quickest > 100*time.Millisecond {
		t.Errorf("Renew took %v at best, as if it waited for a getMore", quickest)
	}
	signals, _ = subscribe(t, s, "k")
	mustClose(t, signals, "a pool of one connection, asked again")
	handOver(t, s, newStore(t, coll, mongostore.Options{}))

	var r recorder
	two := newStore(t, through(t, coll, testserver.Mongo(t).URL, r.option(), options.Client().SetMaxPoolSize(2)), mongostore.Options{})
	signals, _ = subscribe(t, two, "k")
	time.Sleep(1200 * time.Millisecond) // past all pings
	mustBeSilent(t, &r, signals, "a pool of two connections")
	mustAcquire(t, two, "k", "me", time.Minute)
	mustRelease(t, two, "k", "me")
	mustSignal(t, signals, "a pool of two connections")
}

func TestSubscribeContext(t *testing.T) {
	coll := newCollection(t)
	stuck := make(chan struct{})
	w := newWire(t, testserver.Mongo(t), func(_ string, request bson.Raw) trick {
		if strings.Contains(request.String(), "$changeStream") {
			<-stuck
		}
		return trick{}
	})
	defer close(stuck)
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, _, err := s.Subscribe(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Subscribe returned %v, want an error that matches DeadlineExceeded", err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("Subscribe took %v, want 100 ms", took)
	}
	if _, _, err := s.Subscribe(t.Context(), "a\x00"); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("Subscribe with a bad key returned %v, want an error that matches ErrInvalid", err)
	}
	// Close does not wait for the server.
	began = time.Now()
	if err := s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Close took %v", took)
	}
}

func TestHandOverIsQuick(t *testing.T) {
	coll := newCollection(t)
	s, other := newStore(t, coll, mongostore.Options{}), newStore(t, coll, mongostore.Options{})
	var all []time.Duration
	for range 5 {
		all = append(all, handOver(t, s, other))
	}
	slices.Sort(all)
	t.Logf("release to callback: %v", all)
	// A poll would come 350 ms after the release at the earliest: 50 + 100 +
	// 200 + 400 ms after the first try.
	if all[0] > 200*time.Millisecond {
		t.Errorf("the quickest hand-over took %v: nobody was woken", all[0])
	}
}
