package core

import (
	"context"
	"reflect"
	"sync"
)

// Lease is a lease that [Strategy.Acquire] took. It is renewed in the
// background until Release; whoever forgets that holds the key until the
// process ends. All methods are safe for concurrent use, and on a nil or zero
// Lease, which is a released one.
type Lease struct {
	h    *hold
	once sync.Once
	err  error
}

func (l *Lease) hold() *hold {
	if l == nil {
		return nil
	}
	return l.h
}

// Key returns the locked key.
func (l *Lease) Key() string {
	if h := l.hold(); h != nil {
		return h.key
	}
	return ""
}

// Token returns the fencing token, to be handed to the resource that the key
// protects; see [TokenFor]. 0 for a zero Lease.
func (l *Lease) Token() int64 {
	if h := l.hold(); h != nil {
		return h.token
	}
	return 0
}

// Done returns a channel that is closed when the lease is lost or released.
func (l *Lease) Done() <-chan struct{} {
	if h := l.hold(); h != nil {
		return h.ctx.Done()
	}
	return closedChan()
}

// Err returns nil while the lease is held, then a [*LostError] if it was lost
// or [ErrReleased] if it was released. It does not ask the store.
func (l *Lease) Err() error {
	h := l.hold()
	if h == nil {
		return ErrReleased
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.errLocked()
}

// Context returns a child of parent for work under the lease: it carries the
// token, and is cancelled, with Err as its cause, when the lease is lost or
// released. As long as both live the same parent gets the same child, so that
// Context may be called for each piece of work.
func (l *Lease) Context(parent context.Context) context.Context {
	h := l.hold()
	if h == nil {
		ctx, cancel := context.WithCancelCause(parent)
		cancel(ErrReleased)
		return ctx
	}
	// Not under the mutex: parent may be anybody's implementation.
	ctx, cancel := context.WithCancelCause(parent)
	child := &lockCtx{Context: ctx, h: h, outer: lockOf(parent)}
	var key any = child
	if reflect.ValueOf(parent).Comparable() {
		key = parent
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.errLocked(); err != nil {
		cancel(err)
		return child
	}
	if same, ok := h.children[key]; ok {
		cancel(nil)
		return same.ctx
	}
	if h.children == nil {
		h.children = make(map[any]leaseChild)
	}
	h.children[key] = leaseChild{child, cancel}
	context.AfterFunc(ctx, func() { // parent ended: a long lease must not collect its children
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.children, key)
	})
	return child
}

// leaseChild is what [Lease.Context] has returned.
type leaseChild struct {
	ctx    *lockCtx
	cancel context.CancelCauseFunc
}

// Release ends the lease. It returns nil if the lease was held to the end, a
// [*LostError] if it was lost before, and a [*StoreError] if the store failed,
// in which case the key stays locked until the ttl is over. Further calls
// return what the first one did.
//
// It takes no context, so that it can be deferred: it runs on the values of the
// one that the lease was acquired with, and takes at most the ttl or 5 s,
// whichever is less.
func (l *Lease) Release() error {
	h := l.hold()
	if h == nil {
		return nil
	}
	l.once.Do(func() {
		loss, err := h.end()
		if loss != nil {
			err = loss
		}
		l.err = err
	})
	h.callHooks()
	return l.err
}

func closedChan() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}
