package conformance

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasekit/leasekit/core"
)

// poll is the longest that a waiter sleeps between two tries, and so the most
// that a lost signal may cost.
const poll = time.Second

func notifierRules() []Rule {
	rules := group("Notifier", Rule{
		Name:     "SignalAfterRelease",
		Sentence: "A value arrives whenever the key may have become free: after each release, of whichever client.",
		Check:    checkSignalAfterRelease,
	}, Rule{
		Name:     "SubscribedWhenItReturns",
		Sentence: "Subscribe returns when the server has confirmed the subscription, so that no release after its return goes unnoticed.",
		Check:    checkSubscribedWhenItReturns,
	}, Rule{
		Name:     "SignalWaitsForReader",
		Sentence: "A signal that comes while the waiter is busy with a try is there when it looks again; several may be merged into one.",
		Check:    checkSignalWaitsForReader,
	}, Rule{
		Name:     "SignalReachesEveryWaiter",
		Sentence: "A value arrives on the channel of every subscription to the key: the waiter that is woken may be one that has given up.",
		Check:    checkSignalReachesEveryWaiter,
	}, Rule{
		Name:     "ExpiryIsAnnounced",
		Sentence: "Waiters also wake when the holder's lease runs out: by a signal, or by Grant.Left of the failed try.",
		Check:    checkExpiryIsAnnounced,
	}, Rule{
		Name:     "SubscribeContext",
		Sentence: "ctx bounds the call of Subscribe, not the subscription, which lives until stop is called; a ctx that has ended is an error, and so is an invalid key.",
		Check:    checkSubscribeContext,
	}, Rule{
		Name:     "StopSparesOthers",
		Sentence: "stop ends its own subscription and no other, and may be called more than once, from any goroutine.",
		Check:    checkStopSparesOthers,
	}, Rule{
		Name:     "StopLeavesNothing",
		Sentence: "stop leaves nothing behind: no goroutine for each subscription that there ever was.",
		Busy:     true,
		Check:    checkStopLeavesNothing,
	}, Rule{
		Name:     "HandOvers",
		Sentence: "A waiter that has subscribed gets the key at a release; a lost signal costs at most one poll.",
		Busy:     true,
		Check:    checkHandOvers,
	}, Rule{
		Name:     "SignalAfterRestart",
		Sentence: "A subscription outlives a restart of the server, or its channel is closed, which means that no signals will come any more.",
		Alone:    true,
		Last:     true,
		Check:    checkSignalAfterRestart,
	})
	notifies := needsCapability[core.Notifier]("Notifier")
	for i := range rules {
		rules[i].Needs = notifies
	}
	last := &rules[len(rules)-1]
	last.Needs = func(c *Config) string {
		if why := notifies(c); why != "" {
			return why
		}
		return needs("Restart", func(c *Config) bool { return c.Restart != nil })(c)
	}
	return rules
}

// subscribe subscribes to key and stops at the end of the attempt.
func (t *T) subscribe(store core.LockStore, key string) (signals <-chan struct{}, stop func()) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	signals, stop, err := capability[core.Notifier](t, store).Subscribe(ctx, key)
	if err != nil {
		t.Broken(fmt.Sprintf("Subscribe returned the error %q", err), "a subscription")
	}
	if signals == nil || stop == nil {
		t.Broken("Subscribe returned a nil channel or function, and no error", "a subscription")
	}
	t.Cleanup(stop)
	return signals, stop
}

// mustSignal waits for a signal. One that comes later than a poll, but comes,
// is the machine's fault as likely as not.
func (t *T) mustSignal(signals <-chan struct{}, after string) {
	sent := time.Now()
	timer := time.NewTimer(10 * poll)
	defer timer.Stop()
	select {
	case _, open := <-signals:
		if !open {
			t.Broken("the channel was closed, although the server is well, "+after, "a signal")
		}
		if late := time.Since(sent); late > poll+t.Slack() {
			t.Retry("a signal came %v %s", late.Round(time.Millisecond), after)
		}
	case <-timer.C:
		t.Broken(fmt.Sprintf("no signal within %v %s", 10*poll, after), fmt.Sprintf("one within a poll, %v", poll))
	}
}

// drain takes what signals there are; hints may be spurious.
func drain(signals <-chan struct{}) {
	for {
		select {
		case _, open := <-signals:
			if !open {
				return
			}
		default:
			return
		}
	}
}

func checkSignalAfterRelease(t *T) {
	a, b := t.Open(), t.Open()
	key := t.Key()
	signals, _ := t.subscribe(b, key)
	for i := range 20 {
		holder := []core.LockStore{a, b}[i%2]
		lease := t.Acquire(holder, key, t.Long())
		// What earlier releases caused may still be on its way, so that a
		// signal is no proof; the last of many that are lost shows all the same.
		drain(signals)
		if i%4 == 3 {
			lease.MustRenew(t.Long())
		}
		lease.MustRelease()
		t.mustSignal(signals, "after a release")
	}
}

