package etcdstore

import (
	"context"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"

	"github.com/leasekit/leasekit/core"
)

// Subscribe implements [core.Notifier]: it watches the key's end, by release,
// expiry, or an operator's hand.
//
// All subscriptions of a store share one watch stream of the client, and those
// to the same key one watcher, which ends with the last of them. A watch that
// breaks is opened again, and all who wait for its key are woken once, since a
// release may have been missed. The channel is closed when the store is, or
// when its user may not read the key.
func (s *Store) Subscribe(ctx context.Context, key string) (<-chan struct{}, func(), error) {
	if err := core.CheckKey(key); err != nil {
		return nil, nil, err
	}
	if err := s.usable(ctx); err != nil {
		return nil, nil, err
	}
	w, signals, err := s.watches.join(s.prefix + key)
	if err != nil {
		return nil, nil, err
	}
	stop := func() { s.watches.leave(w, signals) }
	select {
	case <-w.ready:
		if err = w.err; err == nil {
			return signals, stop, nil
		}
	case <-ctx.Done():
		err = ctx.Err()
	}
	stop()
	return nil, nil, s.wrap(ctx, err)
}

// headStart is what the one who waits longest is ahead of the others.
const headStart = 200 * time.Microsecond

// watches are the watchers of a store.
type watches struct {
	s  *Store
	mu sync.Mutex
	m  map[string]*watch
}

// watch is the watcher of one key.
type watch struct {
	name   string
	ctx    context.Context
	cancel context.CancelFunc
	subs   []chan struct{} // in the order in which they came

	ready chan struct{} // closed when the server has confirmed, or err is set
	err   error
}

func (ws *watches) init(s *Store) {
	ws.s = s
	ws.m = make(map[string]*watch)
}

// join adds a subscriber to the watch of a key, and starts it if he is the
// first.
func (ws *watches) join(name string) (*watch, chan struct{}, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w := ws.m[name]
	if w == nil {
		w = &watch{name: name, ready: make(chan struct{})}
		w.ctx, w.cancel = context.WithCancel(ws.s.ctx)
		if !ws.s.spawn(func() { ws.run(w) }) {
			w.cancel()
			return nil, nil, ErrClosed
		}
		ws.m[name] = w
	}
	signals := make(chan struct{}, 1)
	w.subs = append(w.subs, signals)
	return w, signals, nil
}

// watched reports whether somebody waits for the key.
func (ws *watches) watched(name string) bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return ws.m[name] != nil
}

// leave takes a subscriber away, and ends the watch if he was the last.
func (ws *watches) leave(w *watch, signals chan struct{}) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	i := slices.Index(w.subs, signals)
	if i < 0 {
		return
	}
	w.subs = slices.Delete(w.subs, i, i+1)
	if len(w.subs) == 0 {
		ws.removeLocked(w)
	}
}

func (ws *watches) removeLocked(w *watch) {
	w.cancel()
	if ws.m[w.name] == w {
		delete(ws.m, w.name)
	}
}

// wake signals all who wait for the key, the one who came first a little before
// the others: while his try is on its way they wait for its answer. Go's
// scheduler alone would let the last one run first, and the first one starve.
func (ws *watches) wake(w *watch) {
	ws.s.tries.free(w.name)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	var first chan struct{}
	if len(w.subs) > 1 {
		first = w.subs[0]
		signal(first)
		ws.mu.Unlock()
		time.Sleep(headStart)
		ws.mu.Lock()
	}
	for _, signals := range w.subs {
		if signals != first {
			signal(signals)
		}
	}
}

func signal(signals chan<- struct{}) {
	select {
	case signals <- struct{}{}:
	default: // there is one that was not taken yet
	}
}

// run watches until nobody waits any more.
func (ws *watches) run(w *watch) {
	var err error
	confirmed := false
	for n := 1; pause(w.ctx, min(n-1, maxResends)) == nil; n++ {
		// From the present on, without a revision: a watcher that begins in
		// the past is served by a loop that comes by every 100 ms. What
		// happened before it was created is no loss: whoever subscribes tries
		// once more, and who was there before is woken. A member without a
		// leader ends the watch instead of keeping silent.
		events := ws.s.client.Watch(clientv3.WithRequireLeader(w.ctx), w.name,
			clientv3.WithFilterPut(), clientv3.WithCreatedNotify())
		for resp := range events {
			switch err = watchError(resp.Err()); {
			case err != nil:
			case resp.Created && !confirmed:
				confirmed = true
				close(w.ready)
				n = 1
			case resp.Created:
				ws.wake(w)
				n = 1
			case len(resp.Events) > 0:
				ws.wake(w)
			}
		}
		if code, _ := codeOf(err); code == codes.PermissionDenied {
			break
		}
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.removeLocked(w)
	for _, signals := range w.subs {
		close(signals)
	}
	w.subs = nil
	if !confirmed {
		if ws.s.ctx.Err() != nil {
			err = ErrClosed
		}
		w.err = err
		close(w.ready)
	}
}
