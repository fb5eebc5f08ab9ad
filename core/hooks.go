package core

import (
	"context"
	"log/slog"
	"runtime/debug"
	"time"
)

// Hooks are functions that the strategy calls as things happen, for metrics and
// tracing. All are optional.
//
// The hooks of one acquisition are called one at a time and in order. Their
// context has the values of the caller's, so that spans and request ids are at
// hand, and never ends. [Strategy.Do], [Strategy.TryDo] and [Do] return after
// their last hook; a slow hook therefore delays its caller, but neither the
// renewals nor the cancellation on loss. A hook that panics is logged and
// otherwise ignored.
//
// Waiting, Acquired, Rejected, AcquireFailed, Released and ReleaseFailed run on
// the goroutine that called the strategy, and Renewed, RenewFailed and Lost on
// one of the lease's own; with two exceptions: what happens while a hook of the
// same lease is still running is reported by that hook's goroutine, right
// after it, and a loss that is found when the callback has returned by the
// goroutine that called the strategy.
type Hooks struct {
	// Waiting: the first try found the key held, and the strategy begins to
	// wait. Not called when it does not wait.
	Waiting func(context.Context, Event)
	// Acquired: the lease was granted; the callback runs next.
	Acquired func(context.Context, Event)
	// Rejected: the key was held until the waiting time was over; Err is the
	// [NotAcquiredError].
	Rejected func(context.Context, Event)
	// AcquireFailed: the store failed, or the caller's context ended before a
	// lease was granted; Err says which.
	AcquireFailed func(context.Context, Event)
	// Renewed: the store confirmed a renewal.
	Renewed func(context.Context, Event)
	// RenewFailed: a renewal failed or went unanswered; it is tried again
	// until the lease's local deadline.
	RenewFailed func(context.Context, Event)
	// Lost: the lease is lost, and the callback's context is cancelled
	// already; Err is the [LostError].
	Lost func(context.Context, Event)
	// Released: the store confirmed the release, or, with Options.MinHold, the
	// last renewal that takes its place.
	Released func(context.Context, Event)
	// ReleaseFailed: the release failed, so that the key stays locked until
	// the lease runs out; or, with Options.MinHold, the lease turned out to be
	// lost, so that the key is not kept: Err is a [LostError] then.
	ReleaseFailed func(context.Context, Event)
}

// Event is what a hook is told.
type Event struct {
	// Name is [Options].Name.
	Name string
	// Key of the lock.
	Key string
	// Token of the lease; 0 before one was granted.
	Token int64
	// Tries counts the calls of [LockStore.Acquire] so far.
	Tries int
	// Waited is the time from the call to the grant, or to now before one.
	Waited time.Duration
	// Held is the time since the lease was granted; 0 before.
	Held time.Duration
	// Err is set for Rejected, AcquireFailed, RenewFailed, Lost and
	// ReleaseFailed.
	Err error
}

type hookFunc = func(context.Context, Event)

// call runs a hook; a panic in it is the hook's own affair.
func (s *Strategy) call(ctx context.Context, hook hookFunc, e Event) {
	if hook == nil {
		return
	}
	defer func() {
		if p := recover(); p != nil {
			s.logger().LogAttrs(ctx, slog.LevelError, "leasekit: a hook panicked",
				slog.String("lock", e.Name), slog.String("key", e.Key),
				slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
		}
	}()
	hook(ctx, e)
}

// warn logs e at level Warn.
func (s *Strategy) warn(ctx context.Context, msg string, e Event) {
	attrs := []slog.Attr{slog.String("lock", e.Name), slog.String("key", e.Key)}
	if e.Token != 0 {
		attrs = append(attrs, slog.Int64("token", e.Token))
	}
	attrs = append(attrs, slog.Any("error", e.Err))
	s.logger().LogAttrs(ctx, slog.LevelWarn, msg, attrs...)
}

func (s *Strategy) logger() *slog.Logger {
	if s.log != nil {
		return s.log
	}
	return slog.Default() // looked up late: SetDefault may come after NewStrategy
}
