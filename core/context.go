package core

import (
	"context"
	"sync"
	"time"
)

// Token returns the fencing token of the innermost lock that ctx runs under.
// It is false outside of a callback.
//
// Under two locks the innermost need not be the one that protects the resource
// at hand: prefer [TokenFor].
func Token(ctx context.Context) (int64, bool) {
	if l := lockOf(ctx); l != nil {
		return l.h.token, true
	}
	return 0, false
}

// TokenFor returns the fencing token of the lock on key that ctx runs under; of
// the innermost if there are several. Hand it to the resource which key
// protects, for example
//
//	UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2
func TokenFor(ctx context.Context, key string) (int64, bool) {
	for l := lockOf(ctx); l != nil; l = l.outer {
		if l.h.key == key {
			return l.h.token, true
		}
	}
	return 0, false
}

// lockCtx is the context that a callback runs with: a cancel context of the
// standard library's, plus the lock, so that children of it are linked to it
// without a goroutine.
type lockCtx struct {
	context.Context
	h     *hold
	outer *lockCtx
}

type lockCtxKey struct{}

func (c *lockCtx) Value(key any) any {
	if key == (lockCtxKey{}) {
		return c
	}
	return c.Context.Value(key)
}

func lockOf(ctx context.Context) *lockCtx {
	l, _ := ctx.Value(lockCtxKey{}).(*lockCtx)
	return l
}

// boundedCtx ends with its parent or at its deadline, as one of
// [context.WithDeadline] does, but makes no timer before somebody asks for
// Done. A store that never blocks only looks at Err: for the memory store a
// bound on each call costs a fifth of what WithDeadline costs.
type boundedCtx struct {
	parent   context.Context
	deadline time.Time

	mu      sync.Mutex
	looked  bool            // Err was called before
	stopped bool            // while it was not armed
	armed   context.Context // the standard library's, which speaks for b once it is there
	cancel  context.CancelFunc
}

// Deadline implements [context.Context].
func (b *boundedCtx) Deadline() (time.Time, bool) {
	if d, ok := b.parent.Deadline(); ok && d.Before(b.deadline) {
		return d, true
	}
	return b.deadline, true
}

// Done implements [context.Context].
func (b *boundedCtx) Done() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.armLocked().Done()
}

// Err implements [context.Context]. Its first call, by which stores refuse a
// context that has ended before, does not read the clock: the deadline has just
// been set.
func (b *boundedCtx) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.armed != nil:
	case b.stopped:
		return context.Canceled
	case b.parent.Err() != nil: // armed, it keeps error and cause
	case !b.looked:
		b.looked = true
		return nil
	case time.Now().Before(b.deadline):
		return nil
	}
	return b.armLocked().Err()
}

// Value implements [context.Context]. Once armed it answers for the standard
// library's context, so that children are linked to that one directly, and
// [context.Cause] finds its cause.
func (b *boundedCtx) Value(key any) any {
	b.mu.Lock()
	inner := b.parent
	if b.armed != nil || b.stopped {
		inner = b.armLocked()
	}
	b.mu.Unlock()
	return inner.Value(key)
}

func (b *boundedCtx) armLocked() context.Context {
	switch {
	case b.armed != nil:
	case b.stopped: // what its parent does is of no concern any more
		b.armed, b.cancel = context.WithCancel(context.WithoutCancel(b.parent))
		b.cancel()
	default:
		b.armed, b.cancel = context.WithDeadline(b.parent, b.deadline)
	}
	return b.armed
}

// stop ends the context and frees its timer.
func (b *boundedCtx) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.armed != nil {
		b.cancel()
	} else {
		b.stopped = true
	}
}
