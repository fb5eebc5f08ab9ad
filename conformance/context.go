package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/leasekit/leasekit/core"
)

// endBound is how soon a call returns after its context has ended.
const endBound = 50 * time.Millisecond

func contextRules() []Rule {
	pause := needs("Pause", func(c *Config) bool { return c.Pause != nil })
	return group("Context", Rule{
		Name:     "EndedContext",
		Sentence: "Every call returns after its ctx ends with an error matching ctx.Err(): a ctx that has ended before, by a cancel or a deadline, is no exception.",
		Check:    checkEndedContext,
	}, Rule{
		Name:     "ContextEnds",
		Sentence: "Every call returns within 50 ms after its ctx ends, with an error matching ctx.Err(), whatever the driver does meanwhile.",
		Check:    checkContextEnds,
	}, Rule{
		Name:     "ContextEndsInSilence",
		Sentence: "Every call returns within 50 ms after its ctx ends, with an error matching ctx.Err(), also when the server says nothing at all.",
		Needs:    pause,
		Alone:    true,
		Check:    checkContextEndsInSilence,
	}, Rule{
		Name:     "ReleaseUndoesUnknownAcquire",
		Sentence: "If the server executed a call before the Release(owner) that follows it, the Release undoes it.",
		Busy:     true,
		Check:    checkReleaseUndoesUnknownAcquire,
	}, Rule{
		Name:     "LateAcquireEndsByItself",
		Sentence: "If the server executes a call that its caller has given up, a ghost remains and ends by itself ttl after that.",
		Check:    checkLateAcquireEndsByItself,
	}, Rule{
		Name:     "AcquireInSilenceEndsByItself",
		Sentence: "If the server executes a call later than the Release(owner) that follows it, a ghost remains and ends by itself ttl after that.",
		Needs:    pause,
		Alone:    true,
		Check:    checkAcquireInSilenceEndsByItself,
	})
}

// method is one of the three of a store.
type method struct {
	name string
	call func(ctx context.Context, store core.LockStore, l *Lease) error
}

// methods calls Acquire on a free key, and Renew and Release on l, which must
// be live if the answers are to be yes.
func (t *T) methods() []method {
	return []method{
		{"Acquire", func(ctx context.Context, store core.LockStore, _ *Lease) error {
			_, err := store.Acquire(ctx, t.Key(), t.Owner(), t.TTL())
			return err
		}},
		{"Renew", func(ctx context.Context, store core.LockStore, l *Lease) error {
			_, err := store.Renew(ctx, l.Key, l.Owner, t.Long())
			return err
		}},
		{"Release", func(ctx context.Context, store core.LockStore, _ *Lease) error {
			return store.Release(ctx, t.Key(), t.Owner())
		}},
	}
}

func checkEndedContext(t *T) {
	store := t.Open()
	lease := t.Acquire(store, t.Key(), t.Long())
	cancelled, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the caller is gone"))
	expired, cancelExpired := context.WithDeadline(t.Context(), time.Now().Add(-time.Hour))
	defer cancelExpired()
	for _, m := range t.methods() {
		for _, ctx := range []context.Context{cancelled, expired} {
			if err := m.call(ctx, store, lease); !errors.Is(err, ctx.Err()) {
				t.Broken(fmt.Sprintf("%s returned the error %v", m.name, err), fmt.Sprintf("an error that matches %q", ctx.Err()))
			}
		}
	}
	lease.MustRelease()
}

// interrupted calls f with a context that ends after d, and tells how late f
// came back. stalled says that another goroutine, which only waited for the
// same context, was late as well: then it was the machine.
func interrupted(t *T, d time.Duration, f func(ctx context.Context) error) (late time.Duration, stalled bool, err error) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var ended, noticed time.Time
	wg.Go(func() { <-ctx.Done(); noticed = time.Now() })
	wg.Go(func() { t.Sleep(d); ended = time.Now(); cancel() })
	err = f(ctx)
	returned := time.Now()
	wg.Wait()
	if err != nil && ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
		t.Broken(fmt.Sprintf("the error %q after ctx had been cancelled", err), "an error that matches context.Canceled")
	}
	if err != nil && returned.Before(ended) {
		t.Broken(fmt.Sprintf("the error %q before ctx ended", err), "an answer")
	}
	return returned.Sub(ended), noticed.Sub(ended) > endBound/5, err
}

// typical measures how long a call of store takes.
func typical(t *T, store core.LockStore) time.Duration {
	var took []time.Duration
	key := t.Key()
	for range 11 {
		lease := t.Acquire(store, key, t.Long())
		took = append(took, lease.Answered.Sub(lease.Sent))
		lease.MustRelease()
	}
	slices.Sort(took)
	return max(took[len(took)/2], 10*time.Microsecond)
}

