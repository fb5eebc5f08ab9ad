package core

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// LockStore keeps leases on keys. A store is the only thing that a backend has
// to provide; package conformance checks every sentence below against a real
// one.
//
// Each method is one try: one step that is atomic for its key against every
// other client of the backend. A method never waits for a key to become free.
// That the key is held by someone else is an answer, not an error: an error
// always means that the outcome is unknown, with one exception, [ErrInvalid],
// which is returned before any I/O.
//
// Every method returns within 50 ms after its ctx ends, with an error that
// matches ctx.Err(), whatever the driver below does meanwhile. All methods are
// safe for concurrent use.
type LockStore interface {
	// Acquire stores a lease on key for owner if no live lease is there, and
	// returns its token. A live lease of anybody, the same owner included,
	// means not acquired. The lease lives at least ttl from the moment the
	// request was sent; the server's clock decides when it ends.
	//
	// The token grows with every acquisition of the key; see [Grant].
	Acquire(ctx context.Context, key, owner string, ttl time.Duration) (Grant, error)

	// Renew pushes the end of owner's live lease to now + ttl, with the ttl
	// given, be it longer or shorter than the first, and keeps the token. It
	// returns false, and changes nothing, when there is no live lease of owner
	// on key: an expired lease stays expired even if nobody took it.
	Renew(ctx context.Context, key, owner string, ttl time.Duration) (renewed bool, err error)

	// Release ends owner's live lease on key. When there is none (never
	// locked, released before, expired, somebody else's) it changes nothing
	// and returns nil.
	Release(ctx context.Context, key, owner string) error
}

// Grant is the answer of [LockStore.Acquire].
type Grant struct {
	// Acquired tells whether the lease was granted.
	Acquired bool

	// Token is the fencing token of the granted lease: greater than 0 and less
	// than 2^53 (so that it survives JSON and JavaScript), and greater than
	// every token granted before for the same key. 0 when not Acquired.
	Token int64

	// Left is, when not Acquired, how long the present lease still lives; 0
	// means not known. It is a hint, rounded up, that lets waiters wake when
	// the lease runs out.
	Left time.Duration
}

// maxToken bounds fencing tokens: the largest integer up to which a float64,
// and with it JSON in most languages, represents every integer exactly.
const maxToken = 1<<53 - 1

// The limits of what [CheckKey], [CheckOwner] and [CheckTTL] accept.
const (
	// MaxKeyLen is the longest key and the longest owner, in bytes.
	MaxKeyLen = 512
	// MinTTL is the shortest lease.
	MinTTL = time.Millisecond
)

// CheckKey returns an error that matches [ErrInvalid] unless key is 1 to
// [MaxKeyLen] bytes of UTF-8 with no NUL. Stores call it before any I/O, so
// that the same keys work on every backend.
func CheckKey(key string) error { return checkText("key", key) }

// CheckOwner does for an owner what [CheckKey] does for a key. Its errors
// never contain the owner, which is a secret.
func CheckOwner(owner string) error { return checkText("owner", owner) }

func checkText(what, s string) error {
	switch {
	case s == "":
		return invalid("empty %s: use 1 to %d bytes", what, MaxKeyLen)
	case len(s) > MaxKeyLen:
		return invalid("%s of %d bytes: use at most %d, or a hash of it", what, len(s), MaxKeyLen)
	case strings.IndexByte(s, 0) >= 0:
		return invalid("%s contains a NUL byte: encode it first", what)
	case !utf8.ValidString(s):
		return invalid("%s is not valid UTF-8: encode it first, with base64 for example", what)
	}
	return nil
}

// CheckTTL returns an error that matches [ErrInvalid] when ttl is shorter than
// [MinTTL].
func CheckTTL(ttl time.Duration) error {
	if ttl < MinTTL {
		return invalid("ttl %v: use at least %v", ttl, MinTTL)
	}
	return nil
}

// CheckAll is [CheckKey], [CheckOwner] and [CheckTTL] in one call, for the
// first line of a store's Acquire and Renew.
func CheckAll(key, owner string, ttl time.Duration) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := CheckOwner(owner); err != nil {
		return err
	}
	return CheckTTL(ttl)
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
}

// Notifier is an optional capability of a store: it tells waiters that a key
// may have become free, so that they need not wait for their next poll. Find it
// with [Capability].
type Notifier interface {
	// Subscribe returns a channel on which a value arrives whenever key may
	// have become free: signals are hints, they may be spurious, merged or
	// lost, and whoever gets one has to try again. Subscribe returns when the
	// server has confirmed the subscription, so that no release after its
	// return goes unnoticed while the connection lives.
	//
	// A closed channel means that no signals will come any more. ctx bounds
	// the call, not the subscription, which lives until stop is called. stop
	// may be called more than once, from any goroutine, and leaves nothing
	// behind.
	Subscribe(ctx context.Context, key string) (signals <-chan struct{}, stop func(), err error)
}

// Capability finds an optional interface, such as [Notifier], on store or on
// what it wraps. A wrapper makes its inner store visible with a method
//
//	Unwrap() core.LockStore
//
// which it must have only if it passes keys on unchanged.
//
//	notifier, ok := core.Capability[core.Notifier](store)
func Capability[T any](store LockStore) (T, bool) {
	for store != nil {
		if c, ok := store.(T); ok {
			return c, true
		}
		store = unwrap(store)
	}
	var none T
	return none, false
}

// unwrap returns the store that store wraps, or nil.
func unwrap(store LockStore) LockStore {
	if u, ok := store.(interface{ Unwrap() LockStore }); ok {
		return u.Unwrap()
	}
	return nil
}
