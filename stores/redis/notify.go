package redisstore

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// pingEvery finds a connection that is dead without a reset: nothing heard
	// between two pings ends it. Until then a lost signal costs its waiters one
	// poll, so there is no hurry.
	pingEvery = 10 * time.Second
	// idlePings is after how many pings without a subscription a connection is
	// closed: waiters come and go, and a dial each time would cost more.
	idlePings = 3
	// firstRetry doubles up to lastRetry between tries to connect.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 2 * time.Second
)

var (
	errClosed     = errors.New("the store is closed")
	errOutOfOrder = errors.New("a reply of the subscription connection that nothing had asked for")
	errSilent     = errors.New("the subscription connection does not answer")
)

// node makes subscription connections: a client of one server.
type node interface {
	SSubscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// cluster is what a ClusterClient has over a client of one server: a sharded
// channel lives on the master of its slot.
type cluster interface {
	MasterForKey(ctx context.Context, key string) (*redis.Client, error)
	ReloadState(ctx context.Context)
}

// hub shares subscription connections among all waiters of a store.
//
// go-redis' own PubSub subscribes again after a reconnect, but to all channels
// in one command, which a cluster refuses when they lie in different slots, and
// without telling when each is confirmed. So the hub takes a PubSub for one
// connection only, and makes another when that breaks.
type hub struct {
	client  node    // a pointer, because the caller's type may be no map key
	cluster cluster // nil unless client is one of a cluster
	log     *slog.Logger
	ping    time.Duration // pingEvery, but in tests

	// ctx is that of the connections, which outlive every call; close ends it.
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // all goroutines

	mu     sync.Mutex
	topics map[string]*topic // by channel
	links  map[node]*link
	closed bool
	lost   bool // a connection, which has been logged, and none is back
}

// topic is one channel with everybody who waits for it. Its fields are guarded
// by hub.mu, but for settled and err: those are final once settled is closed.
type topic struct {
	channel string
	link    *link // nil before it is routed
	state   topicState
	waiters map[chan struct{}]struct{}
	settled chan struct{} // closed by the first confirmation, or failure
	err     error
}

type topicState int

const (
	topicNew  topicState = iota // to be subscribed
	topicSent                   // SSUBSCRIBE is on its way
	topicLive                   // confirmed by the server
	topicLost                   // refused or dropped: to be routed again, later
)

func (t *topic) isSettled() bool {
	select {
	case <-t.settled:
		return true
	default:
		return false
	}
}

// wake signals every waiter; a signal that is still unread covers this one.
func (t *topic) wake() {
	for w := range t.waiters {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

// link is the connection to one node and the topics that live there. Its fields
// are guarded by hub.mu.
type link struct {
	hub    *hub
	node   node
	topics map[*topic]struct{}
	work   chan struct{} // signal: a topic or a drop is to be sent

	// Of the present connection:
	conn  *redis.PubSub
	drops []string  // channels to unsubscribe
	sent  []request // without a reply so far, in the order of sending
	heard bool      // something came since the last ping
	alive bool      // the server has answered
	idle  int       // pings without a topic, one after the other
}

// request is a command on a link's connection. Redis answers in order, which
// tells whom an error is for: it does not name its channel.
type request struct {
	kind    string // "ssubscribe" or "sunsubscribe"
	channel string
	topic   *topic // nil for "sunsubscribe"
}

func newHub(client redis.UniversalClient, log *slog.Logger) *hub {
	h := &hub{
		client: &struct{ node }{client},
		log:    log,
		ping:   pingEvery,
		topics: map[string]*topic{},
		links:  map[node]*link{},
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.cluster, _ = inner[cluster](client)
	return h
}

// subscribe returns once the server has confirmed the channel, or with the error
// of ctx when that ends first. If the channel was confirmed before and its
// connection is just being dialled again, it returns at once: the waiter is
// woken when the channel is back.
func (h *hub) subscribe(ctx context.Context, channel string) (<-chan struct{}, func(), error) {
	w := make(chan struct{}, 1)
	t := h.join(channel, w)
	if t == nil {
		return nil, nil, errClosed
	}
	select {
	case <-t.settled:
		if t.err != nil {
			return nil, nil, t.err
		}
		return w, func() { h.leave(t, w) }, nil
	case <-ctx.Done():
		h.leave(t, w)
		return nil, nil, ctx.Err()
	}
}

// join adds w to the channel's topic, and starts the topic if w is the first. It
// returns nil when the hub is closed.
func (h *hub) join(channel string, w chan struct{}) *topic {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	t := h.topics[channel]
	if t == nil {
		t = &topic{channel: channel, waiters: map[chan struct{}]struct{}{}, settled: make(chan struct{})}
		h.topics[channel] = t
		if h.cluster == nil {
			h.attach(t, h.client)
		} else {
			// On a goroutine of the hub, because the client may have to ask
			// the cluster first, and whoever joins next waits for it too.
			h.wg.Go(func() { h.place(t) })
		}
	}
	t.waiters[w] = struct{}{}
	return t
}

// leave takes w out; with the last waiter goes the topic. It may be called more
// than once.
func (h *hub) leave(t *topic, w chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := t.waiters[w]; !ok {
		return
	}
	delete(t.waiters, w)
	if len(t.waiters) > 0 {
		return
	}
	if l := t.link; l != nil && (t.state == topicSent || t.state == topicLive) {
		l.drops = append(l.drops, t.channel)
		l.poke()
	}
	h.remove(t)
}

// remove forgets t. The caller holds h.mu.
func (h *hub) remove(t *topic) {
	if h.topics[t.channel] == t {
		delete(h.topics, t.channel)
	}
	if t.link != nil {
		delete(t.link.topics, t)
		t.link = nil
	}
}

// fail ends a topic that was never confirmed, for all who wait for that. The
// caller holds h.mu.
func (h *hub) fail(t *topic, err error) {
	h.remove(t)
	clear(t.waiters)
	t.err = err
	close(t.settled)
}

// route returns the node where channel lives.
func (h *hub) route(channel string) (node, error) {
	if h.cluster == nil {
		return h.client, nil
	}
	master, err := h.cluster.MasterForKey(h.ctx, channel)
	if err != nil {
		return nil, err
	}
	return master, nil
}

// place routes a new topic.
func (h *hub) place(t *topic) {
	to, err := h.route(t.channel)
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.topics[t.channel] != t: // everybody has left, or close came
	case err != nil:
		h.fail(t, err)
	default:
		h.attach(t, to)
	}
}

// attach moves t to the link of to, which it starts if need be. The caller holds
// h.mu and has seen that the hub is not closed.
func (h *hub) attach(t *topic, to node) {
	l := h.links[to]
	if l == nil {
		l = &link{hub: h, node: to, topics: map[*topic]struct{}{}, work: make(chan struct{}, 1)}
		h.links[to] = l
		h.wg.Go(l.run)
	}
	if t.link != nil {
		delete(t.link.topics, t)
	}
	t.link, t.state = l, topicNew
	l.topics[t] = struct{}{}
	l.poke()
}

// close ends everything and waits for it.
func (h *hub) close() {
	h.mu.Lock()
	h.closed = true
	h.cancel()
	for _, t := range h.topics {
		if !t.isSettled() {
			h.fail(t, errClosed)
			continue
		}
		h.remove(t)
		for w := range t.waiters {
			close(w)
		}
		clear(t.waiters)
	}
	h.mu.Unlock()
	h.wg.Wait()
}

// poke makes the link's goroutine look at its topics.
func (l *link) poke() {
	select {
	case l.work <- struct{}{}:
	default:
	}
}

// run keeps a connection while the link has topics, and a while longer.
func (l *link) run() {
	for tries := 0; ; {
		began := time.Now()
		err := l.session()
		if err == nil || l.hub.ctx.Err() != nil {
			return
		}
		// A session that ends as soon as it has begun is no success.
		if l.lost(err) && time.Since(began) > lastRetry {
			tries = 0
		} else {
			tries++
		}
		select {
		case <-time.After(backoff(tries)):
		case <-l.hub.ctx.Done():
			return
		}
		l.reroute()
	}
}

// backoff is the pause before try n: none, then doubling, with jitter, because a
// restarted server is met by all of its clients at once.
func backoff(n int) time.Duration {
	if n == 0 {
		return 0
	}
	d := min(firstRetry<<min(n-1, 16), lastRetry)
	return d/2 + rand.N(d/2)
}

// session runs one connection until it breaks. It returns nil when the link is
// idle and gone from the hub.
func (l *link) session() error {
	ctx := l.hub.ctx
	conn := l.node.SSubscribe(ctx) // dials with the first channel
	defer func() { _ = conn.Close() }()
	l.begin(conn)
	ping := time.NewTicker(l.hub.ping)
	defer ping.Stop()
	broken := make(chan error, 1)
	var (
		reading bool
		retry   <-chan time.Time
		retries int
	)
	for {
		requests, lost := l.take()
		for _, r := range requests {
			if err := r.send(ctx, conn); err != nil {
				return err
			}
			if !reading {
				reading = true
				l.hub.wg.Go(func() { broken <- l.read(conn) })
			}
		}
		if !lost {
			retries = 0
		} else if retry == nil {
			retries++
			retry = time.After(backoff(retries))
		}
		select {
		case <-l.work:
		case <-retry:
			retry = nil
			l.reroute()
		case <-ping.C:
			switch verdict := l.tick(reading); {
			case verdict != nil:
				return verdict
			case l.retire():
				return nil
			case reading:
				if err := conn.Ping(ctx); err != nil {
					return err
				}
			}
		case err := <-broken:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// begin makes conn the link's connection, with everything to be subscribed.
func (l *link) begin(conn *redis.PubSub) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	l.conn, l.drops, l.sent, l.heard, l.alive = conn, nil, nil, true, false
}

// take returns what is to be sent and marks it as sent. lost tells that there are
// topics to be routed again.
func (l *link) take() (requests []request, lost bool) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	// Drops first: a channel in both lists was left, and joined again since.
	for _, channel := range l.drops {
		requests = append(requests, request{"sunsubscribe", channel, nil})
	}
	l.drops = nil
	for t := range l.topics {
		switch t.state {
		case topicNew:
			t.state = topicSent
			requests = append(requests, request{"ssubscribe", t.channel, t})
		case topicLost:
			lost = true
		}
	}
	// Before the sending: the replies may come at once.
	l.sent = append(l.sent, requests...)
	return requests, lost
}

// send writes r: one channel in a command, because a cluster takes no two of
// different slots.
func (r request) send(ctx context.Context, conn *redis.PubSub) error {
	if r.topic == nil {
		return conn.SUnsubscribe(ctx, r.channel)
	}
	return conn.SSubscribe(ctx, r.channel)
}

// tick is called with every ping; its error says that the last one went
// unanswered.
func (l *link) tick(reading bool) error {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	if reading && !l.heard {
		return errSilent
	}
	l.heard = false
	l.idle++
	if len(l.topics) > 0 {
		l.idle = 0
	}
	return nil
}

// retire takes an idle link out of the hub, if it is one.
func (l *link) retire() bool {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	if l.idle < idlePings || len(l.topics) > 0 {
		return false
	}
	delete(l.hub.links, l.node)
	return true
}

// lost is called when the connection is gone. Topics that were confirmed stay,
// to be subscribed again; those that wait for their first confirmation get the
// error, unless the connection had worked: then it is worth another try. It
// returns whether it had worked.
func (l *link) lost(err error) (alive bool) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	alive = l.alive
	l.conn = nil
	waiting := 0
	for t := range l.topics {
		switch {
		case t.isSettled():
			waiting++
			t.state = topicLost
		case alive:
			t.state = topicLost
		default:
			l.hub.fail(t, err)
		}
	}
	if alive && waiting > 0 && !l.hub.lost {
		l.hub.lost = true
		l.hub.log.Warn("lock wake-ups lost their redis connection, waiters poll until it is back",
			slog.Int("keys", waiting), slog.Any("error", err))
	}
	return alive
}

// reroute finds the node of each lost topic, which in a cluster may be another by
// now, and has it subscribed there. What cannot be routed stays lost.
func (l *link) reroute() {
	h := l.hub
	var lost []*topic
	h.mu.Lock()
	for t := range l.topics {
		if t.state == topicLost {
			lost = append(lost, t)
		}
	}
	h.mu.Unlock()
	if h.cluster != nil && len(lost) > 0 {
		h.cluster.ReloadState(h.ctx) // in the background
	}
	for _, t := range lost {
		to, err := h.route(t.channel)
		h.mu.Lock()
		if err == nil && t.link == l && t.state == topicLost {
			h.attach(t, to)
		}
		h.mu.Unlock()
	}
}

// read handles what the server sends until the connection breaks.
func (l *link) read(conn *redis.PubSub) error {
	for {
		message, err := conn.Receive(l.hub.ctx)
		if err := l.handle(conn, message, err); err != nil {
			return err
		}
	}
}

// handle returns an error when conn is of no use any more.
func (l *link) handle(conn *redis.PubSub, message any, err error) error {
	h := l.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.conn != conn {
		return errOutOfOrder
	}
	if err != nil {
		if reply, ok := errors.AsType[redis.Error](err); ok {
			return l.refused(reply)
		}
		return err
	}
	l.heard, l.alive = true, true
	switch m := message.(type) {
	case *redis.Message:
		if t := h.topics[m.Channel]; t != nil {
			t.wake()
		}
	case *redis.Subscription:
		return l.confirmed(m)
	}
	return nil
}

// confirmed takes the reply to a request, or a server's word that a slot has
// moved away: an unsubscription that nobody asked for. The caller holds hub.mu.
func (l *link) confirmed(m *redis.Subscription) error {
	if len(l.sent) > 0 && l.sent[0].kind == m.Kind && l.sent[0].channel == m.Channel {
		t := l.sent[0].topic
		l.sent = l.sent[1:]
		if t != nil && l.hub.lost {
			l.hub.lost = false
			l.hub.log.Info("lock wake-ups have a redis connection again")
		}
		switch {
		case t == nil || t.link != l: // unsubscribed, or left meanwhile
		case t.isSettled():
			// Subscribed again: a release may have gone unheard.
			t.state = topicLive
			t.wake()
		default:
			t.state = topicLive
			close(t.settled)
		}
		return nil
	}
	if m.Kind != "sunsubscribe" {
		return errOutOfOrder
	}
	if t := l.hub.topics[m.Channel]; t != nil && t.link == l && t.state == topicLive {
		t.state = topicLost
		l.poke()
	}
	return nil
}

// refused takes an error reply. Redis answers in order, so it is for the oldest
// request. The caller holds hub.mu.
func (l *link) refused(reply redis.Error) error {
	if len(l.sent) == 0 {
		return reply
	}
	l.heard, l.alive = true, true
	t := l.sent[0].topic
	l.sent = l.sent[1:]
	switch {
	case t == nil || t.link != l:
	case t.isSettled() || l.hub.cluster != nil && redis.HasErrorPrefix(reply, "MOVED"):
		t.state = topicLost
		l.poke()
	default:
		l.hub.fail(t, reply)
	}
	return nil
}
