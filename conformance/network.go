package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/leasekit/leasekit/conformance/faults"
	"github.com/leasekit/leasekit/core"
)

func faultRules() []Rule {
	rules := group("Faults", Rule{
		Name:     "DriverResend",
		Sentence: "If the client library sends a request again after it lost the answer, then while the lease won by a call is live, another delivery of that call returns its token, without breaking NotReentrant; a renewal is not false, and a release is done.",
		Check:    checkDriverResend,
	}, Rule{
		Name:     "UnknownAcquire",
		Sentence: "If the server executed a call whose answer was lost before the Release(owner) that follows it, the Release undoes it. A Strategy sends that Release: no live lease is left.",
		Check:    checkUnknownAcquire,
	}, Rule{
		Name:     "LossOnSilence",
		Sentence: "When the server cannot be reached the callback is cancelled at the latest ttl after the last request answered yes was sent.",
		Check:    checkLossOnSilence,
	}, Rule{
		Name:     "RenewalsSurviveOutage",
		Sentence: "A renewal that errors or is not answered is tried again until the deadline: an outage of ttl/2 is no loss.",
		Check:    checkRenewalsSurviveOutage,
	}, Rule{
		Name:     "ReleaseLost",
		Sentence: "A release whose answer was lost has freed the key at once; one that did not reach the server is no nil, the key is free when the lease ends, and the release never touches a successor, however late it arrives.",
		Check:    checkReleaseLost,
	}, Rule{
		Name:     "ContextEndsInBlackhole",
		Sentence: "Every call returns within 50 ms after its ctx ends, with an error matching ctx.Err(), also when nothing gets through to the server, on an open connection or a new one. Nothing is answered that the server did not say.",
		Check:    checkContextEndsInBlackhole,
	})
	for i := range rules {
		rules[i].Needs = needs("Faults", func(c *Config) bool { return c.Faults.Open != nil })
	}
	return rules
}

// network is a client whose connections can be broken, and one that sees what
// the server really has.
type network struct {
	t     *T
	proxy *faults.Proxy
	store core.LockStore // through the proxy
	view  core.LockStore // not through it
}

func (t *T) network() *network {
	t.Helper()
	n := &network{t: t, proxy: faults.NewProxy(t, t.Config.Faults.Addr), view: t.Open()}
	n.store = t.Config.Faults.Open(t.rec, n.proxy.Addr())
	n.warm()
	if n.proxy.Stats().Accepted == 0 {
		t.Fatal("Config.Faults.Open did not connect to the address that it was given")
	}
	lease := t.Acquire(n.store, t.Key(), t.Long())
	if t.Try(n.view, lease.Key, t.Owner(), t.TTL()).Acquired {
		t.Fatal("Config.Open and Config.Faults.Open do not reach the same backend")
	}
	lease.MustRelease()
	return n
}

// warm makes the client do once all that it does only once: connect, load
// scripts, prepare statements.
func (n *network) warm() {
	t := n.t
	t.reconnect(n.store)
	lease := t.Acquire(n.store, t.Key(), t.Long())
	t.Try(n.store, lease.Key, t.Owner(), t.TTL())
	lease.MustRenew(t.Long())
	lease.MustRelease()
}

// heal ends all faults and waits until the client works again.
func (n *network) heal() {
	n.proxy.Clear()
	n.t.reconnect(n.store)
}

// call is a call of a store that is under way in a goroutine of its own.
type call struct {
	cancel context.CancelFunc
	done   chan struct{}
	yes    bool // valid when done, like those below
	token  int64
	err    error
}

// start makes a call, which ends by itself after a time that no client library
// needs to send something again.
func (t *T) start(f func(ctx context.Context, c *call)) *call {
	ctx, cancel := context.WithTimeout(t.Context(), 2*ioTimeout)
	c := &call{cancel: cancel, done: make(chan struct{})}
	t.Cleanup(func() { cancel(); <-c.done })
	go func() {
		defer close(c.done)
		f(ctx, c)
	}()
	return c
}

func (t *T) startAcquire(store core.LockStore, key, owner string, ttl time.Duration) *call {
	return t.start(func(ctx context.Context, c *call) {
		var g core.Grant
		g, c.err = store.Acquire(ctx, key, owner, ttl)
		c.yes, c.token = g.Acquired, g.Token
	})
}

