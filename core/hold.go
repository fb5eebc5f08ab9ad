package core

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// hold is a lease that was granted: it renews itself, notices its loss, and is
// released in the end.
//
// It is a state machine under one mutex and one timer, whose function runs on a
// goroutine of its own: between renewals a hold costs no goroutine. A renewal
// never runs under the mutex, so that a store that hangs can neither delay the
// loss nor the release.
type hold struct {
	s          *Strategy
	key, owner string
	token      int64
	granted    time.Time
	tries      int
	waited     time.Duration

	detached context.Context // the caller's values, for renewals, release and hooks
	ctx      lockCtx         // what the callback gets
	cancel   context.CancelCauseFunc

	// Bounds of the two calls that every hold makes; two, because a driver may
	// look at a context after the call has returned.
	acquiring, releasing boundedCtx

	mu       sync.Mutex
	state    state
	deadline time.Time // the lease may have ended after this
	timer    *time.Timer
	renewal  struct {
		number   int // of the last one sent
		waiting  bool
		failures int // in a row
		err      error
		cancel   context.CancelFunc
		returned chan struct{} // closed when the present one is back, if not nil
	}
	loss     *LostError
	disowned bool               // the store said that the lease is gone: nothing to release
	children map[any]leaseChild // by parent, or by themselves
	hooks    *hookQueue         // nil: none was called yet
}

// hookQueue keeps the hooks of one hold in order.
type hookQueue struct {
	waiting []func()
	running bool
	idle    *sync.Cond
}

type state uint8

const (
	stateHeld state = iota
	stateLost
	stateReleased
)

var (
	errNotHeld   = errors.New("the store says that it is not held any more")
	errMaxHold   = errors.New("held for Options.MaxHold")
	errUnrenewed = errors.New("no renewal was confirmed in time")
)

// localLife is how long a lease surely lives, counted from before the request
// for it was sent, which is before the server began to count. One percent is
// for clocks that run at different speed (the Redlock algorithm allows the
// same).
func localLife(ttl time.Duration) time.Duration { return ttl - ttl/100 }

// renewDelay is when after the last request the next renewal is due: a third of
// the ttl, less up to a fifth of that, so that holds which began together do
// not renew together.
func renewDelay(ttl time.Duration) time.Duration {
	third := ttl / 3
	return third - rand.N(third/5+1)
}

// start begins the hold of a granted lease.
func (h *hold) start(a *attempt, outer *lockCtx, outlives bool) {
	h.tries, h.waited = a.tries, h.granted.Sub(a.start)
	h.detached = context.WithoutCancel(a.ctx)
	parent := a.ctx
	if outlives {
		parent = h.detached
	}
	ctx, cancel := context.WithCancelCause(parent)
	h.cancel = cancel
	h.ctx = lockCtx{Context: ctx, h: h, outer: outer}
	sent := h.deadline.Add(-localLife(h.s.o.TTL))
	due := sent.Add(renewDelay(h.s.o.TTL))
	h.mu.Lock() // the timer may fire before it is assigned
	h.timer = time.AfterFunc(h.untilLocked(due, h.granted), h.tick)
	h.emitLocked(h.s.o.Hooks.Acquired, "", nil)
	h.mu.Unlock()
}

// run calls fn and ends the hold.
func (h *hold) run(fn func(context.Context) error) (err error) {
	defer func() { // a panic and Goexit come here too
		loss, _ := h.end()
		h.finishHooks()
		if loss != nil && err != nil && err != error(loss) { //nolint:errorlint // the very same value, handed on from context.Cause
			err = &LostError{Key: loss.Key, Token: loss.Token, Reason: loss.Reason, Err: err}
		}
	}()
	if h.s.o.Hooks.Acquired != nil {
		h.callHooks()
	}
	return fn(&h.ctx)
}

// tick is the timer's function.
func (h *hold) tick() {
	h.mu.Lock()
	now := time.Now()
	switch {
	case h.state != stateHeld:
		h.mu.Unlock()
	case h.overdueLocked(now) != nil:
		h.loseLocked(h.overdueLocked(now))
		h.unlockAndCallHooks()
	case h.renewal.waiting:
		// The renewal went unanswered. It may still be answered; it is not
		// waited for any longer.
		h.renewal.cancel()
		h.renewFailedLocked(context.DeadlineExceeded)
		h.unlockAndCallHooks()
	default:
		h.renewLocked(now)
	}
}

// overdueLocked returns why the lease counts as lost at now, nil if it does
// not.
func (h *hold) overdueLocked(now time.Time) error {
	switch {
	case h.s.o.MaxHold > 0 && now.Sub(h.granted) >= h.s.o.MaxHold:
		return errMaxHold
	case now.Before(h.deadline):
		return nil
	case h.renewal.err != nil:
		return fmt.Errorf("%w: %w", errUnrenewed, h.renewal.err)
	default:
		return errUnrenewed
	}
}