func checkSubscribedWhenItReturns(t *T) {
	a, b := t.Open(), t.Open()
	t.Go(4, func(int) {
		for range 10 {
			// A new key each time: its subscription is a new one.
			lease := t.Acquire(a, t.Key(), t.Long())
			signals, stop := t.subscribe(b, lease.Key)
			lease.MustRelease()
			t.mustSignal(signals, "after a release right after Subscribe had returned")
			stop()
		}
	})
}

func checkSignalWaitsForReader(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	signals, _ := t.subscribe(b, lease.Key)
	lease.MustRelease()
	t.Sleep(100 * time.Millisecond) // nobody reads
	t.mustSignal(signals, "after a release while the waiter was busy")
	// Nor does a waiter that never reads keep another from its signals.
	lease = t.Acquire(a, lease.Key, t.Long())
	other, _ := t.subscribe(b, lease.Key)
	for range 20 {
		lease.MustRelease()
		t.mustSignal(other, "after a release while another waiter was busy")
		lease = t.Acquire(a, lease.Key, t.Long())
	}
	lease.MustRelease()
}

func checkSignalReachesEveryWaiter(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	waiters := make([]<-chan struct{}, 16)
	for i := range waiters {
		waiters[i], _ = t.subscribe([]core.LockStore{a, b}[i%2], lease.Key)
	}
	lease.MustRelease()
	for i, signals := range waiters {
		t.mustSignal(signals, fmt.Sprintf("for waiter %d of %d", i+1, len(waiters)))
	}
}

func checkExpiryIsAnnounced(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.TTL())
	signals, _ := t.subscribe(b, lease.Key)
	try := t.Try(b, lease.Key, t.Owner(), t.TTL())
	if try.Acquired {
		t.Retry("the lease was over before the second try was answered")
	}
	wake := lease.NotAfter().Add(t.Slack())
	if try.Left > 0 {
		// The waiter sleeps for Left, and then it must succeed.
		wake = try.Answered.Add(try.Left + t.Slack())
	}
	timer := time.NewTimer(time.Until(wake))
	defer timer.Stop()
	select {
	case <-signals: // may be spurious
		t.SleepUntil(lease.NotAfter())
	case <-timer.C:
		if try.Left == 0 {
			t.Broken(fmt.Sprintf("Left 0, and no signal %v after a lease of %v was granted", time.Since(lease.Answered).Round(time.Millisecond), lease.TTL), "one of the two")
		}
	}
	if next := t.Try(b, lease.Key, t.Owner(), t.Long()); !next.Acquired {
		t.Broken(fmt.Sprintf("a waiter that slept for the Left of %v that a try on a lease of %v was told found the key held", try.Left, lease.TTL), "acquired")
	}
}

func checkSubscribeContext(t *T) {
	a, b := t.Open(), t.Open()
	n := capability[core.Notifier](t, b)
	ctx, cancel := context.WithCancel(t.Context())
	lease := t.Acquire(a, t.Key(), t.Long())
	signals, stop, err := n.Subscribe(ctx, lease.Key)
	if err != nil {
		t.Broken(fmt.Sprintf("Subscribe returned the error %q", err), "a subscription")
	}
	defer stop()
	cancel()
	t.Sleep(20 * time.Millisecond)
	lease.MustRelease()
	t.mustSignal(signals, "after a release, when the ctx of Subscribe had ended")

	if _, stop, err := n.Subscribe(ctx, t.Key()); err == nil {
		stop()
		t.Broken("Subscribe with a ctx that has ended returned no error", "one that matches context.Canceled")
	} else if !matchesEnd(ctx, err) {
		t.Broken(fmt.Sprintf("Subscribe with a ctx that has ended returned the error %q", err), "one that matches context.Canceled")
	}
	if _, stop, err := n.Subscribe(t.Context(), ""); err == nil {
		stop()
		t.Broken("Subscribe to an empty key returned no error", "one that matches core.ErrInvalid")
	}
}

func checkStopSparesOthers(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	_, first := t.subscribe(b, lease.Key)
	signals, _ := t.subscribe(b, lease.Key)
	_, third := t.subscribe(b, lease.Key)
	_, otherKey := t.subscribe(b, t.Key())
	t.Go(4, func(int) {
		for _, stop := range []func(){first, third, otherKey} {
			stop()
		}
	})
	lease.MustRelease()
	t.mustSignal(signals, "after a release, when other subscriptions to the key had been stopped")
	// Subscribing again to what was stopped gives a subscription that works.
	lease = t.Acquire(a, lease.Key, t.Long())
	again, _ := t.subscribe(b, lease.Key)
	first()
	lease.MustRelease()
	t.mustSignal(again, "after a release, for a subscription made after another had been stopped")
}

