// Package await makes calls of client libraries come back when their context
// ends. A library may look at a context between two tries only, or dial,
// authenticate and write without it.
package await

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"
)

// Idle is how long a goroutine waits for another call before it ends.
const Idle = time.Second

// ErrNoResult is what [Call] returns when the goroutine of a call ended without
// returning, by [runtime.Goexit] in a hook of the library, say.
var ErrNoResult = errors.New("the client's call ended without a result")

// PanicError is what [Call] panics with when fn panicked on another goroutine.
type PanicError struct {
	Value any    // what fn panicked with
	Stack []byte // of fn's goroutine: that of the panic shows only the caller
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("%v\n\nin a call on another goroutine:\n%s", e.Value, e.Stack)
}

// Unwrap lets errors.Is and errors.As reach a value that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Workers run calls on goroutines that wait a while for the next one. Libraries
// need deep stacks, and growing that of a new goroutine for every call was a
// seventh of the client's work with MongoDB, and 2 of the 5 µs that the
// goroutine costs with Redis, both measured by profiles.
//
// Workers are safe for concurrent use; make them with [New].
type Workers struct {
	backend string
	inline  bool
	jobs    chan job // unbuffered: who sends has found one that waits
	closed  chan struct{}
	once    sync.Once
}

type job interface{ run() }

// New returns workers without a goroutine. backend, "redis" say, begins the text
// of their errors.
func New(backend string) *Workers {
	return &Workers{backend: backend, jobs: make(chan job), closed: make(chan struct{})}
}

// Inline returns workers that run every call on its caller's goroutine, for a
// library whose calls come back by themselves as soon as their context ends.
// With PostgreSQL another goroutine cost 4 to 12 % of an acquisition and a
// release on a busy machine.
func Inline(backend string) *Workers {
	w := New(backend)
	w.inline = true
	return w
}

// Close ends the goroutines that wait; those in a call end after it. Calls that
// come later get goroutines of their own.
func (w *Workers) Close() { w.once.Do(func() { close(w.closed) }) }

// Call runs fn on a goroutine of w and returns what it returns, or an error that
// wraps that of ctx as soon as ctx ends. An fn that is left behind so must end
// by itself, sooner or later. Without a ctx that can end fn runs on the caller's
// goroutine; with one that has ended it does not run.
//
// A panic of fn, in a hook of the library, say, becomes one of Call, with a
// [*PanicError] if fn ran on another goroutine. If Call has returned by then, it
// is dropped as a result would be: nobody could recover it any more, and it would
// end the process. The caller has been told that the outcome is unknown.
func Call[T any](ctx context.Context, w *Workers, fn func() (T, error)) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, w.ended(err)
	}
	if w.inline || ctx.Done() == nil {
		return fn()
	}
	c := &call[T]{fn: fn, err: ErrNoResult, done: make(chan struct{})}
	select {
	case w.jobs <- c:
	default:
		go w.work(c)
	}
	select {
	case <-c.done:
		return c.result()
	case <-ctx.Done():
	}
	// An answer that is there already is better than an unknown outcome.
	select {
	case <-c.done:
		return c.result()
	default:
		return none, w.ended(ctx.Err())
	}
}

func (w *Workers) ended(err error) error { return fmt.Errorf("%s: %w", w.backend, err) }

// call is one run of fn. The results may be read when done is closed.
type call[T any] struct {
	fn    func() (T, error)
	done  chan struct{}
	value T
	err   error
}

func (c *call[T]) run() {
	returned := false
	defer func() {
		if !returned { // recover alone would be 25 ns of 650
			if p := recover(); p != nil {
				c.err = &PanicError{p, debug.Stack()}
			}
		}
		close(c.done) // also when fn ends its goroutine
	}()
	c.value, c.err = c.fn()
	returned = true
}

// result is for the caller's goroutine, where a panic belongs.
func (c *call[T]) result() (T, error) {
	if p, ok := errors.AsType[*PanicError](c.err); ok {
		panic(p)
	}
	return c.value, c.err
}

func (w *Workers) work(j job) {
	idle := time.NewTimer(Idle)
	defer idle.Stop()
	for {
		j.run()
		idle.Reset(Idle)
		select {
		case j = <-w.jobs:
		case <-idle.C:
			return
		case <-w.closed:
			return
		}
	}
}