func (t *T) startRenew(l *Lease) *call {
	return t.start(func(ctx context.Context, c *call) { c.yes, c.err = l.Store.Renew(ctx, l.Key, l.Owner, t.Long()) })
}

func (t *T) startRelease(l *Lease) *call {
	return t.start(func(ctx context.Context, c *call) { c.err = l.Store.Release(ctx, l.Key, l.Owner) })
}

// wait waits for the answer.
func (c *call) wait() { <-c.done }

// giveUp ends the call's context and waits for its return.
func (c *call) giveUp() {
	c.cancel()
	<-c.done
}

// mustSpring waits until trap has sprung on a request of c.
func (t *T) mustSpring(trap *faults.Trap, c *call) {
	select {
	case <-trap.Sprung():
		return
	case <-c.done:
	}
	select {
	case <-trap.Sprung():
	default:
		t.Fatalf("the call returned (%v), and no request with the key passed the proxy: is the connection encrypted or compressed?", c.err)
	}
}

// mustActSoon waits until the server has executed an acquire whose reply was
// lost. A server that multiplexes sends other things before its answer.
func (n *network) mustActSoon(key string) {
	t := n.t
	t.Sleep(max(10*time.Millisecond, t.TTL()/40)) // TTL grows with each attempt
	if try := t.Try(n.view, key, t.Owner(), t.TTL()); try.Acquired {
		t.Retry("a reply was lost before the server had executed the request")
	}
}

func checkDriverResend(t *T) {
	n := t.network()
	const rounds = 4
	resent := 0
	for range rounds {
		key, owner := t.Key(), t.Owner()

		trap := n.proxy.LoseReply(key)
		c := t.startAcquire(n.store, key, owner, t.Long())
		t.mustSpring(trap, c)
		n.mustActSoon(key)
		n.proxy.Reset()
		c.wait()
		if c.err == nil {
			resent++
			if !c.yes {
				t.Broken("a client that got its lease lost the answer, and was told that the key is held: by itself", "the token, or an error")
			}
			if try := t.Try(n.store, key, owner, t.TTL()); try.Acquired {
				t.Broken(fmt.Sprintf("another call of the same owner was acquired (token %d, the first got %d)", try.Token, c.token), "not acquired: only another delivery of the same call is")
			}
		}
		t.reconnect(n.store)
		lease := &Lease{t: t, Store: n.store, Try: Try{Key: key, Owner: owner, TTL: t.Long(), Sent: time.Now(), Answered: time.Now()}}
		lease.MustRenew(t.Long())

		trap = n.proxy.LoseReply(key)
		c = t.startRenew(lease)
		t.mustSpring(trap, c)
		n.proxy.Reset()
		c.wait()
		if c.err == nil && !c.yes {
			t.Broken("a renewal whose answer was lost was false", "true, or an error")
		}
		t.reconnect(n.store)
		lease.MustBeHeld(n.view)

		trap = n.proxy.LoseReply(key)
		c = t.startRelease(lease)
		t.mustSpring(trap, c)
		t.Sleep(10 * time.Millisecond)
		n.proxy.Reset()
		c.wait()
		t.reconnect(n.store)
		if c.err != nil {
			lease.MustRelease()
		}
		next := t.Try(n.view, key, t.Owner(), t.Long())
		switch {
		case !next.Acquired:
			t.Broken("the key is held after a release whose answer was lost", "free")
		case c.token >= next.Token:
			t.Broken(fmt.Sprintf("the next owner got token %d, after %d", next.Token, c.token), "a greater one")
		}
		t.MustRelease(n.view, key, next.Owner)
	}
	t.Logf("the client library sent %d of %d acquires again", resent, rounds)
}

