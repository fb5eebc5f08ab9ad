package core

import "time"

// The waiting schedule: a waiter asks again after 50 ms, then doubles up to a
// second. Both numbers are part of the contract (docs/contract.md, Strategy 3).
const (
	firstPoll = 50 * time.Millisecond
	lastPoll  = time.Second

	// soonestPoll is the shortest sleep after a Grant.Left. A store whose hint
	// says "any moment now" again and again must not be asked in a busy loop.
	soonestPoll = 10 * time.Millisecond
)

// backoff returns how long to wait after the n-th failure, n >= 1.
func backoff(n int) time.Duration {
	if n > 5 { // 50 ms << 5 is more than a second; larger shifts overflow
		return lastPoll
	}
	return min(firstPoll<<(n-1), lastPoll)
}

// pollDelay is how long the n-th sleep of a waiter lasts who was told that the
// present lease has left to live (0: not known).
func pollDelay(n int, left time.Duration) time.Duration {
	d := backoff(n)
	if left > 0 {
		d = min(d, max(left, soonestPoll))
	}
	return d
}

// retryDelay is how long to wait after the n-th failed renewal in a row. It is
// the waiter's back-off, held short enough that a lease of any ttl gets several
// more renewals before its deadline.
func retryDelay(n int, ttl time.Duration) time.Duration {
	return min(backoff(n), max(ttl/12, time.Millisecond))
}
