package history

import (
	"cmp"
	"context"
	cryptorand "crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
)

// The values of a [Plan] that are left zero.
const (
	// DefaultClients and DefaultKeys make three clients meet on a key on
	// average, which finds what two cannot and is searched in no time.
	DefaultClients = 12
	DefaultKeys    = 4
	// DefaultCallsPerKey is some dozen leases' lives.
	DefaultCallsPerKey = 80
	// DefaultAbandon gives up one call in twenty.
	DefaultAbandon = 0.05

	// minTTL is the shortest lease whose life has room for some calls.
	minTTL = 10 * time.Millisecond
	// maxPause bounds the usual pause between two calls of a client.
	maxPause = 20 * time.Millisecond
	// maxUnknown is how many calls of unknown outcome a key may have before it
	// is left alone: the more there are, the less its answers prove.
	maxUnknown = 12
)

// Plan says what [Drive] does. The zero value means the defaults.
type Plan struct {
	// Seed of the choices that clients make. What comes of them depends on
	// time, so that the same seed does not give the same history, except in a
	// synctest bubble. Default 0: a random one, which the [Report] names.
	Seed uint64

	// Clients is how many callers there are, Keys how many keys they share at
	// a time. A key is used for CallsPerKey calls, checked, and replaced.
	// Default [DefaultClients], [DefaultKeys] and [DefaultCallsPerKey].
	Clients, Keys, CallsPerKey int

	// TTL is the shortest lease; others are two and three times as long.
	// Default conformance.DefaultTTL.
	TTL time.Duration

	// Timeout bounds each call. Default TTL.
	Timeout time.Duration

	// Abandon is the share of the calls that is given up within a millisecond
	// or so, which makes their outcome unknown. Default [DefaultAbandon];
	// negative for none.
	Abandon float64

	// Calls ends the drive after so many, For after that time. Default 0: it
	// goes on until its context ends.
	Calls int
	For   time.Duration

	// Faults are switched on and off at random, one at a time, each for a part
	// of TTL.
	Faults []Fault

	// Check configures the checker.
	Check Options

	// Progress, if set, is called about every second, and at the end, from one
	// goroutine.
	Progress func(Report)
}

func (p *Plan) fill() error {
	for _, n := range []int{p.Clients, p.Keys, p.CallsPerKey, p.Calls} {
		if n < 0 {
			return errors.New("history: a negative number in Plan")
		}
	}
	if p.Seed == 0 {
		p.Seed = rand.Uint64()
	}
	p.Clients = cmp.Or(p.Clients, DefaultClients)
	p.Keys = cmp.Or(p.Keys, DefaultKeys)
	p.CallsPerKey = cmp.Or(p.CallsPerKey, DefaultCallsPerKey)
	p.TTL = cmp.Or(p.TTL, conformance.DefaultTTL)
	p.Timeout = cmp.Or(p.Timeout, p.TTL)
	p.Abandon = cmp.Or(p.Abandon, DefaultAbandon)
	p.Check.fill()
	if p.Check.Slack < 0 {
		return fmt.Errorf("history: Plan.Check.Slack %v: use 0 for the default of %v, or more", p.Check.Slack, conformance.DefaultSlack)
	}
	if p.TTL < minTTL {
		return fmt.Errorf("history: Plan.TTL %v: use at least %v", p.TTL, minTTL)
	}
	return nil
}

// Fault is something that [Drive] breaks on purpose.
type Fault struct {
	// Name as it appears in reports and pictures.
	Name string
	// Breaks and Clients as in [FaultSpan].
	Breaks  bool
	Clients []int
	// Begin breaks it, and returns what mends it again.
	Begin func() (end func())
}

// Report is what [Drive] did and found.
type Report struct {
	// Seed of the plan.
	Seed uint64
	// Elapsed is how long it took.
	Elapsed time.Duration
	// Result of the histories that have been checked so far.
	Result
	// Answers counts the calls by kind and answer: "acquire yes", "acquire
	// no", "acquire unknown", ….
	Answers map[string]int
	// Faults counts how often each was switched on.
	Faults map[string]int
}

// String sums r up in a few lines.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v\nseed %d, %v", r.Result, r.Seed, r.Elapsed.Round(time.Millisecond))
	for _, list := range []struct {
		title  string
		counts map[string]int
	}{{"answers", r.Answers}, {"faults", r.Faults}} {
		var parts []string
		for _, name := range slices.Sorted(maps.Keys(list.counts)) {
			parts = append(parts, fmt.Sprintf("%s %d", name, list.counts[name]))
		}
		if len(parts) > 0 {
			fmt.Fprintf(&b, "\n%s: %s", list.title, strings.Join(parts, ", "))
		}
	}
	return b.String()
}