func checkContextEnds(t *T) {
	store := t.Open()
	lease := t.Acquire(store, t.Key(), t.Long())
	took := typical(t, store)
	var judged, late int
	var latest time.Duration
	for range 60 {
		for _, m := range t.methods() {
			d, stalled, _ := interrupted(t, rand.N(2*took), func(ctx context.Context) error { return m.call(ctx, store, lease) })
			if stalled {
				continue
			}
			judged++
			if d > endBound {
				late++
			}
			latest = max(latest, d)
		}
	}
	if judged < 30 {
		t.Retry("in all but %d calls the machine was too slow to notice the end of a context", judged)
	}
	if late > judged/8 {
		t.Broken(fmt.Sprintf("%d of %d calls returned later than %v after the end of ctx, one %v later", late, judged, endBound, latest),
			fmt.Sprintf("at most %v later", endBound))
	}
	lease.MustRelease()
}

func checkContextEndsInSilence(t *T) {
	store := t.Open()
	lease := t.Acquire(store, t.Key(), t.Long())
	resume := sync.OnceFunc(t.Config.Pause(t.rec))
	defer resume()
	for _, m := range t.methods() {
		// The quickest of several sets: one may meet a stall, which is not the
		// store's fault, and which its observers need not have met.
		const sets, calls = 3, 9
		quickest := time.Duration(-1)
		for set := 0; set < sets && (quickest < 0 || quickest > endBound); set++ {
			lates := make([]time.Duration, calls)
			stalled, answered := make([]bool, calls), make([]bool, calls)
			t.Go(calls, func(i int) {
				var err error
				lates[i], stalled[i], err = interrupted(t, 100*time.Millisecond, func(ctx context.Context) error { return m.call(ctx, store, lease) })
				answered[i] = err == nil
			})
			if slices.Contains(answered, true) {
				t.Fatalf("%s was answered: Config.Pause does not silence the server", m.name)
			}
			if slices.Contains(stalled, true) {
				continue
			}
			slices.Sort(lates)
			if median := lates[calls/2]; quickest < 0 || median < quickest {
				quickest = median
			}
		}
		switch {
		case quickest < 0:
			t.Retry("each time %s was called the machine was too slow to notice the end of a context", m.name)
		case quickest > endBound:
			t.Broken(fmt.Sprintf("%s returned %v after the end of ctx, while the server was silent", m.name, quickest.Round(time.Millisecond)),
				fmt.Sprintf("at most %v", endBound))
		}
	}
	resume()
	t.reconnect(store)
}

func checkReleaseUndoesUnknownAcquire(t *T) {
	a, b := t.Open(), t.Open()
	took := typical(t, a)
	// Between the call that was given up and its Release the server gets time
	// to execute it. If that was too little, it gets more.
	settle := 4*took + 10*time.Millisecond
	for range 60 {
		for {
			key, owner := t.Key(), t.Owner()
			_, _, err := interrupted(t, rand.N(2*took), func(ctx context.Context) error {
				_, err := a.Acquire(ctx, key, owner, t.Long())
				return err
			})
			if err == nil {
				t.MustRelease(a, key, owner)
			} else {
				t.Sleep(settle)
				t.MustRelease(a, key, owner)
			}
			try := t.Try(b, key, t.Owner(), t.Long())
			if try.Acquired {
				t.MustRelease(b, key, try.Owner)
				break
			}
			if settle > time.Second {
				t.Broken(fmt.Sprintf("an Acquire returned the error %v, its owner's Release came %v later and returned nil, and the key is held", err, settle), "free")
			}
			settle *= 4
		}
	}
}

func checkLateAcquireEndsByItself(t *T) {
	a, b := t.Open(), t.Open()
	took := typical(t, a)
	t.Go(40, func(int) {
		key := t.Key()
		_, _, _ = interrupted(t, rand.N(2*took), func(ctx context.Context) error {
			_, err := a.Acquire(ctx, key, t.Owner(), t.TTL())
			return err
		})
		t.mustEnd(b, key, time.Now())
	})
}

// mustEnd waits until key is free. When the server executed the call that may
// hold it is not known, so that the bound is a generous one.
func (t *T) mustEnd(store core.LockStore, key string, since time.Time) {
	bound := 2*t.TTL() + 2*t.Slack() + 10*time.Second
	for {
		sent := time.Now()
		if try := t.Try(store, key, t.Owner(), t.Long()); try.Acquired {
			t.MustRelease(store, key, try.Owner)
			return
		}
		if sent.Sub(since) > bound {
			t.Broken(fmt.Sprintf("the key is held %v after the caller gave up acquiring it for %v", sent.Sub(since).Round(time.Millisecond), t.TTL()), "free after that time")
		}
		t.Sleep(t.TTL() / 20)
	}
}

func checkAcquireInSilenceEndsByItself(t *T) {
	a, b := t.Open(), t.Open()
	resume := sync.OnceFunc(t.Config.Pause(t.rec))
	defer resume()
	keys := make([]string, 8)
	t.Go(len(keys), func(i int) {
		keys[i] = t.Key()
		owner := t.Owner()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := a.Acquire(ctx, keys[i], owner, t.TTL()); err == nil {
			t.Fatal("Acquire was answered: Config.Pause does not silence the server")
		}
		// As core.Strategy does. It has no answer either.
		ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_ = a.Release(ctx, keys[i], owner)
	})
	resume()
	since := time.Now()
	t.reconnect(b)
	t.Go(len(keys), func(i int) { t.mustEnd(b, keys[i], since) })
}
