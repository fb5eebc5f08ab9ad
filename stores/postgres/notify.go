package pgstore

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/await"
)

const (
	// markFor is how long a mark lets releases notify; listeners renew it when
	// less than markLeft remains, so that a key which is waited for costs a
	// write in 30 s.
	markFor  = 60 * time.Second
	markLeft = 30 * time.Second
	// tick is how often a listener looks whether its connection is alive and
	// its marks are fresh.
	tick = 5 * time.Second
	// linger is how long the connection stays open when nobody waits. Opening
	// one costs the server a process.
	linger = 10 * time.Second
	// dialTimeout bounds the opening of the connection, and everything that is
	// done on it.
	dialTimeout = 10 * time.Second
	// echoTimeout is how long a pooler may take to pass a notification on.
	echoTimeout = 2 * time.Second
	// retryMost is the longest pause between two attempts to connect. The first
	// is retryFirst, and they double. A connection that lasts no longer counts
	// as a failed attempt.
	retryFirst = 100 * time.Millisecond
	retryMost  = 5 * time.Second
)

// Why a subscription is refused.
var (
	errClosed = errors.New("the store is closed")
	errPooler = errors.New("a pooler keeps notifications from the connection that listens")
)

// channel is the name that releases notify: one for a table, for a LISTEN for
// every key would cost a round trip a wait. The table's name is hashed because
// channels have at most 63 bytes.
func (o Options) channel() string {
	sum := sha256.Sum256([]byte(o.table()))
	return "leasekit_" + hex.EncodeToString(sum[:16])
}

// Subscribe implements [core.Notifier]. All subscriptions of a store share one
// connection, which [New] describes. If it breaks it is opened again, and every
// subscription gets a signal, because releases may have gone unnoticed. While
// that fails it is tried again after pauses of 0.1 to 5 s, in which Subscribe
// returns the last error.
//
// The key's row is marked as waited for, so that its releases notify: one
// write in 30 s, however many wait.
//
// A pooler in transaction mode cannot pass notifications on. The store finds
// out, and from then on returns closed channels; see [Options.Listen].
func (s *Store) Subscribe(ctx context.Context, key string) (signals <-chan struct{}, stop func(), err error) {
	if err := core.CheckKey(key); err != nil {
		return nil, nil, err
	}
	if ctx.Err() != nil {
		return nil, nil, ended(ctx, nil)
	}
	return s.listener.subscribe(ctx, string(s.key(key)))
}

// listener owns the connection for LISTEN and what waits on it.
type listener struct {
	store *Store

	mu      sync.Mutex
	topics  map[string]*topic // by primary key
	attempt *attempt          // to connect, the latest; nil while run does not run
	cancel  context.CancelFunc
	runs    sync.WaitGroup
	pooled  bool // notifications do not come through
	failed  bool // to connect, or to stay connected, and nothing was fine since
	closed  bool
	idle    time.Time // when the last subscription was stopped

	// failures is how often that failed in a row. It is run's, of which there is
	// one at a time, and outlives it: else each waiter who comes, is refused and
	// polls would be an attempt without a pause.
	failures int
}

// topic is a key that somebody waits for.
type topic struct {
	subs   map[*subscription]struct{}
	marked bool // the row was seen marked; the listener keeps it so
}

type subscription struct{ signals chan struct{} }

// attempt is one try to connect. err, explained, is valid when done is closed.
type attempt struct {
	done chan struct{}
	err  error
}

func newAttempt() *attempt { return &attempt{done: make(chan struct{})} }

func (l *listener) init(s *Store) {
	l.store = s
	l.topics = make(map[string]*topic)
}

func (l *listener) subscribe(ctx context.Context, key string) (<-chan struct{}, func(), error) {
	l.mu.Lock()
	switch {
	case l.closed:
		l.mu.Unlock()
		return nil, nil, fmt.Errorf("postgres: %w", errClosed)
	case l.pooled:
		l.mu.Unlock()
		signals := make(chan struct{})
		close(signals)
		return signals, func() {}, nil
	}
	if l.attempt == nil {
		at := newAttempt()
		ctx, cancel := context.WithCancel(context.Background())
		l.attempt, l.cancel = at, cancel
		l.runs.Go(func() {
			defer cancel()
			l.run(ctx, at)
		})
	}
	at := l.attempt
	sub := &subscription{signals: make(chan struct{}, 1)}
	t := l.topics[key]
	if t == nil {
		t = &topic{subs: make(map[*subscription]struct{})}
		l.topics[key] = t
	}
	t.subs[sub] = struct{}{}
	marked := t.marked
	l.mu.Unlock()

	stop := func() { l.stop(key, t, sub) }
	select {
	case <-at.done:
	case <-ctx.Done():
		stop()
		return nil, nil, ended(ctx, nil)
	}
	switch {
	case errors.Is(at.err, errPooler):
		return sub.signals, stop, nil // closed by now
	case at.err != nil:
		stop()
		return nil, nil, at.err
	case marked:
		return sub.signals, stop, nil
	}

	// The connection listens, so a release that sees the mark is heard.
	_, err := await.Call(ctx, l.store.workers, func() (struct{}, error) {
		for n := 1; ; n++ {
			var ready int64
			err := l.store.query(ctx, l.store.sql.Load().mark, markArgs([]byte(key)), func(row pgx.Rows) error {
				return row.Scan(&ready)
			})
			if err != nil || ready > 0 {
				return struct{}{}, err
			}
			// Somebody has locked the row: for an instant, or until a
			// transaction of the user's ends.
			select {
			case <-time.After(pause(n)):
			case <-ctx.Done():
				return struct{}{}, ended(ctx, nil)
			}
		}
	})
	if err != nil {
		stop()
		return nil, nil, err
	}
	l.mu.Lock()
	t.marked = true
	l.mu.Unlock()
	return sub.signals, stop, nil
}

