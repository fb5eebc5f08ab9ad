package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/leasekit/leasekit/core"
)

// Names of workloads.
const (
	workCycle    = "acquire-release"
	workHeld     = "held-try"
	workRenew    = "renew"
	workDo       = "do"
	workHandOver = "hand-over"
	workZipf     = "zipf"
	workHolds    = "holds"
)

// Result is one line of the report.
type Result struct {
	Store      string `json:"store"`
	Workload   string `json:"workload"`
	Contenders int    `json:"contenders"`
	Impl       string `json:"impl"`

	Count int64 `json:"count"`
	P50   int64 `json:"p50_ns"`
	P90   int64 `json:"p90_ns"`
	P99   int64 `json:"p99_ns"`
	P999  int64 `json:"p99_9_ns"`
	Max   int64 `json:"max_ns"`

	OpsPerSecond float64 `json:"ops_per_s"`
	// RatioToFloor compares medians. A hand-over's floor is the floor's
	// acquire-release, that of holds its renew.
	RatioToFloor float64 `json:"ratio_to_floor"`

	Allocs         float64 `json:"allocs_per_op,omitempty"`
	ServerOps      float64 `json:"server_ops_per_op,omitempty"`
	Bytes          float64 `json:"bytes_per_op,omitempty"`
	UnluckiestWait int     `json:"unluckiest_wait_handovers,omitempty"`
	// Error says why a peer has fewer numbers, or none.
	Error           string  `json:"error,omitempty"`
	Lost            int64   `json:"lost,omitempty"`
	GoroutinesPerOp float64 `json:"goroutines_per_hold,omitempty"`
	HeapPerOp       float64 `json:"heap_bytes_per_hold,omitempty"`

	// Distribution is the value at each of the percentiles of [percentiles].
	Distribution []int64 `json:"distribution_ns"`
}

// percentiles are those that the page draws.
var percentiles = []float64{0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 99.9, 100}

// newHistogram has three significant digits from 1 ns to a minute.
func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, time.Minute.Nanoseconds(), 3)
}

// series is what was measured of one impl.
type series struct {
	h       *hdrhistogram.Histogram
	elapsed time.Duration
	err     error // a peer's failure, which ends its series and not the run
}

// patience is how much longer than it should an op may take. Peers were seen to
// wait for ever (rueidislock, for a wake-up that was lost).
const patience = 10 * time.Second

func (s *series) result(store, workload, impl string, contenders int) Result {
	r := Result{
		Store: store, Workload: workload, Impl: impl, Contenders: contenders,
		Count: s.h.TotalCount(),
		P50:   s.h.ValueAtPercentile(50), P90: s.h.ValueAtPercentile(90),
		P99: s.h.ValueAtPercentile(99), P999: s.h.ValueAtPercentile(99.9), Max: s.h.Max(),
	}
	if s.err != nil {
		r.Error = s.err.Error()
	}
	if s.elapsed > 0 {
		r.OpsPerSecond = float64(r.Count) / s.elapsed.Seconds()
	}
	for _, p := range percentiles {
		r.Distribution = append(r.Distribution, s.h.ValueAtPercentile(p))
	}
	return r
}

// Settings of a run.
type settings struct {
	duration time.Duration // for each impl of each workload
	clients  int
	keys     int
	holds    int
	ttl      time.Duration
}

// turns is into how many parts the time of an impl is cut: the impls of a
// workload take turns, so that what else happens on the machine meets all.
const turns = 8

// bench runs the workloads of one backend.
type bench struct {
	settings
	b       *backend
	step    func(what string) // tells that something was done
	results []Result
	keySeq  atomic.Int64
}

// key returns a new key.
func (x *bench) key() string {
	return "bench/" + strconv.FormatInt(time.Now().UnixNano(), 36) + "/" + strconv.FormatInt(x.keySeq.Add(1), 36)
}

// contenders of the hand-over.
var contenders = []int{2, 16, 64}

// clientCounts are the points of the scaling curve: 1, 2, 4, … up to n.
func clientCounts(n int) []int {
	var counts []int
	for c := 1; c < n; c *= 2 {
		counts = append(counts, c)
	}
	return append(counts, n)
}

type workload struct {
	name string
	run  func(context.Context) error
}

// workloads are what all runs.
func (x *bench) workloads() []workload {
	var workloads []workload
	for _, n := range clientCounts(x.clients) {
		workloads = append(workloads, workload{workCycle, func(ctx context.Context) error { return x.cycle(ctx, n) }})
	}
	workloads = append(workloads, workload{workHeld, x.held}, workload{workRenew, x.renew}, workload{workDo, x.do})
	for _, n := range contenders {
		workloads = append(workloads, workload{workHandOver, func(ctx context.Context) error { return x.handOver(ctx, n) }})
	}
	return append(workloads, workload{workZipf, x.zipf}, workload{workHolds, x.manyHolds}, workload{"cost", x.cost})
}

