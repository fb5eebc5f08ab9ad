package mongostore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/leasekit/leasekit/core"
)

const (
	// streamWait is how long one getMore waits on the server for an event, and
	// so how long the stream keeps its connection of the client's pool at a
	// stretch: a call that finds no other connection waits that long at most.
	streamWait = 250 * time.Millisecond
	// streamBound bounds opening the stream, and each of its getMores when the
	// server does not answer. Lost signals cost one poll, so there is no hurry.
	streamBound = 5 * time.Second
	// streamIdle is how long a stream without waiters stays open: waiters come
	// and go, and opening it each time would cost more.
	streamIdle = time.Second
	// streamRefused is for how long a store does not ask again for a stream
	// that the server refused.
	streamRefused = time.Minute
	// firstRetry doubles up to lastRetry between tries to open a stream that
	// broke.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 2 * time.Second
)

var errClosed = errors.New("mongo: the store is closed")

// Subscribe implements [core.Notifier]. All subscriptions of a store share one
// change stream on the collection, which is opened, with one goroutine, when
// somebody first waits, and closed a second after the last one has stopped, or
// by [Store.Close]. It occupies one connection of the client's pool.
//
// The signals are releases, and deletions of documents by hand or by the TTL
// index; that a lease has run out is no event. When the stream breaks, it is
// opened again until that succeeds, and every waiter is then woken once, because
// a signal may have been lost in between.
//
// A server without change streams (a mongod that is no replica set), or a user
// without the privilege changeStream, is an error of the first call, for the
// log. For a minute after it Subscribe returns a closed channel: waiters poll.
// So they do when the stream turns out to take the only connection of the
// client's pool, from the calls that need it, and always with
// [Options].PollOnly.
func (s *Store) Subscribe(ctx context.Context, key string) (<-chan struct{}, func(), error) {
	if err := core.CheckKey(key); err != nil {
		return nil, nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("mongo: %w", err)
	}
	return s.wakeups.subscribe(ctx, s.prefix+key)
}

// notifier shares one change stream among all waiters of a store.
type notifier struct {
	coll     *mongo.Collection
	prefix   string
	released func(id string) // is told of every event
	wg       sync.WaitGroup  // all goroutines

	mu      sync.Mutex
	waiters map[string]map[chan struct{}]struct{} // by _id
	stream  *stream                               // nil while none is wanted
	refused time.Time                             // until when not to ask again
	closed  bool
}

// stream is one goroutine that keeps a change stream open.
type stream struct {
	cancel  context.CancelFunc
	settled chan struct{} // closed when it has been opened, or has failed to
	err     error         // final once settled is closed
	idle    *time.Timer   // running while nobody waits; guarded by notifier.mu
	// getMores counts their beginnings and ends: odd while one is waiting.
	getMores atomic.Int64
}

func newNotifier(coll *mongo.Collection, o Options, released func(id string)) *notifier {
	// Change streams show what a majority has; nothing else is allowed.
	coll = coll.Clone(options.Collection().SetReadConcern(readconcern.Majority()))
	n := &notifier{coll: coll, prefix: o.Prefix, released: released, waiters: map[string]map[chan struct{}]struct{}{}}
	if o.PollOnly {
		n.refused = time.Now().AddDate(1000, 0, 0)
	}
	return n
}

// subscribe returns when the server has confirmed the stream, or with ctx's
// error when that ends first.
func (n *notifier) subscribe(ctx context.Context, id string) (<-chan struct{}, func(), error) {
	w := make(chan struct{}, 1)
	st, err := n.join(id, w)
	if err != nil {
		return nil, nil, err
	}
	if st == nil {
		close(w)
		return w, func() {}, nil
	}
	select {
	case <-st.settled:
		if st.err != nil {
			n.leave(id, w)
			return nil, nil, st.err
		}
		return w, func() { n.leave(id, w) }, nil
	case <-ctx.Done():
		n.leave(id, w)
		return nil, nil, fmt.Errorf("mongo: %w", ctx.Err())
	}
}

