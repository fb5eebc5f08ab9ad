package core

import (
	"errors"
	"fmt"
	"time"
)

// What an error of this package is about: test with [errors.Is]. For details
// use [errors.As] with the type named beside each.
var (
	// ErrInvalid: an argument or option is outside its limits. Nothing was
	// touched.
	ErrInvalid = errors.New("invalid argument")
	// ErrNotAcquired: somebody else holds the key ([NotAcquiredError]).
	ErrNotAcquired = errors.New("not acquired")
	// ErrLost: the lease ended before its holder was done ([LostError]).
	ErrLost = errors.New("lease lost")
	// ErrReleased: the lease was released by its holder. It is the cause of
	// a callback's context after the callback has returned, and what
	// [Lease.Err] says after [Lease.Release].
	ErrReleased = errors.New("lease released")
	// ErrStore: the store failed, the outcome is unknown ([StoreError]).
	ErrStore = errors.New("store failed")
)

// NotAcquiredError says that the key was held by someone else until the waiting
// time was over. The callback did not run. It matches [ErrNotAcquired].
//
// A callback that returns the rejection of a lock of its own hands a
// NotAcquiredError on to its caller: compare Key, or use [Strategy.TryDo],
// which says whether its callback ran.
type NotAcquiredError struct {
	// Key that was asked for.
	Key string
	// Waited is the time from the call to this answer.
	Waited time.Duration
	// Tries counts the calls of [LockStore.Acquire].
	Tries int
	// Reentrant is set when the calling code holds the key itself, as its
	// context says: it would have waited for itself, so no try was made.
	Reentrant bool
	// Err is set when the key was not held elsewhere after all: the last try
	// was granted, but so late that the lease could have ended. It was given
	// back.
	Err error
}

func (e *NotAcquiredError) Error() string {
	if e.Reentrant {
		return fmt.Sprintf("lock %q: not acquired: the calling context holds this key already, and leases are not reentrant", e.Key)
	}
	reason := "held elsewhere"
	if e.Err != nil {
		reason = e.Err.Error()
	}
	return fmt.Sprintf("lock %q: not acquired: %s, tries: %d, waited: %v", e.Key, reason, e.Tries, e.Waited.Round(time.Millisecond))
}

// Unwrap returns Err.
func (e *NotAcquiredError) Unwrap() error { return e.Err }

// Is reports whether target is [ErrNotAcquired].
func (e *NotAcquiredError) Is(target error) bool { return target == ErrNotAcquired }

// Code returns "LOCK_NOT_ACQUIRED", for error responses and metrics.
func (e *NotAcquiredError) Code() string { return "LOCK_NOT_ACQUIRED" }

// HTTPStatus returns 409, Conflict.
func (e *NotAcquiredError) HTTPStatus() int { return 409 }

// IsRejection reports whether err says that a key was held: the work was refused,
// and nothing went wrong. Only that a key is held by the very code that asks for
// it, which would wait for itself, is a mistake: [NotAcquiredError].Reentrant
// tells.
func IsRejection(err error) bool { return errors.Is(err, ErrNotAcquired) }

// LostError says that the lease ended while its holder still worked. It is the
// cause of the callback's context, and what [Strategy.Do] returns when the
// callback then fails. It matches [ErrLost].
type LostError struct {
	// Key and Token of the lost lease. The protected resource refuses Token as
	// soon as it has seen a successor's.
	Key   string
	Token int64
	// Reason is why the lease counts as lost.
	Reason error
	// Err is the callback's own error; nil in the cause of a context.
	Err error
}

func (e *LostError) Error() string {
	s := fmt.Sprintf("lock %q: lease lost", e.Key)
	if e.Reason != nil {
		s += ": " + e.Reason.Error()
	}
	if e.Err != nil {
		s += ": callback: " + e.Err.Error()
	}
	return s
}

// Is reports whether target is [ErrLost].
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns the callback's error and the reason of the loss.
func (e *LostError) Unwrap() []error {
	errs := make([]error, 0, 2)
	for _, err := range []error{e.Err, e.Reason} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// Code returns "LOCK_LOST", for error responses and metrics.
func (e *LostError) Code() string { return "LOCK_LOST" }

// StoreError says that a call of the store failed. The outcome of the call is
// unknown. It matches [ErrStore] and unwraps to the store's own error.
type StoreError struct {
	// Op is "acquire", "renew" or "release".
	Op string
	// Key of the call.
	Key string
	// Err is what the store returned.
	Err error
}

func (e *StoreError) Error() string { return fmt.Sprintf("lock %q: %s: %v", e.Key, e.Op, e.Err) }

// Is reports whether target is [ErrStore].
func (e *StoreError) Is(target error) bool { return target == ErrStore }

// Unwrap returns the store's error.
func (e *StoreError) Unwrap() error { return e.Err }

// endedError says that the caller's context ended before the lease was
// granted. It matches ctx.Err() and context.Cause(ctx).
type endedError struct {
	key        string
	err, cause error
}

func (e *endedError) Error() string {
	if e.cause != nil && e.cause.Error() != e.err.Error() {
		return fmt.Sprintf("lock %q: acquire: %v: %v", e.key, e.err, e.cause)
	}
	return fmt.Sprintf("lock %q: acquire: %v", e.key, e.err)
}

func (e *endedError) Unwrap() []error { return []error{e.err, e.cause} }