// all runs every workload.
func (x *bench) all(ctx context.Context) error {
	for _, w := range x.workloads() {
		if err := w.run(ctx); err != nil {
			return fmt.Errorf("%s: %s: %w", x.b.name, w.name, err)
		}
		x.step(x.b.name + " " + w.name)
	}
	x.ratios()
	return nil
}

// ratios fills in RatioToFloor.
func (x *bench) ratios() {
	floor := func(workload string, contenders int) int64 {
		i := slices.IndexFunc(x.results, func(r Result) bool {
			return r.Impl == implFloor && r.Workload == workload && r.Contenders == contenders
		})
		if i < 0 {
			return 0
		}
		return x.results[i].P50
	}
	for i := range x.results {
		r := &x.results[i]
		f := floor(r.Workload, r.Contenders)
		switch r.Workload {
		case workHandOver:
			f = floor(workCycle, 1)
		case workHolds:
			f = floor(workRenew, 1)
		}
		if f > 0 {
			r.RatioToFloor = float64(r.P50) / float64(f)
		}
	}
}

// op is one thing that is measured; it returns when it is done.
type op func(ctx context.Context) error

// prepare makes the op of one client of l, and what ends it.
type prepare func(ctx context.Context, l *locker, client int) (op, func(), error)

// alternate measures the op of every locker that has it, with n clients at
// once, in turns.
func (x *bench) alternate(ctx context.Context, workload string, n int, has func(*locker) bool, prepare prepare) error {
	var lockers []*locker
	for i := range x.b.lockers {
		if has(&x.b.lockers[i]) {
			lockers = append(lockers, &x.b.lockers[i])
		}
	}
	all := make([]series, len(lockers))
	ops := make([][]op, len(lockers))
	var ends []func()
	defer func() {
		for _, end := range ends {
			end()
		}
	}()
	for i, l := range lockers {
		all[i].h = newHistogram()
		for client := range n {
			op, end, err := prepare(ctx, l, client)
			if err != nil {
				return fmt.Errorf("%s: %w", l.impl, err)
			}
			ends = append(ends, end)
			for range 3 { // connections, scripts, prepared statements
				if err := op(ctx); err != nil {
					return fmt.Errorf("%s: %w", l.impl, err)
				}
			}
			ops[i] = append(ops[i], op)
		}
	}
	for turn := range turns {
		for j := range lockers {
			i := (j + turn) % len(lockers)
			if all[i].err != nil {
				continue
			}
			if err := all[i].measure(ctx, ops[i], x.duration/turns); err != nil {
				if !lockers[i].isPeer() || ctx.Err() != nil {
					return fmt.Errorf("%s: %w", lockers[i].impl, err)
				}
				all[i].err = err
			}
		}
	}
	for i, l := range lockers {
		x.results = append(x.results, all[i].result(x.b.name, workload, l.impl, n))
	}
	return nil
}

// measure runs each op again and again for d, all at once.
func (s *series) measure(ctx context.Context, ops []op, d time.Duration) error {
	start := time.Now()
	end := start.Add(d)
	ctx, cancel := context.WithDeadline(ctx, end.Add(patience))
	defer cancel()
	histograms := make([]*hdrhistogram.Histogram, len(ops))
	errs := make([]error, len(ops))
	var clients sync.WaitGroup
	for i, op := range ops {
		histograms[i] = newHistogram()
		clients.Go(func() {
			for before := time.Now(); before.Before(end); {
				if errs[i] = op(ctx); errs[i] != nil {
					return
				}
				after := time.Now()
				_ = histograms[i].RecordValue(max(after.Sub(before).Nanoseconds(), 1))
				before = after
			}
		})
	}
	clients.Wait()
	s.elapsed += time.Since(start)
	for i, h := range histograms {
		if errs[i] != nil {
			return errs[i]
		}
		s.h.Merge(h)
	}
	return nil
}

func nothing() {}

// cycle: n clients, each locks and unlocks a key of its own.
func (x *bench) cycle(ctx context.Context, n int) error {
	return x.alternate(ctx, workCycle, n, func(l *locker) bool { return l.try != nil },
		func(_ context.Context, l *locker, _ int) (op, func(), error) {
			key := x.key()
			return func(ctx context.Context) error { return lockUnlock(ctx, l.try, key) }, nothing, nil
		})
}

func lockUnlock(ctx context.Context, lock func(context.Context, string) (unlock, error), key string) error {
	unlock, err := lock(ctx, key)
	if err != nil {
		return err
	}
	return unlock(ctx)
}

