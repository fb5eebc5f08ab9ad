package etcdstore

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// patience is how long a request may go unanswered before it is sent a
	// second time, which takes it to the next member: one that is frozen or cut
	// off says nothing for minutes. Both may answer, so that a cluster which is
	// only slow answers no later for it; and the time doubles with each
	// delivery, so that it is not pressed. putPatience is the same for the put
	// of an Acquire, where a second delivery costs a move to another lease.
	patience    = 100 * time.Millisecond
	putPatience = time.Second

	// maxPatience is how long the last delivery waits for its answer, and the
	// most that one waits before the next.
	maxPatience = 8 * time.Second

	// maxResends bounds how often a request is sent again. The pauses in
	// between, 50 + 100 + 200 + 6 x 400 ms, are longer than an election.
	maxResends = 9
)

// timing is what a store waits for before it does something by itself. Tests that
// count requests have it wait longer: a server may be slow.
type timing struct {
	patience, putPatience, tryPatience, shortElection time.Duration
}

var defaultTiming = timing{patience, putPatience, tryPatience, shortElection}

var (
	errTooManyTries = errors.New("tried too often")
	errSilent       = errors.New("no answer")
)

// resend calls f, which sends a request, again while etcd is unavailable, and
// beside itself while etcd is silent; it returns the first answer. It is for
// requests that do no harm when they are delivered twice. sent counts the
// deliveries that etcd has executed, or may yet: it is 0 when it certainly
// refused.
func resend[T any](ctx context.Context, s *Store, patience time.Duration, f func(context.Context) (T, error)) (v T, sent int, err error) {
	for {
		d := deliveries[T]{s: s, send: f, patience: patience}
		var n int
		v, n, err = d.first(ctx)
		switch {
		case err == nil:
			return v, sent + n, nil
		case isRefusal(err):
			return v, sent + n - 1, err
		}
		sent += n
		if !isTransient(err) || pause(ctx, sent) != nil {
			return v, sent, err
		}
	}
}

// deliveries are deliveries of one request that are on their way together.
type deliveries[T any] struct {
	s    *Store
	send func(context.Context) (T, error)

	mu       sync.Mutex
	patience time.Duration // before the next one
	timer    *time.Timer   // that sends the next one
	n        int           // sent
	ended    bool
	v        T // the answer to another one than the first
	err      error
	cancel   context.CancelFunc // of all
}

// first sends the first one on the caller's goroutine, which costs least as
// nearly always it is the only one, and returns the first answer to any.
func (d *deliveries[T]) first(ctx context.Context) (v T, n int, err error) {
	ctx, d.cancel = context.WithCancel(ctx)
	defer d.cancel()
	d.mu.Lock()
	d.n = 1
	d.timer = time.AfterFunc(d.patience, func() { d.next(ctx) })
	d.mu.Unlock()
	v, err = d.send(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return d.v, d.n, d.err
	}
	d.ended = true
	d.timer.Stop()
	return v, d.n, err
}

// next sends another one, or gives up.
func (d *deliveries[T]) next(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.ended || ctx.Err() != nil:
		return
	case d.n > maxResends:
		// And not the error of a context that the caller does not know.
		d.endLocked(d.v, errSilent)
		return
	}
	if !d.s.spawn(func() {
		// Close waits for this goroutine.
		defer context.AfterFunc(d.s.ctx, func() { d.end(*new(T), ErrClosed) })()
		v, err := d.send(ctx)
		if err != nil && !isRefusal(err) {
			return // the others may fare better
		}
		d.end(v, err)
	}) {
		d.endLocked(d.v, ErrClosed)
		return
	}
	d.n++
	d.patience = min(2*d.patience, maxPatience)
	if d.n > maxResends {
		d.patience = maxPatience
	}
	d.timer.Reset(d.patience)
}

// end ends the deliveries, unless they have ended.
func (d *deliveries[T]) end(v T, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.ended {
		d.endLocked(v, err)
	}
}

func (d *deliveries[T]) endLocked(v T, err error) {
	d.ended, d.v, d.err = true, v, err
	d.timer.Stop()
	d.cancel()
}

// pause sleeps before a request is sent for the n-th time again, not at all for
// n = 0. It returns an error if sending makes no sense any more.
func pause(ctx context.Context, n int) error {
	switch {
	case n > maxResends:
		return errTooManyTries
	case n == 0 || ctx.Err() != nil:
		return ctx.Err()
	}
	timer := time.NewTimer(min(25*time.Millisecond<<n, 400*time.Millisecond))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
