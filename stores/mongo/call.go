package mongostore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// await runs call, and returns what it returns, or the error of ctx as soon as
// that ends, because the driver may take longer: it dials, authenticates and
// writes on connections whose other end is silent. A call that is left behind
// has an ended ctx, and ends with the client's own timeouts.
func await[T any](ctx context.Context, w *workers, call func(context.Context) (T, error)) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, fmt.Errorf("mongo: %w", err)
	}
	inner := withoutSession{ctx}
	if ctx.Done() == nil {
		return call(inner)
	}
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1)
	w.run(func() {
		value, err := call(inner)
		answers <- answer{value, err}
	})
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
		return none, fmt.Errorf("mongo: %w", ctx.Err())
	}
}

// workerIdle is how long a goroutine waits for another call before it ends.
const workerIdle = time.Second

// workers run calls on goroutines that wait a while for the next one. The driver
// needs deep stacks, and growing that of a new goroutine for every call was a
// seventh of the client's work, measured by its profile.
type workers struct {
	jobs   chan func() // unbuffered: who sends has found one that waits
	closed chan struct{}
	once   sync.Once
}

func newWorkers() *workers { return &workers{jobs: make(chan func()), closed: make(chan struct{})} }

func (w *workers) run(job func()) {
	select {
	case w.jobs <- job:
	default:
		go w.work(job)
	}
}

func (w *workers) work(job func()) {
	idle := time.NewTimer(workerIdle)
	defer idle.Stop()
	for {
		job()
		idle.Reset(workerIdle)
		select {
		case job = <-w.jobs:
		case <-idle.C:
			return
		case <-w.closed:
			return
		}
	}
}

// close ends those that wait; those in a call end after it. Calls that come
// later get goroutines of their own.
func (w *workers) close() { w.once.Do(func() { close(w.closed) }) }

// withoutSession hides a session of the driver that the caller's context may
// carry. In a transaction of the caller a lease would be seen by nobody before
// the commit, and vanish with an abort. All other values stay visible, for
// those who trace commands.
type withoutSession struct{ context.Context }

func (c withoutSession) Value(key any) any {
	v := c.Context.Value(key)
	if _, ok := v.(*mongo.Session); ok {
		return nil
	}
	return v
}

// wrap is for what the driver returns. owner, if not "", is kept out of the text.
func wrap(ctx context.Context, owner string, err error) error {
	if err == nil {
		return nil
	}
	// A short one is no secret, and may be part of any word.
	if len(owner) >= 8 && strings.Contains(err.Error(), owner) {
		err = &redacted{err, owner}
	}
	switch ended := ctx.Err(); {
	case ended == nil:
		// The server watches the deadline as well (maxTimeMS), and may be the
		// first to see that it has passed.
		if _, ok := ctx.Deadline(); ok && mongo.IsTimeout(err) {
			ended = context.DeadlineExceeded
			if !errors.Is(err, ended) {
				return fmt.Errorf("mongo: %w: %w", ended, err)
			}
		}
	case !errors.Is(err, ended):
		return fmt.Errorf("mongo: %w: %w", ended, err)
	}
	return fmt.Errorf("mongo: %w", err)
}

// redacted is an error of the server that quotes the command. The owner is a
// secret: whoever knows it can release the lease.
type redacted struct {
	err   error
	owner string
}

func (e *redacted) Error() string { return strings.ReplaceAll(e.err.Error(), e.owner, "…") }
func (e *redacted) Unwrap() error { return e.err }