// held: one client asks for a key that another holds.
func (x *bench) held(ctx context.Context) error {
	return x.alternate(ctx, workHeld, 1, func(l *locker) bool { return l.held != nil },
		func(ctx context.Context, l *locker, _ int) (op, func(), error) {
			key := x.key()
			unlock, err := l.try(ctx, key)
			if err != nil {
				return nil, nil, err
			}
			return func(ctx context.Context) error { return l.held(ctx, key) }, func() { _ = unlock(ctx) }, nil
		})
}

// renew: one client renews its lease.
func (x *bench) renew(ctx context.Context) error {
	return x.alternate(ctx, workRenew, 1, func(l *locker) bool { return l.hold != nil },
		func(ctx context.Context, l *locker, _ int) (op, func(), error) {
			renew, end, err := l.hold(ctx, x.key())
			if err != nil {
				return nil, nil, err
			}
			return renew, func() { _ = end(ctx) }, nil
		})
}

// do: a whole Do with an empty callback, beside the floor's two operations.
func (x *bench) do(ctx context.Context) error {
	return x.alternate(ctx, workDo, 1, func(l *locker) bool { return l.run != nil },
		func(_ context.Context, l *locker, _ int) (op, func(), error) {
			key := x.key()
			return func(ctx context.Context) error { return l.run(ctx, key) }, nothing, nil
		})
}

// zipf: all clients lock keys of which some are far more popular than others.
func (x *bench) zipf(ctx context.Context) error {
	return x.alternate(ctx, workZipf, x.clients, func(l *locker) bool { return l.wait != nil },
		func(ctx context.Context, l *locker, client int) (op, func(), error) {
			wait, end := l.wait, nothing
			if l.contender != nil {
				var err error
				if wait, end, err = l.contender(ctx); err != nil {
					return nil, nil, err
				}
			}
			prefix := "bench/zipf/" + l.impl + "/"
			zipf := rand.NewZipf(rand.New(rand.NewPCG(1, uint64(client))), 1.1, 1, uint64(x.keys-1))
			return func(ctx context.Context) error {
				return lockUnlock(ctx, wait, prefix+strconv.FormatUint(zipf.Uint64(), 10))
			}, end, nil
		})
}

// holdTime is how long a contender of the hand-over keeps the key: long enough
// for the others to wait for it.
const holdTime = time.Millisecond

// handOver: n contenders for one key. What is measured is the time from the
// call that releases it to the moment that another one has it.
func (x *bench) handOver(ctx context.Context, n int) error {
	var lockers []*locker
	for i := range x.b.lockers {
		if l := &x.b.lockers[i]; l.wait != nil && l.impl != implFloor {
			lockers = append(lockers, l)
		}
	}
	all := make([]series, len(lockers))
	unluckiest := make([]int, len(lockers))
	for i := range all {
		all[i].h = newHistogram()
	}
	const turns = 2 // a turn has to be long enough for everybody to have one
	for range turns {
		for i, l := range lockers {
			if all[i].err != nil {
				continue
			}
			worst, err := x.contend(ctx, l, n, &all[i], x.duration/turns)
			if err != nil {
				if !l.isPeer() || ctx.Err() != nil {
					return fmt.Errorf("%s: %w", l.impl, err)
				}
				all[i].err = err
			}
			unluckiest[i] = max(unluckiest[i], worst)
		}
	}
	for i, l := range lockers {
		r := all[i].result(x.b.name, workHandOver, l.impl, n)
		r.UnluckiestWait = unluckiest[i]
		x.results = append(x.results, r)
	}
	return nil
}

