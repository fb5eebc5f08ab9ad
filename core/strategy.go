package core

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	// DefaultTTL is the length of a lease when Options.TTL is 0.
	DefaultTTL = 30 * time.Second

	// WaitForever as Options.Wait means to wait until the caller's context
	// ends.
	WaitForever time.Duration = -1

	// releaseBound is the longest that a release may take: a server that does
	// not answer must not hold up a caller whose work is done. A lease shorter
	// than that has ended by itself by then.
	releaseBound = 5 * time.Second

	// cleanupPatience is how long a failed acquire waits for the release of
	// what it may have been granted.
	cleanupPatience = time.Second
)

// Options configures a [Strategy]. The zero value is ready to use.
type Options struct {
	// TTL is the length of the lease. It is renewed by a third of that, so it
	// bounds only how long a key stays locked after its holder died. Default
	// 30 s; at least 1 ms.
	TTL time.Duration

	// Wait is how long to wait for a held key. Default 0: one try.
	// [WaitForever] waits until the context ends.
	Wait time.Duration

	// MinHold keeps the key for at least that long after the acquisition, also
	// when the callback ends earlier: a machine whose clock or cron is late
	// then finds a short job's key still held, and does not run it again. The
	// callback's caller does not wait for it: one last renewal, for what is
	// left, takes the place of the release. A renewal that was given up before,
	// on a network that delays it, may undo that: the key is then free, or held,
	// by TTL. Default 0: released at once.
	MinHold time.Duration

	// MaxHold is how long a lease may be held at most. After that it is no
	// longer renewed and counts as lost, so that a hung callback does not hold
	// a key for ever. Default 0: no bound.
	MaxHold time.Duration

	// Name says what the lock is for, in logs and events. Default "Lock".
	Name string

	// Label is put in front of the random owner, so that an operator sees who
	// holds a key: a host name and process id, say. At most [MaxLabelLen]
	// bytes of UTF-8 without NUL. Default none.
	Label string

	// Hooks are called as things happen.
	Hooks Hooks

	// Logger gets warnings: leases lost, renewals and releases failed.
	// Default [slog.Default].
	Logger *slog.Logger
}

func (o *Options) check() error {
	if o.TTL == 0 {
		o.TTL = DefaultTTL
	}
	if o.Name == "" {
		o.Name = "Lock"
	}
	if err := CheckTTL(o.TTL); err != nil {
		return fmt.Errorf("Options.TTL: %w", err)
	}
	switch {
	case o.Wait < 0 && o.Wait != WaitForever:
		return invalid("Options.Wait %v: use 0 for one try, or WaitForever", o.Wait)
	case o.MinHold < 0:
		return invalid("Options.MinHold %v: use 0 for none", o.MinHold)
	case o.MaxHold < 0:
		return invalid("Options.MaxHold %v: use 0 for no bound", o.MaxHold)
	case o.MaxHold > 0 && o.MaxHold < o.MinHold:
		return invalid("Options.MaxHold %v is less than MinHold %v", o.MaxHold, o.MinHold)
	case len(o.Label) > MaxLabelLen:
		return invalid("Options.Label of %d bytes: use at most %d", len(o.Label), MaxLabelLen)
	case strings.IndexByte(o.Label, 0) >= 0 || !utf8.ValidString(o.Label):
		return invalid("Options.Label %q: use UTF-8 without NUL", o.Label)
	}
	return nil
}

// Strategy runs callbacks only while it holds a lease on a key. It is safe for
// concurrent use; make one for each kind of work and keep it.
type Strategy struct {
	store    LockStore
	identity any      // what two strategies on the same store have in common
	notifier Notifier // nil: poll
	o        Options
	lines    lines
	log      *slog.Logger

	subscribing struct { // whether the last subscription worked, to log a change only
		mu     sync.Mutex
		failed bool
	}
}

// NewStrategy makes a strategy on store. It does no I/O, and it never closes
// the store.
//
// A nil store means the memory store that all nil stores of this process share:
// it excludes goroutines of this process, and no other process. That is logged
// once, because a forgotten line of configuration must not go unnoticed.
//
// An error matches [ErrInvalid].
func NewStrategy(store LockStore, o Options) (*Strategy, error) {
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("leasekit: %w", err)
	}
	s := &Strategy{store: store, o: o, log: o.Logger}
	if store == nil {
		s.store = processStore()
		warnProcessStore.Do(func() {
			s.logger().Warn("leasekit: no store was given: locks exclude only goroutines of this process", slog.String("lock", o.Name))
		})
	} else if isNilValue(store) {
		return nil, fmt.Errorf("leasekit: %w", invalid("store is a nil %T: create one, or pass an untyped nil for the process-wide memory store", store))
	}
	s.identity = identity(s.store)
	if s.identity == nil {
		s.identity = s
	}
	s.notifier, _ = Capability[Notifier](s.store)
	return s, nil
}

func isNilValue(store LockStore) bool {
	switch v := reflect.ValueOf(store); v.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Func, reflect.Chan, reflect.Slice:
		return v.IsNil()
	}
	return false
}