// Drive lets clients call stores as plan says and checks the history of every
// key, until ctx ends, plan.Calls or plan.For is reached, or a violation is found. It returns when all of its goroutines have ended. A violation is in the
// report; an error means that the plan makes no sense or that open failed.
//
// open is called once for each client, before the first call, and may return
// the same store to several. Who made a store closes it.
func Drive(ctx context.Context, open func(client int) (core.LockStore, error), plan Plan) (Report, error) {
	if err := plan.fill(); err != nil {
		return Report{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if plan.For > 0 {
		ctx, cancel = context.WithTimeout(ctx, plan.For)
		defer cancel()
	}
	d := &drive{
		plan:     plan,
		start:    time.Now(),
		cancel:   cancel,
		recorder: NewRecorder(),
		rand:     random(plan.Seed, 0),
		finished: make(chan History, plan.Keys),
		report:   Report{Seed: plan.Seed, Answers: make(map[string]int), Faults: make(map[string]int)},
	}
	for n := range plan.Keys {
		d.keys = append(d.keys, d.newKey(n))
	}
	var clients []*client
	for i := range plan.Clients {
		store, err := open(i)
		if err != nil {
			return Report{}, err
		}
		clients = append(clients, &client{
			drive: d,
			store: d.recorder.Record(store, i),
			rand:  random(plan.Seed, uint64(i)+2),
			index: i,
		})
	}

	var calling, checking sync.WaitGroup
	checking.Go(d.check)
	for _, c := range clients {
		calling.Go(func() { c.run(ctx) })
	}
	faultsCtx, stopFaults := context.WithCancel(ctx)
	defer stopFaults()
	var others sync.WaitGroup
	if len(plan.Faults) > 0 {
		others.Go(func() { d.inject(faultsCtx) })
	}
	if plan.Progress != nil {
		others.Go(func() { d.progress(faultsCtx) })
	}
	calling.Wait()
	stopFaults()
	others.Wait()

	d.mu.Lock()
	rest := d.keys
	d.mu.Unlock()
	for _, k := range rest {
		d.finished <- d.recorder.take(k.name)
	}
	close(d.finished)
	checking.Wait()
	report := d.snapshot()
	if plan.Progress != nil {
		plan.Progress(report)
	}
	return report, d.err
}

// drive is one run of [Drive].
type drive struct {
	plan     Plan
	start    time.Time
	cancel   context.CancelFunc
	recorder *Recorder
	calls    atomic.Int64
	finished chan History // of keys, to be checked

	mu     sync.Mutex
	keys   []*key
	rand   *rand.Rand
	report Report
	err    error
}

// key is a key in use. Its fields but the name are guarded by drive.mu.
type key struct {
	name    string
	calls   int
	running int
	unknown int
	retired bool
	owners  []string // the last few, whoever they were
	few     []int    // the only clients that use it; nil: all do
}

// newKey returns the n-th of the keys in use. Half of them belong to a few
// clients: some mistakes show only in a crowd, others only when nobody disturbs.
func (d *drive) newKey(n int) *key {
	k := &key{name: "history:" + cryptorand.Text()}
	if n%2 == 1 {
		k.few = d.rand.Perm(d.plan.Clients)[:min(1+d.rand.IntN(3), d.plan.Clients)]
	}
	return k
}

func (k *key) admits(client int) bool { return k.few == nil || slices.Contains(k.few, client) }

// enter begins a call of client on k, or else on a random key.
func (d *drive) enter(client int, r *rand.Rand, k *key) *key {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k == nil || k.retired || !k.admits(client) {
		k = d.keys[r.IntN(len(d.keys))]
	}
	k.calls++
	k.running++
	return k
}

// leave notes the end of a call on k. A key that has been used enough is
// replaced, and checked as soon as no call on it is running.
func (d *drive) leave(k *key, err error) {
	d.mu.Lock()
	k.running--
	if err != nil {
		k.unknown++
	}
	if !k.retired && (k.calls >= d.plan.CallsPerKey || k.unknown >= maxUnknown) {
		k.retired = true
		n := slices.Index(d.keys, k)
		d.keys[n] = d.newKey(n)
	}
	done := k.retired && k.running == 0
	d.mu.Unlock()
	if done {
		d.finished <- d.recorder.take(k.name)
	}
}

// check checks histories as they come.
func (d *drive) check() {
	for h := range d.finished {
		if len(h.Ops) == 0 {
			continue
		}
		found := checkKey(h, d.plan.Check)
		d.mu.Lock()
		d.report.Result = d.report.Result.plus(found)
		for _, op := range h.Ops {
			d.report.Answers[answerName(op)]++
		}
		d.mu.Unlock()
		if found.Violation != nil {
			d.cancel()
		}
	}
}

func answerName(op Op) string {
	switch {
	case op.Unknown():
		return string(op.Kind) + " unknown"
	case op.Kind == Release:
		return string(op.Kind)
	case op.Yes:
		return string(op.Kind) + " yes"
	default:
		return string(op.Kind) + " no"
	}
}

func (d *drive) snapshot() Report {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.report
	r.Elapsed = time.Since(d.start)
	r.Answers, r.Faults = maps.Clone(r.Answers), maps.Clone(r.Faults)
	r.Undecided = slices.Clone(r.Undecided)
	return r
}

func (d *drive) progress(ctx context.Context) {
	for sleep(ctx, time.Second) {
		d.plan.Progress(d.snapshot())
	}
}

// inject switches faults on and off.
func (d *drive) inject(ctx context.Context) {
	r := random(d.plan.Seed, 1)
	for sleep(ctx, d.plan.TTL/4+time.Duration(r.Int64N(int64(d.plan.TTL)))) {
		fault := d.plan.Faults[r.IntN(len(d.plan.Faults))]
		recorded := d.recorder.Fault(FaultSpan{Name: fault.Name, Breaks: fault.Breaks, Clients: fault.Clients})
		end := fault.Begin()
		sleep(ctx, d.plan.TTL/8+time.Duration(r.Int64N(int64(d.plan.TTL))))
		end()
		recorded()
		d.mu.Lock()
		d.report.Faults[fault.Name]++
		d.mu.Unlock()
	}
}

// fail ends the drive with an error.
func (d *drive) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		d.err = err
	}
	d.cancel()
}

