package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

// T is what a rule works with: one attempt at one rule. The calls that judge
// ([T.Broken], [T.Retry], those of testing.TB) may be made from any goroutine
// that [T.Go] started; they end that goroutine.
type T struct {
	testing.TB
	// Config of the run, with its defaults filled in.
	Config *Config

	rule *Rule
	rec  *recorder
	ttl  time.Duration
}

// TTL is the lease to ask for: Config.TTL, and more when the rule was tried
// before and could not be judged.
func (t *T) TTL() time.Duration { return t.ttl }

// Long is a lease that does not end during a rule that does not wait for it. It
// is released in the end.
func (t *T) Long() time.Duration { return max(20*t.ttl, 2*time.Minute) }

// Deadline returns a function that tells whether d has passed: a store that is
// slow is not to do as much of the same as one that is fast.
func (t *T) Deadline(d time.Duration) (enough func() bool) {
	end := time.Now().Add(d)
	return func() bool { return time.Now().After(end) }
}

// Slack is Config.Slack.
func (t *T) Slack() time.Duration { return t.Config.Slack }

// Key returns a new random key.
func (t *T) Key() string { return "conformance:" + rand.Text() }

// Owner returns a new random owner.
func (t *T) Owner() string { return rand.Text() }

// Open opens one more client of the backend. It is closed when the attempt is
// over.
func (t *T) Open() core.LockStore { t.Helper(); return t.Config.Open(t.rec) }

// OpenClosable is [T.Open] for a client that is to be closed earlier.
func (t *T) OpenClosable() (store core.LockStore, closeStore func()) {
	t.Helper()
	s := &scope{TB: t.rec}
	store = t.Config.Open(s)
	closeStore = sync.OnceFunc(s.close)
	t.Cleanup(closeStore)
	return store, closeStore
}

// Broken reports that the store broke the rule, and ends the attempt.
func (t *T) Broken(got, want string) {
	where := ""
	if _, file, line, ok := runtime.Caller(1); ok {
		where = fmt.Sprintf(" (%s:%d)", filepath.Base(file), line)
	}
	t.broken(got, want, where)
}

func (t *T) broken(got, want, where string) {
	t.rec.setBroken(fmt.Sprintf("%s is broken%s\n  got:      %s\n  want:     %s\n  contract: %s",
		t.rule.Name, where, got, want, t.rule.Sentence))
	runtime.Goexit()
}

// Retry says that the attempt proves nothing, because the machine was too slow
// for it, and ends it. The rule is tried again with a longer TTL.
func (t *T) Retry(format string, args ...any) {
	t.rec.setAgain(fmt.Sprintf(format, args...))
	runtime.Goexit()
}

// Go calls f(0) to f(n-1), each in a goroutine, and waits for all. If one of
// them ended the attempt, so does Go.
func (t *T) Go(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { t.rec.protect(func() { f(i) }) })
	}
	wg.Wait()
	t.stopIfOver()
}

func (t *T) stopIfOver() {
	if t.rec.over() {
		runtime.Goexit()
	}
}

// Try is one call of Acquire and its answer.
type Try struct {
	Key, Owner string
	TTL        time.Duration
	// Sent and Answered are the times before and after the call.
	Sent, Answered time.Time
	core.Grant
}

// Try calls Acquire once. An error breaks the rule: the server is well, and
// "held" is an answer.
func (t *T) Try(store core.LockStore, key, owner string, ttl time.Duration) Try {
	try, err := t.tryContext(t.Context(), store, key, owner, ttl)
	if err != nil {
		t.stopIfLate()
		t.Broken(fmt.Sprintf("Acquire returned the error %q", err), "an answer: acquired or not")
	}
	return try
}

func (t *T) tryContext(ctx context.Context, store core.LockStore, key, owner string, ttl time.Duration) (Try, error) {
	sent := time.Now()
	grant, err := store.Acquire(ctx, key, owner, ttl)
	return Try{Key: key, Owner: owner, TTL: ttl, Sent: sent, Answered: time.Now(), Grant: grant}, err
}

// Lease is a lease that a rule holds, and what is known about its end.
type Lease struct {
	t     *T
	Store core.LockStore
	// The last call that was answered yes: Acquire, or a Renew since.
	Try
}

// Acquire takes key, which has to be free, for a new owner.
func (t *T) Acquire(store core.LockStore, key string, ttl time.Duration) *Lease {
	return t.AcquireAs(store, key, t.Owner(), ttl)
}

// AcquireAs is [T.Acquire] for an owner of the rule's choice.
func (t *T) AcquireAs(store core.LockStore, key, owner string, ttl time.Duration) *Lease {
	try := t.Try(store, key, owner, ttl)
	if !try.Acquired {
		t.Broken(fmt.Sprintf("not acquired (Left %v), although nobody holds the key", try.Left), "acquired")
	}
	return &Lease{t: t, Store: store, Try: try}
}

// NotBefore is the moment before which the lease must not end. Measured clocks
// may drift apart by 1 %, the allowance that core.Strategy makes too.
func (l *Lease) NotBefore() time.Time { return l.Sent.Add(l.TTL - l.TTL/100) }

// NotAfter is the moment after which no try may find the lease alive.
func (l *Lease) NotAfter() time.Time { return l.Answered.Add(l.TTL + l.t.Slack()) }