// identity returns a value that is equal for two stores if a lease on one is a
// lease on the other, as far as this process can tell; nil if it cannot.
func identity(store LockStore) any {
	for inner := unwrap(store); inner != nil; inner = unwrap(store) {
		store = inner
	}
	if !reflect.ValueOf(store).Comparable() {
		return nil
	}
	return store
}

// Do runs fn while it holds a lease on key, and returns fn's error.
//
// If key is held elsewhere Do waits up to Options.Wait, then returns a
// [*NotAcquiredError]. If the store fails while acquiring it returns a
// [*StoreError], if ctx ends first an error that matches ctx.Err() and
// [context.Cause] of ctx, for a bad key one that matches [ErrInvalid]; fn has
// not run then.
//
// fn runs on the caller's goroutine. Its context is ctx with the lock's token
// (see [TokenFor]), and is cancelled with a [*LostError] as its cause when the
// lease is lost. If fn then returns an error, Do returns a LostError that wraps
// it; if fn returns nil, so does Do: the work is done, and a resource that
// checks tokens has refused it if it came too late.
//
// The lease is renewed until fn has returned, also after ctx has ended, so that
// an fn that winds down is still protected. Then it is released, whether fn
// returned, panicked or called [runtime.Goexit]; a panic goes on to the caller.
// A release that fails goes to the hooks and the log, not to the caller.
//
// A key that ctx holds already (Do within Do) is refused at once: it would wait
// for itself.
func (s *Strategy) Do(ctx context.Context, key string, fn func(context.Context) error) error {
	if fn == nil {
		return refuse(key, invalid("nil callback"))
	}
	h, err := s.acquire(ctx, key, s.o.Wait, false)
	if err != nil {
		return err
	}
	return h.run(fn)
}

// TryDo is [Strategy.Do] with one try and no waiting. If key is held elsewhere
// it returns false, nil. Otherwise ran tells whether fn was called, and err is
// what Do would have returned.
func (s *Strategy) TryDo(ctx context.Context, key string, fn func(context.Context) error) (ran bool, err error) {
	if fn == nil {
		return false, refuse(key, invalid("nil callback"))
	}
	h, err := s.acquire(ctx, key, 0, false)
	if err == nil {
		return true, h.run(fn)
	}
	if rejected, ok := err.(*NotAcquiredError); ok && !rejected.Reentrant && rejected.Err == nil { //nolint:errorlint // acquire returns it unwrapped
		return false, nil
	}
	return false, err
}

// Do is [Strategy.Do] for a callback with a result, which it returns together
// with the error.
func Do[T any](ctx context.Context, s *Strategy, key string, fn func(context.Context) (T, error)) (T, error) {
	var result T
	if fn == nil {
		return result, refuse(key, invalid("nil callback"))
	}
	err := s.Do(ctx, key, func(ctx context.Context) (err error) {
		result, err = fn(ctx)
		return err
	})
	return result, err
}

// Acquire takes a lease on key and keeps it renewed until [Lease.Release], for
// work that does not fit into a callback. Its errors are those of
// [Strategy.Do].
//
// ctx bounds the waiting alone: the lease does not end with it.
func (s *Strategy) Acquire(ctx context.Context, key string) (*Lease, error) {
	h, err := s.acquire(ctx, key, s.o.Wait, true)
	if err != nil {
		return nil, err
	}
	lease := &Lease{h: h}
	returns := false
	defer func() {
		if !returns { // the hook ended this goroutine: nobody has the lease
			_ = lease.Release()
		}
	}()
	h.callHooks()
	returns = true
	return lease, nil
}

// acquire waits for key under ctx and returns the running hold, whose hook
// Acquired is still to be called. Its context ends with ctx, unless it outlives
// that.
func (s *Strategy) acquire(ctx context.Context, key string, wait time.Duration, outlives bool) (*hold, error) {
	if err := CheckKey(key); err != nil {
		return nil, refuse(key, err)
	}
	if ctx == nil {
		return nil, refuse(key, invalid("nil context"))
	}
	a := attempt{s: s, ctx: ctx, key: key, start: time.Now()}
	if ctx.Err() != nil {
		return nil, a.ended()
	}
	outer := lockOf(ctx)
	for l := outer; l != nil; l = l.outer {
		if l.h.key == key && l.h.s.identity == s.identity && l.h.held() {
			return nil, a.rejected(nil, true)
		}
	}

	var w *waiter
	acquired := false
	defer func() { w.stop(acquired) }()
	for {
		now := a.start
		if a.tries > 0 {
			now = time.Now()
		}
		a.tries++
		h, left, err := a.try(now)
		if h != nil {
			acquired = true
			h.start(&a, outer, outlives)
			return h, nil
		}
		if err != nil && !errors.Is(err, errLateGrant) {
			return nil, err
		}
		remaining := lastPoll
		if wait != WaitForever {
			remaining = wait - time.Since(a.start)
		}
		if remaining <= 0 {
			return nil, a.rejected(err, false)
		}
		if a.tries == 1 {
			if s.o.Hooks.Waiting != nil {
				s.call(a.hookCtx(), s.o.Hooks.Waiting, a.event(nil))
			}
			w = a.wait()
		}
		w.sleep(left, remaining)
		if ctx.Err() != nil { // also when it ended together with the sleep
			return nil, a.ended()
		}
	}
}