func checkStopLeavesNothing(t *T) {
	const subscriptions, kept = 100, 10
	fam := newFamily()
	fam.do(t.Context(), func(ctx context.Context) {
		store := t.Open()
		use := func(n int) {
			for range n {
				key := t.Key()
				for range 2 {
					_, stop, err := capability[core.Notifier](t, store).Subscribe(ctx, key)
					if err != nil {
						t.Broken(fmt.Sprintf("Subscribe returned the error %q", err), "a subscription")
					}
					stop()
					stop()
				}
			}
		}
		use(5)
		n, _ := fam.alive()
		use(subscriptions)
		fam.mustFall(t, n+kept, fmt.Sprintf("%d subscriptions had been stopped", 2*subscriptions))
	})
}

// checkHandOvers lets waiters wait as core.Strategy does, but sleep only until
// a signal comes, and measures from the release to the next holder.
func checkHandOvers(t *T) {
	clients := openSome(t, 4)
	key := t.Key()
	total := int64(t.Config.HandOvers)
	enough := t.Deadline(time.Minute)
	var handOvers, polled atomic.Int64
	// record is told of each acquisition, and of each release before it
	// happens.
	var mu sync.Mutex
	var released time.Time
	var worst time.Duration
	slow := int64(0)
	// A machine that stands still now and then is slow now and then.
	few := max(total/100, 3)
	record := func(acquired, releasing time.Time) {
		mu.Lock()
		defer mu.Unlock()
		if !released.IsZero() && !acquired.IsZero() {
			took := acquired.Sub(released)
			worst = max(worst, took)
			if took > poll+t.Slack() {
				slow++
			}
		}
		released = releasing
	}
	t.Go(len(clients), func(i int) {
		store := clients[i]
		signals, stop := t.subscribe(store, key)
		defer stop()
		woken := true // by a signal, or not asleep at all
		for handOvers.Load() < total && !enough() && !t.rec.over() {
			try := t.Try(store, key, t.Owner(), t.Long())
			if !try.Acquired {
				woken = t.waitForSignal(signals)
				continue
			}
			record(try.Answered, time.Time{})
			if !woken && polled.Add(1) > few {
				t.MustRelease(store, key, try.Owner)
				t.Broken(fmt.Sprintf("in %d of the first %d hand-overs there was no signal, and the next holder had to poll", polled.Load(), handOvers.Load()+1), "woken by the release")
			}
			woken = true
			n := handOvers.Add(1)
			// Give the others the time to fail and wait.
			t.Sleep(100 * time.Microsecond)
			record(time.Time{}, time.Now())
			t.MustRelease(store, key, try.Owner)
			// Stand back until one of the others has it: who has just released
			// is awake, and would cover up for a signal that does not come.
			for until := time.Now().Add(2 * poll); n < total && handOvers.Load() == n && time.Now().Before(until); {
				t.Sleep(100 * time.Microsecond)
			}
		}
	})
	t.Logf("%d hand-overs between %d clients, the slowest %v", handOvers.Load(), len(clients), worst.Round(time.Microsecond))
	if slow > few {
		t.Retry("%d hand-overs took longer than a poll, the slowest %v", slow, worst)
	}
	if n := handOvers.Load(); n < min(total, 60) {
		t.Retry("%d hand-overs in a minute", n) // each of them took longer than a poll
	}
}

// waitForSignal waits for a poll at most, and tells whether there was a signal.
func (t *T) waitForSignal(signals <-chan struct{}) bool {
	timer := time.NewTimer(poll)
	defer timer.Stop()
	var open bool
	select {
	case _, open = <-signals:
	case <-timer.C:
		select { // both, when the machine stood still
		case _, open = <-signals:
		default:
			return false
		}
	}
	if !open {
		t.Broken("the channel was closed, although the server is well", "signals")
	}
	return true
}

func checkSignalAfterRestart(t *T) {
	a, b := t.Open(), t.Open()
	key := t.Key()
	signals, _ := t.subscribe(b, key)
	t.Config.Restart(t.rec)
	t.reconnect(a)
	t.reconnect(b)
	drain(signals)
	// The client needs a while to connect and subscribe again; polls fill it.
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		t.Acquire(a, key, t.Long()).MustRelease()
		timer := time.NewTimer(200 * time.Millisecond)
		select {
		case <-signals: // or closed: the waiter knows that it has to poll
			timer.Stop()
			return
		case <-timer.C:
		}
	}
	t.Broken("30 s after the server was restarted no release is signalled, and the channel is open", "signals, or a closed channel")
}