// join adds a waiter, and opens the stream if it is the first. It returns no
// stream when there is none to be had.
func (n *notifier) join(id string, w chan struct{}) (*stream, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
		return nil, errClosed
	case time.Now().Before(n.refused):
		return nil, nil
	}
	if n.waiters[id] == nil {
		n.waiters[id] = map[chan struct{}]struct{}{}
	}
	n.waiters[id][w] = struct{}{}
	if n.stream == nil {
		// The stream outlives the call that opens it.
		ctx, cancel := context.WithCancel(context.Background())
		st := &stream{cancel: cancel, settled: make(chan struct{})}
		n.stream = st
		n.wg.Go(func() { n.run(ctx, st) })
	}
	if n.stream.idle != nil {
		n.stream.idle.Stop()
		n.stream.idle = nil
	}
	return n.stream, nil
}

// leave takes a waiter out. With the last one the stream has a while left to
// live. It may be called more than once.
func (n *notifier) leave(id string, w chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.waiters[id][w]; !ok {
		return
	}
	delete(n.waiters[id], w)
	if len(n.waiters[id]) == 0 {
		delete(n.waiters, id)
	}
	if st := n.stream; st != nil && len(n.waiters) == 0 {
		st.idle = time.AfterFunc(streamIdle, func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.stream == st && len(n.waiters) == 0 {
				n.stream = nil
				st.cancel()
			}
		})
	}
}

// end takes st away, and closes the channels of all subscriptions. Those that
// still wait for it to settle find st.err. refused keeps the store from asking
// for another stream for a while.
func (n *notifier) end(st *stream, refused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if refused {
		n.refused = time.Now().Add(streamRefused)
	}
	if n.stream != st {
		return
	}
	n.stream = nil
	st.cancel()
	if st.idle != nil {
		st.idle.Stop()
	}
	for _, ws := range n.waiters {
		for w := range ws {
			close(w)
		}
	}
	clear(n.waiters)
}

func (n *notifier) close() {
	n.mu.Lock()
	n.closed = true
	st := n.stream
	n.mu.Unlock()
	if st != nil {
		n.end(st, false)
	}
	n.wg.Wait()
}

// run keeps the change stream open until ctx ends or the server refuses it.
func (n *notifier) run(ctx context.Context, st *stream) {
	defer st.cancel()
	opened := false
	for failures := 0; ctx.Err() == nil; {
		began := time.Now()
		cs, err := n.open(ctx)
		switch refused := isRefusal(err); {
		case err == nil && !opened:
			opened = true
			close(st.settled)
			if idle, err := n.idlePing(ctx); err == nil {
				n.wg.Go(func() {
					if n.starves(ctx, st, idle) {
						n.end(st, true)
					}
				})
			}
		case err == nil:
			n.wakeAll()
		case !opened:
			st.err = err
			n.end(st, refused) // first: whoever comes next is not to join this one
			close(st.settled)
			return
		case refused:
			n.end(st, true)
			return
		}
		if err == nil {
			n.read(ctx, st, cs)
		}
		// A stream that breaks as soon as it has been opened is no success.
		if failures++; err == nil && time.Since(began) > lastRetry {
			failures = 1
		}
		select {
		case <-time.After(backoff(failures)):
		case <-ctx.Done():
		}
	}
	if !opened {
		st.err = errClosed
		close(st.settled)
	}
}

// open asks the server for the stream. When it returns, every later release is
// an event of it.
func (n *notifier) open(ctx context.Context) (*mongo.ChangeStream, error) {
	ctx, cancel := context.WithTimeout(ctx, streamBound)
	defer cancel()
	// The server tests this on every write to the collection, and most are no
	// release. A release is an update of one field; a tool that restores a
	// document replaces it.
	match := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "operationType", Value: "update"}, {Key: "updateDescription.updatedFields." + fieldOwner, Value: ""}},
		bson.D{{Key: "operationType", Value: "replace"}, {Key: "fullDocument." + fieldOwner, Value: ""}},
		bson.D{{Key: "operationType", Value: "delete"}},
	}}}
	cs, err := n.coll.Watch(ctx, bson.A{
		bson.D{{Key: "$match", Value: match}},
		bson.D{{Key: "$project", Value: bson.D{{Key: "documentKey", Value: 1}}}},
	}, options.ChangeStream().SetMaxAwaitTime(streamWait))
	return cs, wrap(ctx, "", err)
}

