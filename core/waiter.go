package core

import (
	"container/list"
	"context"
	"fmt"
	"log/slog"
	"time"
)

// subscribeBound is how long a subscription may take until it is given up. The
// waiter polls meanwhile.
const subscribeBound = 5 * time.Second

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
	stopSub func()
	cancel  context.CancelFunc
}

type subscription struct {
	signals <-chan struct{}
	stop    func()
	err     error
}

// wait puts the caller in line, and begins to ask the store for signals, if it
// can give any. A store that hangs delays nobody: sleep takes the subscription
// up when it comes.
func (a *attempt) wait() *waiter {
	w := &waiter{a: *a}
	a.s.lines.join(a.key, w)
	if a.s.notifier == nil {
		return w
	}
	ctx, cancel := context.WithTimeout(a.ctx, subscribeBound)
	pending := make(chan subscription)
	w.cancel, w.pending, w.overdue = cancel, pending, ctx.Done()
	notifier, key := a.s.notifier, a.key
	go func() {
		signals, stop, err := notifier.Subscribe(ctx, key)
		select {
		case pending <- subscription{signals, stop, err}:
		case <-ctx.Done(): // the waiter has gone, or has given up
			if err == nil {
				stop()
			}
		}
	}()
	return w
}

// sleep returns when it is time for another try, or when the caller's context
// ends. left is how long the present lease still lives (0: not known), remaining
// how much waiting time there is.
func (w *waiter) sleep(left, remaining time.Duration) {
	a := &w.a
	w.sleeps++
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
			}
			if a.ctx.Err() != nil {
				return
			}
			a.s.subscribed(a.key, sub.err)
			if sub.err == nil {
				// A release between the failed try and the subscription gave
				// no signal: look again at once. This was no sleep.
				w.sleeps--
				return
			}
		case <-w.overdue:
			w.pending, w.overdue = nil, nil
			if a.ctx.Err() != nil {
				return
			}
			a.s.subscribed(a.key, errSubscribeHangs)
		case _, ok := <-w.signals:
			if !ok {
				w.signals = nil // no more signals: poll
				continue
			}
			if a.s.lines.isFirst(a.key, w) {
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