// contend lets n contenders fight for a key for d, and returns the largest
// number of hand-overs that one of them had to watch before it had its turn.
func (x *bench) contend(ctx context.Context, l *locker, n int, s *series, d time.Duration) (int, error) {
	key := x.key()
	var holder struct { // guarded by the lock that is measured, and by this
		sync.Mutex
		last       int
		releasedAt time.Time
		handOvers  int
		seen       []int // hand-overs when each contender was last served
		worst      int
	}
	holder.last = -1
	holder.seen = make([]int, n)
	start := time.Now()
	end := start.Add(d)
	ctx, cancel := context.WithDeadline(ctx, end.Add(patience))
	defer cancel()
	errs := make(chan error, n)
	var wg sync.WaitGroup
	for i := range n {
		wait, done := l.wait, nothing
		if l.contender != nil {
			var err error
			if wait, done, err = l.contender(ctx); err != nil {
				return 0, err
			}
		}
		wg.Go(func() {
			defer done()
			for time.Now().Before(end) {
				unlock, err := wait(ctx, key)
				now := time.Now()
				if err != nil {
					errs <- err
					return
				}
				holder.Lock()
				if holder.last >= 0 && holder.last != i && now.Before(end) {
					_ = s.h.RecordValue(max(now.Sub(holder.releasedAt).Nanoseconds(), 1))
					holder.handOvers++
					holder.worst = max(holder.worst, holder.handOvers-holder.seen[i])
				}
				holder.seen[i] = holder.handOvers
				holder.Unlock()
				time.Sleep(holdTime)
				holder.Lock()
				holder.last, holder.releasedAt = i, time.Now()
				holder.Unlock()
				if err := unlock(ctx); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	s.elapsed += time.Since(start)
	select {
	case err := <-errs:
		return 0, err
	default:
		return holder.worst, nil
	}
}

// manyHolds: many leases at once in one process, each renewed when it is due.
func (x *bench) manyHolds(ctx context.Context) error {
	recorder := &renewRecorder{LockStore: x.b.store, h: newHistogram()}
	var lost atomic.Int64
	s, err := core.NewStrategy(recorder, core.Options{TTL: x.ttl, Logger: discard, Hooks: core.Hooks{
		Lost: func(context.Context, core.Event) { lost.Add(1) },
	}})
	if err != nil {
		return err
	}
	before := snapshot()
	leases := make([]*core.Lease, x.holds)
	if err := parallel(64, x.holds, func(i int) (err error) {
		leases[i], err = s.Acquire(ctx, x.key())
		return err
	}); err != nil {
		return err
	}
	after := snapshot()
	start := time.Now()
	time.Sleep(x.ttl/3 + x.ttl/10) // every lease is renewed at least once
	recorder.mu.Lock()
	recorded := series{h: recorder.h, elapsed: time.Since(start)}
	r := recorded.result(x.b.name, workHolds, implOurs, x.holds)
	recorder.mu.Unlock()
	r.Lost = lost.Load()
	r.GoroutinesPerOp = max(float64(after.goroutines-before.goroutines)/float64(x.holds), 0)
	r.HeapPerOp = max(float64(after.heap-before.heap)/float64(x.holds), 0)
	x.results = append(x.results, r)
	return parallel(64, x.holds, func(i int) error {
		_ = leases[i].Release() // a lost one is counted above
		return nil
	})
}

// renewRecorder measures renewals.
type renewRecorder struct {
	core.LockStore
	mu sync.Mutex
	h  *hdrhistogram.Histogram
}

// Renew implements [core.LockStore].
func (r *renewRecorder) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	start := time.Now()
	ok, err := r.LockStore.Renew(ctx, key, owner, ttl)
	d := time.Since(start)
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.h.RecordValue(max(d.Nanoseconds(), 1))
	return ok, err
}

// Unwrap lets the strategy see what else the store can do.
func (r *renewRecorder) Unwrap() core.LockStore { return r.LockStore }

// parallel calls fn for 0 to n-1, from some goroutines.
func parallel(goroutines, n int, fn func(i int) error) error {
	var next atomic.Int64
	errs := make(chan error, goroutines)
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if err := fn(int(i)); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

type footprint struct {
	goroutines int
	heap       int64
}

func snapshot() footprint {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return footprint{runtime.NumGoroutine(), int64(m.HeapAlloc)}
}

// costRounds is how often a lock is taken to count what it costs beside time.
const costRounds = 200

// cost counts allocations, server operations and bytes of one lock and unlock,
// and adds them to the result of the uncontended workload.
func (x *bench) cost(ctx context.Context) error {
	for i := range x.b.lockers {
		l := &x.b.lockers[i]
		if l.try == nil {
			continue
		}
		at := slices.IndexFunc(x.results, func(r Result) bool {
			return r.Workload == workCycle && r.Contenders == 1 && r.Impl == l.impl
		})
		if at < 0 {
			continue
		}
		key := x.key()
		var before, after runtime.MemStats
		var ops int64
		var err error
		if x.b.operations != nil {
			if ops, err = x.b.operations(ctx); err != nil {
				return err
			}
		}
		runtime.ReadMemStats(&before)
		bytes := x.b.traffic.bytes.Load()
		for range costRounds {
			if err := lockUnlock(ctx, l.try, key); err != nil {
				return fmt.Errorf("%s: %w", l.impl, err)
			}
		}
		runtime.ReadMemStats(&after)
		r := &x.results[at]
		r.Bytes = float64(x.b.traffic.bytes.Load()-bytes) / costRounds
		r.Allocs = float64(after.Mallocs-before.Mallocs) / costRounds
		if x.b.operations != nil {
			now, err := x.b.operations(ctx)
			if err != nil {
				return err
			}
			r.ServerOps = float64(now-ops) / costRounds
		}
	}
	return nil
}