// Live reports whether the lease was provably alive at the moment at.
func (l *Lease) Live(at time.Time) bool { return at.Before(l.NotBefore()) }

// MustBeHeld checks that another owner's try at store finds the lease alive.
func (l *Lease) MustBeHeld(store core.LockStore) {
	t := l.t
	try := t.Try(store, l.Key, t.Owner(), l.t.TTL())
	if !try.Acquired {
		return
	}
	if l.Live(try.Answered) {
		t.Broken(fmt.Sprintf("another owner acquired the key %v after it was leased for %v",
			try.Answered.Sub(l.Sent).Round(time.Microsecond), l.TTL), "not acquired: the lease is alive")
	}
	t.Retry("the lease of %v was over when it was to be tested", l.TTL)
}

// MustRenew renews the lease.
func (l *Lease) MustRenew(ttl time.Duration) { l.MustRenewAt(l.Store, ttl) }

// MustRenewAt renews the lease through another client.
func (l *Lease) MustRenewAt(store core.LockStore, ttl time.Duration) {
	t := l.t
	sent := time.Now()
	renewed, err := store.Renew(t.Context(), l.Key, l.Owner, ttl)
	answered := time.Now()
	switch {
	case err != nil:
		t.stopIfLate()
		t.Broken(fmt.Sprintf("Renew of a live lease returned the error %q", err), "true")
	case renewed:
		l.TTL, l.Sent, l.Answered = ttl, sent, answered
	case l.Live(answered):
		t.Broken(fmt.Sprintf("Renew by the owner returned false %v after the key was leased for %v",
			answered.Sub(l.Sent).Round(time.Microsecond), l.TTL), "true")
	default:
		t.Retry("the lease of %v was over when it was to be renewed", l.TTL)
	}
}

// MustRelease releases the lease. What it did is another question.
func (l *Lease) MustRelease() { l.t.MustRelease(l.Store, l.Key, l.Owner) }

// MustRelease calls Release, which may not fail whatever the state of the key.
func (t *T) MustRelease(store core.LockStore, key, owner string) {
	if err := store.Release(t.Context(), key, owner); err != nil {
		t.stopIfLate()
		t.Broken(fmt.Sprintf("Release returned the error %q", err), "nil")
	}
}

// MustNotRenew calls Renew for an owner that has no live lease.
func (t *T) MustNotRenew(store core.LockStore, key, owner string, ttl time.Duration, who string) {
	renewed, err := store.Renew(t.Context(), key, owner, ttl)
	if err != nil {
		t.stopIfLate()
		t.Broken(fmt.Sprintf("Renew by %s returned the error %q", who, err), "false, nil")
	}
	if renewed {
		t.Broken("Renew by "+who+" returned true", "false")
	}
}

// SleepUntil sleeps until when.
func (t *T) SleepUntil(when time.Time) { t.Sleep(time.Until(when)) }

// Sleep sleeps for d, or until the attempt's time is over.
func (t *T) Sleep(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
		t.stopIfLate()
	}
}

// stopIfLate ends the attempt when its time is over: an error is then no
// answer of the store.
func (t *T) stopIfLate() {
	if t.Context().Err() != nil {
		t.Fatalf("the rule did not end within %v", t.rec.limit)
	}
}

// end is which end of a lease's life [T.Successor] judges.
type end int

const (
	tooEarly end = 1 << iota
	tooLate
)

// Successor tries to acquire the key of l, again and again, until it has it,
// and checks that this was neither too early nor too late.
func (t *T) Successor(l *Lease, store core.LockStore) *Lease {
	return t.successor(l, store, tooEarly|tooLate)
}

func (t *T) successor(l *Lease, store core.LockStore, judge end) *Lease {
	owner := t.Owner()
	pause := max(l.TTL/50, time.Millisecond)
	refused := l.Sent // when the last refused try was sent
	for {
		try := t.Try(store, l.Key, owner, t.TTL())
		switch {
		case try.Acquired:
			if judge&tooEarly != 0 {
				if l.Live(try.Answered) {
					t.Broken(fmt.Sprintf("another owner acquired the key %v after it was leased for %v",
						try.Answered.Sub(l.Sent).Round(time.Microsecond), l.TTL),
						fmt.Sprintf("not before %v have passed since the request was sent", l.TTL))
				}
				// Without a try in the last quarter of its life an early end
				// would have gone unseen.
				if refused.Before(l.Sent.Add(l.TTL - l.TTL/4)) {
					t.Retry("no try was made in the last quarter of a lease of %v", l.TTL)
				}
			}
			return &Lease{t: t, Store: store, Try: try}
		case judge&tooLate != 0 && try.Sent.After(l.NotAfter()):
			t.Broken(fmt.Sprintf("a try %v after the last answer to the owner found a lease of %v still alive",
				try.Sent.Sub(l.Answered).Round(time.Millisecond), l.TTL),
				fmt.Sprintf("acquired after ttl and slack, %v", l.TTL+t.Slack()))
		case judge&tooLate == 0 && try.Sent.After(l.NotAfter().Add(10*t.TTL())):
			t.Retry("the lease of %v did not end", l.TTL) // for another rule to judge
		}
		refused = try.Sent
		t.Sleep(pause)
	}
}

// each error must match the end of ctx.
func matchesEnd(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, ctx.Err())
}
