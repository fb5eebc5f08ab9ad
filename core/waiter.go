package core

import (
	"container/list"
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// subscribeBound is how long a subscription may take until it is given up. The
// waiter polls meanwhile.
const subscribeBound = 5 * time.Second

// resubscribeSleeps is after how many more sleeps a waiter whose subscription
// failed asks for another, so that one that came while the server was restarting
// is woken by the release after all: ten, about as many seconds.
const resubscribeSleeps = 10

var errSubscribeHangs = fmt.Errorf("no answer in %v", subscribeBound)

// waiter is how one call waits between its tries: for a signal, the end of the
// present lease, or the next poll, whichever comes first.
type waiter struct {
	a       attempt       // as it was when the waiting began
	place   *list.Element // in the line for the key
	turn    chan struct{} // gets a value when the waiter is called
	sleeps  int
	timer   *time.Timer
	signals <-chan struct{}     // nil: none to be had, poll
	pending <-chan subscription // nil: not subscribing
	overdue <-chan struct{}     // closed when what is pending has taken too long
	done    <-chan struct{}     // closed when the last Subscribe has returned
	hears   atomic.Bool         // there are signals to be had, for the line to know
	stopSub func()
	cancel  context.CancelFunc
	failed  int // the sleep in which a subscription failed, 0 if the last did not
}

type subscription struct {
	signals <-chan struct{}
	stop    func()
	err     error
}

// wait puts the caller in line, and subscribes if the store can give signals.
func (a *attempt) wait() *waiter {
	w := &waiter{a: *a}
	a.s.lines.join(a.key, w)
	if a.s.notifier != nil {
		w.subscribe()
	}
	return w
}

// subscribe begins to ask the store for signals. A store that hangs delays
// nobody: sleep takes the subscription up when it comes.
func (w *waiter) subscribe() {
	a := &w.a
	ctx, cancel := context.WithTimeout(a.ctx, subscribeBound)
	pending, done := make(chan subscription), make(chan struct{})
	w.cancel, w.pending, w.overdue, w.done = cancel, pending, ctx.Done(), done
	notifier, key := a.s.notifier, a.key
	go func() {
		defer close(done)
		signals, stop, err := notifier.Subscribe(ctx, key)
		select {
		case pending <- subscription{signals, stop, err}:
		case <-ctx.Done(): // the waiter has gone, or has given up
			if err == nil {
				stop()
			}
		}
	}()
}

// subscribeFailed leaves the waiter with polls, for now.
func (w *waiter) subscribeFailed(err error) {
	w.cancel()
	w.failed = w.sleeps
	w.a.s.subscribed(w.a.key, err)
}

// sleep returns when it is time for another try, or when the caller's context
// ends. left is how long the present lease still lives (0: not known), remaining
// how much waiting time there is.
func (w *waiter) sleep(left, remaining time.Duration) {
	a := &w.a
	w.sleeps++
	if w.failed > 0 && w.sleeps-w.failed >= resubscribeSleeps {
		select {
		case <-w.done:
			w.failed = 0
			w.subscribe()
		default: // one hanging call is enough
		}
	}
	if !a.s.lines.isFirst(a.key, w) {
		left = 0 // the end of the lease is for the first to watch
	}
	d := min(pollDelay(w.sleeps, left), remaining)
	if w.timer == nil {
		w.timer = time.NewTimer(d)
	} else {
		w.timer.Reset(d)
	}
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-w.timer.C:
			return
		case sub := <-w.pending:
			w.pending, w.overdue = nil, nil
			if sub.err == nil {
				w.signals, w.stopSub = sub.signals, sub.stop
				w.hears.Store(true)
			}
			if a.ctx.Err() != nil {
				return
			}
			if sub.err != nil {
				w.subscribeFailed(sub.err)
				continue
			}
			a.s.subscribed(a.key, nil)
			// A release between the failed try and the subscription gave no
			// signal: look again at once. This was no sleep.
			w.sleeps--
			return
		case <-w.overdue:
			w.pending, w.overdue = nil, nil
			if a.ctx.Err() != nil {
				return
			}
			w.subscribeFailed(errSubscribeHangs)
		case _, ok := <-w.signals:
			if !ok {
				w.signals = nil // no more signals: poll
				w.hears.Store(false)
				continue
			}
			if a.s.lines.signalled(a.key, w) {
				return
			}
		case <-w.turn:
			return
		}
	}
}

// stop leaves the line and ends the subscription, also one that is still on its
// way. A nil waiter has not begun to wait.
func (w *waiter) stop(acquired bool) {
	if w == nil {
		return
	}
	w.a.s.lines.leave(w.a.key, w, acquired)
	if w.cancel != nil {
		w.cancel()
	}
	if w.stopSub != nil {
		w.stopSub()
	}
	if w.timer != nil {
		w.timer.Stop()
	}
}

// subscribed logs that subscriptions have begun to fail. The waiters of a store
// that cannot subscribe at all would otherwise log a line each.
func (s *Strategy) subscribed(key string, err error) {
	s.subscribing.mu.Lock()
	news := err != nil && !s.subscribing.failed
	s.subscribing.failed = err != nil
	s.subscribing.mu.Unlock()
	if news {
		s.logger().Info("leasekit: the store cannot tell when keys become free: waiters poll",
			slog.String("lock", s.o.Name), slog.String("key", key), slog.Any("error", err))
	}
}