func checkUnknownAcquire(t *T) {
	n := t.network()
	for range 4 {
		key, owner := t.Key(), t.Owner()
		trap := n.proxy.LoseReply(key)
		c := t.startAcquire(n.store, key, owner, t.Long())
		t.mustSpring(trap, c)
		n.mustActSoon(key)
		c.giveUp()
		if c.err == nil && !c.yes {
			t.Broken("the answer to Acquire was lost, and it said that the key is held", "an error: the outcome is unknown")
		}
		n.heal()
		t.MustRelease(n.store, key, owner)
		n.mustBeFree(key, "an Acquire whose answer was lost, and its owner's Release")
	}

	// What a strategy makes of it: the caller gives up, or the connection ends.
	for _, end := range []func(cancel context.CancelFunc){
		func(cancel context.CancelFunc) { cancel() },
		func(context.CancelFunc) { n.proxy.Set(faults.Refuse()); n.proxy.Reset() },
	} {
		key := t.Key()
		healing := &healing{LockStore: n.store, n: n, released: make(chan struct{})}
		ttl := max(5*t.TTL(), 3*time.Second)
		strategy := t.strategy(healing, ttl)
		trap := n.proxy.LoseReply(key)
		ran := false
		c := t.start(func(ctx context.Context, c *call) {
			c.err = strategy.Do(ctx, key, func(context.Context) error { ran = true; return nil })
		})
		t.mustSpring(trap, c)
		n.mustActSoon(key)
		end(c.cancel)
		c.wait()
		if ran != (c.err == nil) {
			t.Broken(fmt.Sprintf("Do returned %v, and its callback ran: %v", c.err, ran), "an error if and only if it did not run")
		}
		select {
		case <-healing.released: // Do need not wait for that
		case <-t.Context().Done():
			t.Broken("no Release followed an Acquire with an error", "a Release")
		}
		n.heal()
		n.mustBeFree(key, "a failed Do")
	}
}

// healing is a store whose network is mended before it releases.
type healing struct {
	core.LockStore
	n        *network
	once     sync.Once
	released chan struct{} // closed when a Release has returned
}

func (h *healing) Release(ctx context.Context, key, owner string) error {
	// That it is called is what matters here, not how soon a client dials again.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(h.n.t.Context(), cancel)()
	h.n.proxy.Clear()
	for h.LockStore.Release(ctx, h.n.t.Key(), owner) != nil && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	defer h.once.Do(func() { close(h.released) })
	return h.LockStore.Release(ctx, key, owner)
}

// mustBeFree checks that the key can be had at once.
func (n *network) mustBeFree(key, after string) {
	t := n.t
	try := t.Try(n.view, key, t.Owner(), t.Long())
	if !try.Acquired {
		t.Broken(fmt.Sprintf("the key is held after %s (Left %v)", after, try.Left), "free")
	}
	t.MustRelease(n.view, key, try.Owner)
}