// refuse makes the error of a call that cannot be meant; a bad key may be long.
func refuse(key string, err error) error { return fmt.Errorf("lock %.100q: %w", key, err) }

// attempt is one call of acquire.
type attempt struct {
	s     *Strategy
	ctx   context.Context
	key   string
	start time.Time
	tries int
}

func (a *attempt) hookCtx() context.Context { return context.WithoutCancel(a.ctx) }

func (a *attempt) event(err error) Event {
	return Event{Name: a.s.o.Name, Key: a.key, Tries: a.tries, Waited: time.Since(a.start), Err: err}
}

// errLateGrant is why a grant is given back: by the time it was known, it could
// have ended.
var errLateGrant = errors.New("the store's grant arrived after its own ttl")

// try makes one try, now, with an owner of its own. It returns a hold if the key was
// granted, or how long the present lease still lives, or an error: errLateGrant
// if another try makes sense.
func (a *attempt) try(now time.Time) (*hold, time.Duration, error) {
	s := a.s
	h := &hold{s: s, key: a.key, owner: newOwner(s.o.Label)}
	h.acquiring = boundedCtx{parent: a.ctx, deadline: now.Add(s.o.TTL)}
	g, err := s.store.Acquire(&h.acquiring, a.key, h.owner, s.o.TTL)
	h.acquiring.stop()
	h.granted = time.Now()
	h.deadline = now.Add(localLife(s.o.TTL))

	switch {
	case err == nil && !g.Acquired:
		if a.ctx.Err() != nil {
			return nil, 0, a.ended()
		}
		return nil, g.Left, nil
	case err == nil && (g.Token <= 0 || g.Token > maxToken):
		err = fmt.Errorf("the store granted token %d: tokens are between 1 and 2^53", g.Token)
	case err == nil && a.ctx.Err() == nil && h.granted.Before(h.deadline):
		h.token = g.Token
		return h, 0, nil
	case err == nil && a.ctx.Err() == nil:
		err = errLateGrant
	case errors.Is(err, ErrInvalid): // the store refused before it did anything
		return nil, 0, a.failed(fmt.Errorf("lock %q: acquire: %w", a.key, err))
	}

	// Granted and unusable, or nobody knows: end the lease, if there is one.
	a.undo(h.owner)
	switch {
	case a.ctx.Err() != nil:
		return nil, 0, a.ended()
	case errors.Is(err, errLateGrant):
		return nil, 0, err
	default:
		return nil, 0, a.failed(&StoreError{Op: "acquire", Key: a.key, Err: err})
	}
}

// undo releases a lease that owner may have. It waits for that a little, lest
// the next try meets its own ghost, but not if the caller has gone.
func (a *attempt) undo(owner string) {
	result := make(chan error, 1)
	background := *a
	go func() {
		a := &background
		ctx, cancel := context.WithTimeout(a.hookCtx(), min(a.s.o.TTL, releaseBound))
		defer cancel()
		err := a.s.store.Release(ctx, a.key, owner)
		if err != nil {
			err = &StoreError{Op: "release", Key: a.key, Err: err}
			a.s.warn(ctx, "leasekit: could not release after a failed acquire, the key may stay locked for its ttl", a.event(err))
		}
		result <- err
	}()
	if a.ctx.Err() != nil {
		return
	}
	patience := time.NewTimer(cleanupPatience)
	defer patience.Stop()
	select {
	case err := <-result:
		if err != nil && a.s.o.Hooks.ReleaseFailed != nil {
			a.s.call(a.hookCtx(), a.s.o.Hooks.ReleaseFailed, a.event(err))
		}
	case <-patience.C:
	case <-a.ctx.Done():
	}
}

// rejected ends the attempt: the key was not to be had.
func (a *attempt) rejected(reason error, reentrant bool) error {
	err := &NotAcquiredError{Key: a.key, Waited: time.Since(a.start), Tries: a.tries, Reentrant: reentrant, Err: reason}
	if a.s.o.Hooks.Rejected != nil {
		a.s.call(a.hookCtx(), a.s.o.Hooks.Rejected, a.event(err))
	}
	return err
}

// failed ends the attempt with err.
func (a *attempt) failed(err error) error {
	if a.s.o.Hooks.AcquireFailed != nil {
		a.s.call(a.hookCtx(), a.s.o.Hooks.AcquireFailed, a.event(err))
	}
	return err
}

// ended ends the attempt because the caller's context has.
func (a *attempt) ended() error {
	return a.failed(&endedError{key: a.key, err: a.ctx.Err(), cause: context.Cause(a.ctx)})
}