// renewLocked sends a renewal, and unlocks meanwhile.
func (h *hold) renewLocked(now time.Time) {
	ttl := h.s.o.TTL
	bound := ttl / 3
	if h.renewal.failures > 0 {
		// Packets are being lost, perhaps. Whatever becomes of this try, there
		// is to be time for another one: a server that was silent for half a
		// ttl is back before the deadline.
		bound = min(bound, h.deadline.Sub(now)/2)
	}
	ctx, cancel := context.WithDeadline(h.detached, now.Add(bound))
	defer cancel()
	h.renewal.number++
	number := h.renewal.number
	h.renewal.waiting = true
	h.renewal.cancel = cancel
	// A store that minds its context answers in time; the timer comes a little
	// later, and speaks for one that does not.
	h.timer.Reset(h.untilLocked(now.Add(bound+min(ttl/12, 50*time.Millisecond)), now))
	h.mu.Unlock()

	renewed, err := h.s.store.Renew(ctx, h.key, h.owner, ttl)

	h.mu.Lock()
	defer h.unlockAndCallHooks()
	if number == h.renewal.number && h.renewal.returned != nil {
		close(h.renewal.returned)
		h.renewal.returned = nil
	}
	current := number == h.renewal.number && h.renewal.waiting
	switch {
	case h.state != stateHeld:
	case err != nil && !current: // given up and reported before
	case err != nil:
		h.renewFailedLocked(err)
	case !renewed:
		h.disowned = true
		h.loseLocked(errNotHeld)
	default:
		// A late yes is a yes: the lease lives from when it was asked for.
		if d := now.Add(localLife(ttl)); d.After(h.deadline) {
			h.deadline = d
		}
		answered := time.Now()
		if reason := h.overdueLocked(answered); reason != nil {
			h.loseLocked(reason)
			return
		}
		h.renewal.failures, h.renewal.err = 0, nil
		if current {
			h.renewal.waiting = false
			due := now.Add(renewDelay(ttl))
			if soonest := answered.Add(ttl / 30); due.Before(soonest) {
				due = soonest // the server is slow: do not press it
			}
			h.timer.Reset(h.untilLocked(due, answered))
		}
		h.emitLocked(h.s.o.Hooks.Renewed, "", nil)
	}
}

// renewFailedLocked plans the next try.
func (h *hold) renewFailedLocked(err error) {
	h.renewal.waiting = false
	h.renewal.failures++
	h.renewal.err = &StoreError{Op: "renew", Key: h.key, Err: err}
	now := time.Now()
	h.timer.Reset(h.untilLocked(now.Add(retryDelay(h.renewal.failures, h.s.o.TTL)), now))
	h.emitLocked(h.s.o.Hooks.RenewFailed, "leasekit: renewal failed, trying again until the lease's deadline", h.renewal.err)
}

// untilLocked is how long the timer has to sleep from now to wake at due, or
// when the lease is overdue if that is sooner.
func (h *hold) untilLocked(due, now time.Time) time.Duration {
	if h.deadline.Before(due) {
		due = h.deadline
	}
	sleep := due.Sub(now)
	if h.s.o.MaxHold > 0 {
		sleep = min(sleep, h.s.o.MaxHold-now.Sub(h.granted))
	}
	return sleep
}

// loseLocked ends the hold because the lease is lost. The callback is cancelled
// first; nothing that is slow may stand in front of that.
func (h *hold) loseLocked(reason error) {
	h.loss = &LostError{Key: h.key, Token: h.token, Reason: reason}
	h.finishLocked(stateLost, h.loss)
	h.emitLocked(h.s.o.Hooks.Lost, "leasekit: lease lost, the callback is cancelled", h.loss)
}

// finishLocked leaves the state held: no renewal is sent from here on.
func (h *hold) finishLocked(state state, cause error) {
	h.state = state
	h.timer.Stop()
	if h.renewal.cancel != nil {
		h.renewal.cancel()
	}
	h.cancel(cause)
	for _, child := range h.children {
		child.cancel(cause)
	}
	h.children = nil
}

