package mongostore

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/leasekit/leasekit/internal/await"
)

// call is [await.Call], with the ctx that the driver may see.
func call[T any](ctx context.Context, w *await.Workers, fn func(context.Context) (T, error)) (T, error) {
	return await.Call(ctx, w, func() (T, error) { return fn(withoutSession{ctx}) })
}

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