// client makes one call after the other.
type client struct {
	drive *drive
	index int
	store core.LockStore
	rand  *rand.Rand
	holds []holding
}

// holding is a lease that the client was granted, and may still hold.
type holding struct {
	key   *key
	owner string
	ttl   time.Duration
	until time.Time // when it ends unless it is renewed, about
}

func (c *client) run(ctx context.Context) {
	for {
		if limit := c.drive.plan.Calls; limit > 0 && c.drive.calls.Add(1) > int64(limit) {
			return
		}
		pause, at := c.pause()
		if !sleep(ctx, pause) {
			return
		}
		k := c.drive.enter(c.index, c.rand, at)
		err := c.call(ctx, k)
		c.drive.leave(k, err)
		if errors.Is(err, core.ErrInvalid) {
			c.drive.fail(err)
		}
	}
}

// pause is how long the client waits before its next call: mostly a little,
// sometimes as long as leases take to end. The call is on key at, if that is not
// nil: often one that the client holds, so that leases change hands.
func (c *client) pause() (pause time.Duration, at *key) {
	ttl := c.drive.plan.TTL
	var held holding
	if len(c.holds) > 0 {
		held = c.holds[c.rand.IntN(len(c.holds))]
	}
	switch n := c.rand.IntN(100); {
	case n < 5:
		return ttl/2 + time.Duration(c.rand.Int64N(int64(ttl))), nil
	case n < 12 && held.key != nil:
		// To the end of the lease, where it is decided who is first.
		return time.Until(held.until) + time.Duration(c.rand.Int64N(int64(ttl/20)+1)) - ttl/40, held.key
	case n < 16 && held.key != nil:
		// Past it, by more than any slack.
		return time.Until(held.until) + 2*c.drive.plan.Check.Slack, held.key
	case n < 30:
		return 0, held.key
	case n < 50:
		at = held.key
	}
	return time.Duration(c.rand.Int64N(int64(min(ttl/10, 2*maxPause)) + 1)), at
}