// strategy makes one that logs nothing: its renewals are meant to fail.
func (t *T) strategy(store core.LockStore, ttl time.Duration) *core.Strategy {
	t.Helper()
	s, err := core.NewStrategy(store, core.Options{TTL: ttl, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// watched is a store that remembers how its owner's lease was confirmed.
type watched struct {
	core.LockStore
	mu      sync.Mutex
	yes     []Try // calls answered yes
	no      []Try // renewals answered false
	renewed chan struct{}
}

func watch(store core.LockStore) *watched {
	return &watched{LockStore: store, renewed: make(chan struct{}, 1)}
}

func (w *watched) note(list *[]Try, try Try) {
	w.mu.Lock()
	defer w.mu.Unlock()
	*list = append(*list, try)
}

func (w *watched) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	try := Try{Key: key, Owner: owner, TTL: ttl, Sent: time.Now()}
	g, err := w.LockStore.Acquire(ctx, key, owner, ttl)
	try.Answered, try.Grant = time.Now(), g
	if err == nil && g.Acquired {
		w.note(&w.yes, try)
	}
	return g, err
}

func (w *watched) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	try := Try{Key: key, Owner: owner, TTL: ttl, Sent: time.Now()}
	renewed, err := w.LockStore.Renew(ctx, key, owner, ttl)
	try.Answered = time.Now()
	switch {
	case err == nil && renewed:
		w.note(&w.yes, try)
		select {
		case w.renewed <- struct{}{}:
		default:
		}
	case err == nil:
		w.note(&w.no, try)
	}
	return renewed, err
}

// last returns the last confirmation that was sent before the time at, and
// whether anything was confirmed, or denied, that was sent between at and until.
func (w *watched) last(at, until time.Time) (last Try, confirmed, denied bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	during := func(try Try) bool { return try.Sent.After(at) && try.Answered.Before(until) }
	for _, try := range w.yes {
		if !try.Sent.After(at) {
			last = try
		}
	}
	return last, slices.ContainsFunc(w.yes, during), slices.ContainsFunc(w.no, during)
}

// awaitRenewal waits until a renewal has just been confirmed.
func (w *watched) awaitRenewal(ctx context.Context) bool {
	select {
	case <-w.renewed: // perhaps long ago
	default:
	}
	select {
	case <-w.renewed:
		return true
	case <-ctx.Done():
		return false
	}
}

func checkLossOnSilence(t *T) {
	n := t.network()
	w := watch(n.store)
	key := t.Key()
	var silent, lost time.Time
	err := t.strategy(w, t.TTL()).Do(t.Context(), key, func(ctx context.Context) error {
		if !w.awaitRenewal(ctx) {
			return nil
		}
		n.proxy.Set(faults.Blackhole())
		silent = time.Now()
		select {
		case <-ctx.Done():
			lost = time.Now()
		case <-time.After(5*t.TTL() + time.Second):
		}
		return errors.New("cancelled")
	})
	if silent.IsZero() {
		t.Retry("the lease was lost before the first renewal: %v", err)
	}
	last, confirmed, _ := w.last(silent, time.Now())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	renewed, renewErr := n.store.Renew(ctx, key, last.Owner, t.TTL())
	switch {
	case confirmed, renewErr == nil:
		t.Broken(fmt.Sprintf("Renew was %v, and the server could not be reached", confirmed || renewed), "an error")
	case lost.IsZero():
		t.Broken(fmt.Sprintf("the callback was not cancelled within %v after the server could no longer be reached", time.Since(silent).Round(time.Millisecond)),
			fmt.Sprintf("cancelled %v after the last confirmation was sent", t.TTL()))
	case !errors.Is(err, core.ErrLost):
		t.Broken(fmt.Sprintf("Do returned %v", err), "core.ErrLost")
	case lost.After(last.Sent.Add(t.TTL() + t.TTL()/4)):
		t.Retry("the loss was seen %v after the last confirmation was sent", lost.Sub(last.Sent))
	}
	// The last renewal may have been executed, its answer lost.
	last.Answered = silent
	n.heal()
	t.successor(&Lease{t: t, Store: n.view, Try: last}, n.view, tooLate).MustRelease()
}

func checkRenewalsSurviveOutage(t *T) {
	outages := []struct {
		name  string
		begin func(p *faults.Proxy)
	}{
		{"delivered nothing", func(p *faults.Proxy) { p.Set(faults.Silence()) }},
		{"lost everything", func(p *faults.Proxy) { p.Set(faults.Blackhole()) }},
		{"refused connections", func(p *faults.Proxy) { p.Set(faults.Refuse()); p.Reset() }},
	}
	t.Go(len(outages), func(i int) {
		o := outages[i]
		// Client libraries wait a second or two before they connect again,
		// which a longer lease has time for.
		for _, least := range []time.Duration{2 * time.Second, 8 * time.Second} {
			ttl := t.TTL() // in whole ones, which is what the backend can keep
			for ttl < least {
				ttl += t.TTL()
			}
			if t.network().survives(o.name, o.begin, ttl) {
				return
			}
		}
		t.Broken(fmt.Sprintf("the network %s for half of a lease of 8 s, and the lease was lost", o.name), "no loss")
	})
}

// survives reports whether a lease survives an outage of half its time.
func (n *network) survives(name string, begin func(p *faults.Proxy), ttl time.Duration) bool {
	t := n.t
	w := watch(n.store)
	key := t.Key()
	var stall time.Duration
	var began, healed time.Time
	survived := false
	_ = t.strategy(w, ttl).Do(t.Context(), key, func(ctx context.Context) error {
		if !w.awaitRenewal(ctx) {
			return nil
		}
		ticker := time.NewTicker(10 * time.Millisecond)
		defer ticker.Stop()
		// pass lets time pass, and watches whether the machine stands still.
		pass := func(d time.Duration) {
			tick := time.Now()
			for end := tick.Add(d); time.Now().Before(end) && ctx.Err() == nil; {
				<-ticker.C
				stall = max(stall, time.Since(tick))
				tick = time.Now()
			}
		}
		began = time.Now()
		begin(n.proxy)
		pass(ttl / 2)
		n.proxy.Clear()
		healed = time.Now()
		pass(ttl) // without renewals the lease would be lost in half of that
		survived = ctx.Err() == nil
		try := t.Try(n.view, key, t.Owner(), t.TTL())
		last, _, _ := w.last(try.Sent, try.Sent)
		if try.Acquired && (&Lease{t: t, Try: last}).Live(try.Answered) {
			t.Broken("another owner acquired the key of a lease that counts as held", "not acquired")
		}
		return nil
	})
	if began.IsZero() || !survived && stall > ttl/10 {
		t.Retry("the machine stood still for %v of a lease of %v", stall, ttl)
	}
	if _, _, denied := w.last(began, healed); denied {
		t.Broken(fmt.Sprintf("Renew was false while the network %s", name), "an error")
	}
	if _, _, denied := w.last(healed, time.Now()); denied {
		t.Broken(fmt.Sprintf("after the network %s for half of a lease of %v, Renew was false", name, ttl), "true")
	}
	return survived
}

func checkReleaseLost(t *T) {
	n := t.network()
	for range 3 {
		n.checkReleaseReplyLost()
	}
	n.checkReleaseNotSent()
	n.checkReleaseLate()
}

func (n *network) checkReleaseReplyLost() {
	t := n.t
	lease := t.Acquire(n.store, t.Key(), t.Long())
	trap := n.proxy.LoseReply(lease.Key)
	c := t.startRelease(lease)
	t.mustSpring(trap, c)
	// The trap springs when the request has reached the proxy. The lease is long,
	// so that the key is free only because of the release.
	next := t.Try(n.view, lease.Key, t.Owner(), t.Long())
	for late := t.Deadline(20 * time.Second); !next.Acquired; next = t.Try(n.view, lease.Key, t.Owner(), t.Long()) {
		if late() {
			t.Broken("the server got a release whose answer was lost, and 20 s later the key is held", "free")
		}
		t.Sleep(10 * time.Millisecond)
	}
	c.giveUp()
	n.heal()
	lease.MustRelease() // once more, as somebody does who got an error
	successor := &Lease{t: t, Store: n.view, Try: next}
	successor.MustRenew(t.Long())
	successor.MustBeHeld(n.view)
	successor.MustRelease()
}

// heldRelease starts the release of a lease of ttl, whose request trap holds, and
// gives it up: err is what Release returned.
func (n *network) heldRelease(ttl time.Duration) (lease *Lease, trap *faults.Trap, err error) {
	t := n.t
	lease = t.Acquire(n.store, t.Key(), ttl)
	trap = n.proxy.HoldRequest(lease.Key)
	c := t.startRelease(lease)
	t.mustSpring(trap, c)
	c.giveUp()
	return lease, trap, c.err
}

// checkReleaseNotSent has a lease that is long enough to tell whether the release
// was done, however long Release takes to give up.
func (n *network) checkReleaseNotSent() {
	t := n.t
	lease, trap, err := n.heldRelease(t.Long())
	if err == nil { // unless another delivery got through
		try := t.Try(n.view, lease.Key, t.Owner(), t.Long())
		if !try.Acquired && lease.Live(try.Answered) {
			t.Broken("Release was nil, it did not reach the server, and the key is held", "an error")
		}
		if try.Acquired {
			(&Lease{t: t, Store: n.view, Try: try}).MustRelease()
		}
	}
	trap.Deliver()
	n.heal()
	lease.MustRelease()
}

func (n *network) checkReleaseLate() {
	t := n.t
	lease, trap, _ := n.heldRelease(t.TTL())
	next := t.successor(lease, n.view, tooLate)
	next.MustRenew(t.Long())

	// Now the release arrives.
	before := n.proxy.Stats().Requests
	trap.Deliver()
	for stats := n.proxy.Stats(); stats.Requests == before; stats = n.proxy.Stats() {
		if stats.Open == 0 {
			t.Fatal("the proxy lost a request that it held")
		}
		t.Sleep(time.Millisecond)
	}
	t.Sleep(50 * time.Millisecond) // a server needs less
	next.MustRenew(t.Long())
	next.MustBeHeld(n.view)
	next.MustRelease()
	n.heal()
}

func checkContextEndsInBlackhole(t *T) {
	n := t.network()
	lease := t.Acquire(n.store, t.Key(), t.Long())
	for _, connections := range []struct {
		name  string
		begin func()
	}{
		{"open connections lose everything", func() { n.proxy.Set(faults.Blackhole()) }},
		{"new connections lose everything", func() { n.proxy.Set(faults.Blackhole()); n.proxy.Reset() }},
	} {
		connections.begin()
		for _, m := range t.methods() {
			for _, how := range []string{"cancelled", "deadline"} {
				n.mustEndInTime(m, lease, how == "deadline", fmt.Sprintf("ctx was over (%s), while %s", how, connections.name))
			}
		}
		n.heal()
	}
	lease.MustRenew(t.Long())
	lease.MustRelease()
}

// mustEndInTime makes calls that get no answer, until one ends as it has to.
// Between the end of a context and the return of a call several goroutines have
// to run; on a busy machine one of them is late now and then, or a library's own
// timer for the same moment is early. A store that does not mind its context
// fails always, also when a plain read from the same proxy returns in time.
func (n *network) mustEndInTime(m method, lease *Lease, deadline bool, when string) {
	t := n.t
	soonest := time.Duration(math.MaxInt64)
	var wrong error
	judged := 0
	for range 2 * maxAttempts {
		const calls, reads = 4, 2
		var lates [calls + reads]time.Duration
		var errs [calls]error
		t.Go(calls+reads, func(i int) {
			if i >= calls {
				lates[i], _ = n.unanswered(deadline, n.read)
				return
			}
			lates[i], errs[i] = n.unanswered(deadline, func(ctx context.Context) error {
				err := m.call(ctx, n.store, lease)
				if err == nil {
					t.Broken(m.name+" was answered, and the server could not be reached", "an error")
				}
				return err
			})
		})
		for i := range calls {
			if errs[i] == nil && lates[i] <= endBound {
				return
			}
		}
		if slices.Max(lates[calls:]) > endBound/5 {
			continue // the machine is to blame
		}
		judged++
		soonest = min(soonest, slices.Min(lates[:calls]))
		wrong = errors.Join(errs[:]...)
	}
	switch {
	case judged < 2:
		t.Retry("the machine was too slow to notice the end of a context")
	case wrong != nil:
		t.Broken(fmt.Sprintf("%s returned the error %q after its %s", m.name, wrong, when), "one that matches ctx.Err()")
	default:
		t.Broken(fmt.Sprintf("%s returned %v after its %s", m.name, soonest.Round(time.Millisecond), when), fmt.Sprintf("at most %v", endBound))
	}
}

// read is the least that a call through the proxy has to do.
func (n *network) read(ctx context.Context) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", n.proxy.Addr())
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err = conn.Read(make([]byte, 1))
	return cmp.Or(ctx.Err(), err)
}

// unanswered makes a call that gets no answer, and tells how long after the end
// of its context it returned, and its error if that was a wrong one.
func (n *network) unanswered(deadline bool, f func(ctx context.Context) error) (time.Duration, error) {
	const patience = 100 * time.Millisecond
	ctx, cancel := context.WithCancel(n.t.Context())
	if deadline {
		ctx, cancel = context.WithTimeout(n.t.Context(), patience)
	}
	defer cancel()
	ended := make(chan time.Time, 1)
	if at, ok := ctx.Deadline(); deadline && ok {
		ended <- at
	} else {
		timer := time.AfterFunc(patience, func() { ended <- time.Now(); cancel() })
		defer timer.Stop()
	}
	err := f(ctx)
	returned := time.Now()
	if ctx.Err() == nil { // an error of the network: that is in time
		return 0, nil
	}
	over := <-ended
	if !errors.Is(err, ctx.Err()) && returned.After(over) {
		return returned.Sub(over), err
	}
	return returned.Sub(over), nil
}