// end ends the hold for good, and returns its loss, if it was lost, and the
// error of the release, if that failed. It leaves the hooks to the caller, for
// one of them may be what waits for it.
func (h *hold) end() (*LostError, error) {
	var returned <-chan struct{}
	h.mu.Lock()
	now := time.Now()
	if h.state == stateHeld {
		// A process that was suspended may come here before its timer does.
		if reason := h.overdueLocked(now); reason != nil {
			h.loseLocked(reason)
		} else {
			returned = h.awaitRenewalLocked()
			h.finishLocked(stateReleased, ErrReleased)
		}
	}
	loss, disowned := h.loss, h.disowned
	h.mu.Unlock()
	if disowned {
		return loss, nil
	}
	bound := min(h.s.o.TTL, releaseBound)
	if returned != nil {
		select {
		case <-returned:
		case <-time.After(bound / 2): // the rest is for what follows
		}
	}
	h.releasing = boundedCtx{parent: h.detached, deadline: now.Add(bound)}
	free, err := h.letGo(&h.releasing, loss != nil)
	h.releasing.stop()
	if free {
		h.s.lines.released(h.key)
	}

	h.mu.Lock()
	switch {
	case err == nil:
		h.emitLocked(h.s.o.Hooks.Released, "", nil)
	case errors.Is(err, errNotHeld):
		err = &LostError{Key: h.key, Token: h.token, Reason: err}
		h.emitLocked(h.s.o.Hooks.ReleaseFailed, "leasekit: the lease was lost, the key is not kept for MinHold", err)
	default:
		err = &StoreError{Op: "release", Key: h.key, Err: err}
		h.emitLocked(h.s.o.Hooks.ReleaseFailed, "leasekit: release failed, the key stays locked until its ttl is over", err)
	}
	h.mu.Unlock()
	return loss, err
}

// awaitRenewalLocked returns a channel that is closed when the renewal that is on
// its way is back, or nil if nobody has to wait for it. A release may overtake a
// renewal, which then finds no lease. The last renewal, for MinHold, may not: it
// would be undone by the other, which is of the same owner and has another ttl.
func (h *hold) awaitRenewalLocked() <-chan struct{} {
	if !h.renewal.waiting || h.s.o.MinHold <= time.Since(h.granted) {
		return nil
	}
	h.renewal.cancel = nil // it ends by itself, within ttl/3
	h.renewal.returned = make(chan struct{})
	return h.renewal.returned
}

// letGo releases the lease, or, if it was held for less than MinHold, renews it
// one last time for the remainder. It returns whether the key is free now.
func (h *hold) letGo(ctx context.Context, lost bool) (free bool, err error) {
	if h.s.o.MinHold > 0 && !lost {
		if left := h.s.o.MinHold - time.Since(h.granted); left > 0 {
			renewed, err := h.s.store.Renew(ctx, h.key, h.owner, max(left, MinTTL))
			if err == nil && !renewed {
				err = errNotHeld
			}
			return false, err
		}
	}
	err = h.s.store.Release(ctx, h.key, h.owner)
	return err == nil, err
}

func (h *hold) held() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state == stateHeld
}

// errLocked is nil while the lease is held, then why it is not.
func (h *hold) errLocked() error {
	switch {
	case h.loss != nil:
		return h.loss
	case h.state == stateReleased:
		return ErrReleased
	default:
		return nil
	}
}

// emitLocked queues a hook, unless it is nil, and a warning, unless msg is empty.
func (h *hold) emitLocked(hook hookFunc, msg string, err error) {
	if hook == nil && msg == "" {
		return
	}
	e := Event{Name: h.s.o.Name, Key: h.key, Token: h.token, Tries: h.tries, Waited: h.waited, Held: time.Since(h.granted), Err: err}
	if h.hooks == nil {
		h.hooks = &hookQueue{idle: sync.NewCond(&h.mu)}
	}
	h.hooks.waiting = append(h.hooks.waiting, func() {
		if msg != "" {
			h.s.warn(h.detached, msg, e)
		}
		h.s.call(h.detached, hook, e)
	})
}

// unlockAndCallHooks unlocks and calls the queued hooks, in order, one at a
// time. If another goroutine is calling one already, the queue is left to it:
// waiting here would deadlock a hook that releases its own lease.
func (h *hold) unlockAndCallHooks() {
	q := h.hooks
	if q == nil || q.running || len(q.waiting) == 0 {
		h.mu.Unlock()
		return
	}
	q.running = true
	defer func() { // also when a hook ends its goroutine: others must not wait for it
		q.running = false
		q.idle.Broadcast()
		h.mu.Unlock()
	}()
	for len(q.waiting) > 0 {
		next := q.waiting[0]
		q.waiting = q.waiting[1:]
		h.unlocked(next)
	}
}

func (h *hold) unlocked(f func()) {
	h.mu.Unlock()
	defer h.mu.Lock()
	f()
}

func (h *hold) callHooks() {
	h.mu.Lock()
	h.unlockAndCallHooks()
}

// finishHooks returns when no hook is running or queued any more.
func (h *hold) finishHooks() {
	h.mu.Lock()
	for h.hooks != nil && h.hooks.running {
		h.hooks.idle.Wait()
	}
	h.unlockAndCallHooks()
}