// markArgs are the arguments of mark.sql.
func markArgs(keys ...[]byte) []any {
	return []any{keys, micros(markFor), micros(markLeft)}
}

// stop ends a subscription. It does nothing the second time.
func (l *listener) stop(key string, t *topic, sub *subscription) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(t.subs, sub)
	if len(t.subs) == 0 && l.topics[key] == t {
		delete(l.topics, key)
		l.idle = time.Now()
	}
}

// signal wakes the subscriptions of key.
func (l *listener) signal(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := l.topics[key]; t != nil {
		t.wake()
	}
}

// wakeAll wakes every subscription.
func (l *listener) wakeAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.topics {
		t.wake()
	}
}

// wake leaves a signal to each subscription that has none unread.
func (t *topic) wake() {
	for sub := range t.subs {
		select {
		case sub.signals <- struct{}{}:
		default:
		}
	}
}

// run keeps a connection open while somebody waits. ctx ends when the store is
// closed.
func (l *listener) run(ctx context.Context, at *attempt) {
	for ; at != nil; at = l.next() {
		conn, err := l.connect(ctx)
		l.report(at, err)
		if err == nil {
			began := time.Now()
			err = l.serve(ctx, conn)
			lasted := time.Since(began)
			l.disconnect(conn)
			if err == nil || lasted > retryMost {
				l.failures = 0
				continue
			}
			// A connection that breaks as soon as there is one is no success, and
			// whoever subscribes in the pause has to know.
			l.report(l.again(), err)
		}
		timer := time.NewTimer(min(retryFirst<<min(l.failures, 10), retryMost))
		l.failures++
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// report tells those who wait for a connection how it went.
func (l *listener) report(at *attempt, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	log := l.store.o.Logger
	if err != nil {
		err = l.store.o.explain(err)
	}
	switch {
	case l.closed:
		err = fmt.Errorf("postgres: %w", errClosed)
	case errors.Is(err, errPooler):
		log.Warn("leasekit: waiters poll from now on, see pgstore.Options.Listen", "table", l.store.o.table(), "error", err)
		l.pooled = true
		l.hangUp()
	case err != nil && !l.failed:
		log.Warn("leasekit: waiters poll until there is a connection for LISTEN again", "table", l.store.o.table(), "error", err)
		l.failed = true
	}
	at.err = err
	close(at.done)
}

// fine is called when the connection has lasted for a tick: one that breaks
// again and again is not worth two lines in the log each time.
func (l *listener) fine() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed && !l.closed {
		l.store.o.Logger.Info("leasekit: waiters are woken again", "table", l.store.o.table())
		l.failed = false
	}
}

// again replaces an attempt that has been reported.
func (l *listener) again() *attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attempt = newAttempt()
	return l.attempt
}

// next returns the attempt to connect that is to follow, nil if there is no
// need of one. It decides in the same moment in which a subscription would see
// that run has ended, and start it again.
func (l *listener) next() *attempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attempt = nil
	if l.closed {
		l.hangUp()
	}
	if len(l.topics) > 0 {
		l.attempt = newAttempt()
	}
	return l.attempt
}

// hangUp closes all channels: no signals will come any more. l.mu is held.
func (l *listener) hangUp() {
	for key, t := range l.topics {
		for sub := range t.subs {
			close(sub.signals)
		}
		clear(t.subs)
		delete(l.topics, key)
	}
}

// connect opens the connection, and returns when it listens, and has renewed the
// marks: one that may not do so, or not in this database, would be closed and
// opened without end.
func (l *listener) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := l.dial(ctx)
	if err != nil {
		return nil, err
	}
	err = l.listen(ctx, conn)
	if err == nil {
		if err = l.refresh(ctx, conn); err != nil {
			err = fmt.Errorf("the connection for LISTEN, see pgstore.Options.Listen: %w", err)
		}
	}
	if err != nil {
		l.disconnect(conn)
		return nil, err
	}
	return conn, nil
}