// isRefusal reports whether the server has said that it has no such stream for
// us, as opposed to not being there.
func isRefusal(err error) bool {
	e, ok := errors.AsType[mongo.CommandError](err)
	if !ok {
		return false
	}
	passing := []string{"NetworkError", "ResumableChangeStreamError", "RetryableWriteError", "ExceededTimeLimitError"}
	return !slices.ContainsFunc(passing, e.HasErrorLabel)
}

// read hands events on until the stream ends. The driver resumes it by itself
// where that is possible.
func (n *notifier) read(ctx context.Context, st *stream, cs *mongo.ChangeStream) {
	defer func() {
		// Also after ctx has ended: the server keeps cursors for minutes.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = cs.Close(ctx)
	}()
	for {
		// A deadline of its own replaces the client's Timeout, which would end
		// the stream whenever nothing is released for that long.
		next, cancel := context.WithTimeout(ctx, streamBound)
		st.getMores.Add(1)
		event := cs.TryNext(next)
		st.getMores.Add(1)
		cancel()
		switch {
		case event:
			if id, ok := cs.Current.Lookup("documentKey", "_id").StringValueOK(); ok && strings.HasPrefix(id, n.prefix) {
				n.wake(id)
			}
		case cs.Err() != nil || cs.ID() == 0: // broken, or the collection was dropped
			return
		}
	}
}

func (n *notifier) wake(id string) {
	n.released(id)
	n.mu.Lock()
	defer n.mu.Unlock()
	for w := range n.waiters[id] {
		signal(w)
	}
}

func (n *notifier) wakeAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, ws := range n.waiters {
		n.released(id)
		for w := range ws {
			signal(w)
		}
	}
}

// signal is one that a waiter will see; one that is still unread covers it.
func signal(w chan struct{}) {
	select {
	case w <- struct{}{}:
	default:
	}
}

// starves reports whether the stream has taken the client's only connection: then
// every call waits until a getMore is over. idle is what a ping took before there
// was a getMore.
//
// A ping that is answered while one and the same getMore is waiting has had
// another connection. One that took longer than a ping does may have waited for
// the getMore, or for a machine that is busy. So it takes several of the one or
// of the other, and if there are not enough of either the stream stays.
func (n *notifier) starves(ctx context.Context, st *stream, idle time.Duration) bool {
	passed, waited := 0, 0
	for range 16 {
		before := st.getMores.Load()
		took, err := n.ping(ctx)
		after := st.getMores.Load()
		switch {
		case err != nil:
			return false
		case before == after && before%2 == 1 && took < streamWait/2:
			passed++
		case took > idle+streamWait/2:
			waited++
		}
		switch {
		case passed == 3:
			return false
		case waited == 4:
			return true
		}
		// Not one after the other: a getMore that is about to begin would be
		// overtaken by all of them.
		select {
		case <-time.After(streamWait / 8):
		case <-ctx.Done():
			return false
		}
	}
	return false
}

func (n *notifier) ping(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	err := n.coll.Database().RunCommand(ctx, bson.D{{Key: "ping", Value: 1}}).Err()
	return time.Since(began), err
}

// idlePing is the quickest of a few pings: one may meet a machine that is busy.
func (n *notifier) idlePing(ctx context.Context) (time.Duration, error) {
	quickest := time.Duration(math.MaxInt64)
	for range 3 {
		took, err := n.ping(ctx)
		if err != nil {
			return 0, err
		}
		quickest = min(quickest, took)
	}
	return quickest, nil
}

// backoff is the pause before the next try after n failures: doubling, with
// jitter, because a restarted server is met by all of its clients at once.
func backoff(n int) time.Duration {
	d := min(firstRetry<<min(n-1, 16), lastRetry)
	return d/2 + rand.N(d/2)
}