// call makes one call on k, as somebody who behaves, or as somebody who does
// not.
func (c *client) call(ctx context.Context, k *key) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout())
	defer cancel()
	c.holds = slices.DeleteFunc(c.holds, func(h holding) bool {
		return time.Since(h.until) > 3*c.drive.plan.TTL || c.drive.retired(h.key)
	})
	if i := slices.IndexFunc(c.holds, func(h holding) bool { return h.key == k }); i >= 0 {
		return c.callHeld(ctx, k, i)
	}
	owner := c.drive.anyOwner(k, c.rand)
	switch n := c.rand.IntN(100); {
	case n < 15 && owner != "": // a stranger, or somebody whose lease is over
		_, err := c.store.Renew(ctx, k.name, owner, c.ttl())
		return err
	case n < 30 && owner != "":
		return c.store.Release(ctx, k.name, owner)
	default:
		return c.acquire(ctx, k, cryptorand.Text())
	}
}

// callHeld makes a call on a key that the client holds, or has held.
func (c *client) callHeld(ctx context.Context, k *key, i int) error {
	h := &c.holds[i]
	n := c.rand.IntN(100)
	if time.Now().After(h.until) {
		n /= 2 // it is over: a renewal must be refused
	}
	switch {
	case n < 40:
		ttl := c.ttl()
		sent := time.Now()
		renewed, err := c.store.Renew(ctx, k.name, h.owner, ttl)
		switch {
		case err == nil && renewed:
			h.until = sent.Add(ttl)
		case err == nil && c.rand.IntN(2) == 0:
			c.holds = slices.Delete(c.holds, i, i+1)
		}
		return err
	case n < 48: // a renewal is on its way when the work is done
		owner, ttl := h.owner, c.ttl()
		c.holds = slices.Delete(c.holds, i, i+1)
		lead := time.Duration(c.rand.ExpFloat64() * float64(200*time.Microsecond))
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() { _, _ = c.store.Renew(ctx, k.name, owner, ttl) })
		sleep(ctx, lead)
		return c.store.Release(ctx, k.name, owner)
	case n < 80:
		owner := h.owner
		if c.rand.IntN(4) > 0 { // else it forgets that it has released
			c.holds = slices.Delete(c.holds, i, i+1)
		}
		return c.store.Release(ctx, k.name, owner)
	case n < 88:
		return c.acquire(ctx, k, h.owner) // again, which must be refused
	case n < 94:
		return c.acquire(ctx, k, cryptorand.Text())
	default: // forgotten: it ends by itself
		owner := c.drive.anyOwner(k, c.rand)
		c.holds = slices.Delete(c.holds, i, i+1)
		return c.store.Release(ctx, k.name, owner)
	}
}

func (c *client) acquire(ctx context.Context, k *key, owner string) error {
	ttl := c.ttl()
	// An owner is new for each Acquire, so that nobody can name one whose call
	// has not returned.
	c.drive.removeOwner(k, owner)
	defer c.drive.addOwner(k, owner)
	sent := time.Now()
	grant, err := c.store.Acquire(ctx, k.name, owner, ttl)
	switch {
	case err == nil && grant.Acquired:
		c.holds = append(c.holds, holding{key: k, owner: owner, ttl: ttl, until: sent.Add(ttl)})
	case err != nil && c.rand.IntN(4) > 0:
		// It may have been granted. What a strategy does: release it. What
		// others do, and who crashes: leave it.
		c.holds = append(c.holds, holding{key: k, owner: owner, ttl: ttl, until: sent})
	}
	return err
}

func (c *client) ttl() time.Duration {
	return c.drive.plan.TTL * time.Duration(1+max(0, c.rand.IntN(5)-2))
}

func (c *client) timeout() time.Duration {
	if c.rand.Float64() < c.drive.plan.Abandon {
		return time.Duration(c.rand.ExpFloat64() * float64(300*time.Microsecond))
	}
	return c.drive.plan.Timeout
}

func (d *drive) retired(k *key) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return k.retired
}

func (d *drive) addOwner(k *key, owner string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k.owners = append(k.owners, owner)
	if len(k.owners) > 4 {
		k.owners = slices.Delete(k.owners, 0, 1)
	}
}

func (d *drive) removeOwner(k *key, owner string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	k.owners = slices.DeleteFunc(k.owners, func(o string) bool { return o == owner })
}

// anyOwner returns an owner whose Acquire of k has returned, "" if there is none.
func (d *drive) anyOwner(k *key, r *rand.Rand) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(k.owners) == 0 {
		return ""
	}
	return k.owners[r.IntN(len(k.owners))]
}

func random(seed, stream uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, stream)) }

// sleep sleeps for t; false if ctx has ended.
func sleep(ctx context.Context, t time.Duration) bool {
	if t <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
