package etcdstore

import (
	"context"
	"errors"
	"time"
)

const (
	// readPatience and writePatience are how long a request may go unanswered
	// before it is sent again, which takes it to the next member: one that is
	// frozen or cut off says nothing for minutes. The time doubles with each
	// try, so that a cluster which is only slow is not pressed, up to
	// maxPatience.
	readPatience  = 500 * time.Millisecond
	writePatience = 2 * time.Second
	maxPatience   = 8 * time.Second

	// maxResends bounds how often a request is sent again. The pauses in
	// between, 50 + 100 + 200 + 6 x 400 ms, are longer than an election.
	maxResends = 9
)

var (
	errTooManyTries = errors.New("tried too often")
	errSilent       = errors.New("no answer")
)

// resend calls f, which sends a request, again while etcd is silent or
// unavailable. It is for requests that do no harm when they are delivered
// twice. sent counts the deliveries that etcd has executed, or may yet: it is 0
// when it certainly refused.
func resend(ctx context.Context, patience time.Duration, f func(context.Context) error) (sent int, err error) {
	for {
		one, cancel := context.WithTimeout(ctx, patience)
		err = f(one)
		silent := err != nil && one.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case err == nil:
			return sent + 1, nil
		case isRefusal(err):
			return sent, err
		}
		sent++
		switch {
		case silent && sent > maxResends:
			return sent, errSilent // and not the error of a context that the caller does not know
		case silent:
			patience = min(2*patience, maxPatience)
		case !isTransient(err) || pause(ctx, sent) != nil:
			return sent, err
		}
	}
}

// pause sleeps before a request is sent for the n-th time again, not at all for
// n = 0. It returns an error if sending makes no sense any more.
func pause(ctx context.Context, n int) error {
	switch {
	case n > maxResends:
		return errTooManyTries
	case n == 0 || ctx.Err() != nil:
		return ctx.Err()
	}
	timer := time.NewTimer(min(25*time.Millisecond<<n, 400*time.Millisecond))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