// dial opens a connection as the pool would.
func (l *listener) dial(ctx context.Context) (*pgx.Conn, error) {
	if l.store.o.Listen != nil {
		return l.store.o.Listen(ctx)
	}
	db := l.store.db
	if c, ok := db.(configured); ok {
		config := c.Config()
		config.ConnConfig.OnNotification = nil // WaitForNotification would see none
		if config.BeforeConnect != nil {
			if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
				return nil, err
			}
		}
		conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
		if err == nil && config.AfterConnect != nil {
			if err = config.AfterConnect(ctx, conn); err != nil {
				l.disconnect(conn)
			}
		}
		return conn, err
	}
	pooled, err := db.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	config := pooled.Conn().Config()
	pooled.Release()
	config.OnNotification = nil
	return pgx.ConnectConfig(ctx, config)
}

// listen sends LISTEN, and makes sure that notifications come through.
func (l *listener) listen(ctx context.Context, conn *pgx.Conn) error {
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{l.store.channel}.Sanitize(), exec); err != nil {
		return err
	}
	var pid uint32
	if err := conn.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid()", exec).Scan(&pid); err != nil {
		return err
	}
	if pid == conn.PgConn().PID() {
		return nil
	}
	// Between us and the server is somebody who makes up process ids: a pooler.
	// In session mode it passes notifications on, in transaction mode it cannot.
	// Send one to ourselves, from another connection, to see; and another one,
	// because this process may have stood still.
	err := l.echo(ctx, conn, echoTimeout/2)
	if errors.Is(err, errPooler) {
		err = l.echo(ctx, conn, echoTimeout)
	}
	return err
}

// echo sends a notification and waits until conn hears it. It returns errPooler
// if that takes too long.
func (l *listener) echo(ctx context.Context, conn *pgx.Conn, timeout time.Duration) error {
	echo := "echo " + rand.Text()
	if _, err := l.store.exec(ctx, "SELECT pg_catalog.pg_notify($1::pg_catalog.text, $2::pg_catalog.text)", l.store.channel, echo); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(wait)
		switch {
		case err == nil && n.Payload == echo:
			return nil
		case err == nil: // a release; nobody is subscribed before the end of connect
		case ctx.Err() == nil && wait.Err() != nil:
			return errPooler
		default:
			return err
		}
	}
}

// disconnect closes conn, in time.
func (l *listener) disconnect(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // it is of no use any more, whatever close says
}

// serve reads notifications until the connection breaks, which is an error, ctx
// ends, or nobody has waited for a while.
func (l *listener) serve(ctx context.Context, conn *pgx.Conn) error {
	// While there was no connection releases may have gone unnoticed.
	l.wakeAll()
	for ctx.Err() == nil && !l.unused() {
		if err := l.read(ctx, conn); err != nil {
			return err
		}
		l.fine()
		if err := l.refresh(ctx, conn); err != nil {
			return err
		}
	}
	return nil
}

// unused reports whether nobody has waited for as long as the connection
// lingers.
func (l *listener) unused() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.topics) == 0 && time.Since(l.idle) >= linger
}

// refreshKeys is the number of keys that are marked in one statement: half a
// megabyte of the longest ones.
const refreshKeys = 1000

// refresh renews the marks that run out. Without a key the statement is sent as
// well: it shows whether the connection is alive, and may write.
func (l *listener) refresh(ctx context.Context, conn *pgx.Conn) error {
	keys := [][]byte{}
	l.mu.Lock()
	for key, t := range l.topics {
		if t.marked { // else its first subscription is about to do it
			keys = append(keys, []byte(key))
		}
	}
	l.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	for more := true; more; more = len(keys) > 0 {
		some := keys[:min(len(keys), refreshKeys)]
		keys = keys[len(some):]
		// That some rows are locked at the moment, or under SERIALIZABLE were
		// written by others, does not matter: there are several ticks in
		// markLeft.
		_, err := conn.Exec(ctx, l.store.sql.Load().mark, append([]any{exec}, markArgs(some...)...)...)
		if code := sqlState(err); err != nil && code != codeSerialization && code != codeDeadlock {
			return err
		}
	}
	return nil
}

// read passes notifications on for the length of a tick.
func (l *listener) read(ctx context.Context, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, tick)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			if ctx.Err() != nil && !conn.IsClosed() {
				return nil
			}
			return err
		}
		// What is not hexadecimal is the echo that another store waits for.
		if key, err := hex.DecodeString(n.Payload); err == nil {
			l.signal(string(key))
		}
	}
}

// close ends run and all subscriptions.
func (l *listener) close() {
	l.mu.Lock()
	l.closed = true
	if l.cancel != nil {
		l.cancel()
	}
	l.mu.Unlock()
	l.runs.Wait()
}
