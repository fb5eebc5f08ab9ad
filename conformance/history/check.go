package history

import (
	"cmp"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/leasekit/leasekit/conformance"
)

// The values of [Options] that are left zero.
const (
	// DefaultDeliveries is what go-redis does with default options: one try
	// and three repetitions.
	DefaultDeliveries = 4
	// DefaultTimeout is a thousand times what a key of some hundred calls
	// needs.
	DefaultTimeout = 30 * time.Second
)

// Options of [Check]. The zero value means the defaults.
type Options struct {
	// Slack is how long after ttl, counted from the answer, a lease may still
	// be seen; the same as conformance.Config.Slack. Default
	// conformance.DefaultSlack.
	Slack time.Duration

	// Deliveries is how often, at most, the client library may deliver one
	// call to the server. It matters for calls whose outcome is unknown, and
	// for those that ran while a fault broke connections. Default
	// [DefaultDeliveries]; 1 for a library that never repeats a call.
	Deliveries int

	// Timeout bounds the search for one key. Default [DefaultTimeout].
	Timeout time.Duration
}

func (o *Options) fill() {
	o.Slack = cmp.Or(o.Slack, conformance.DefaultSlack)
	o.Deliveries = cmp.Or(o.Deliveries, DefaultDeliveries)
	o.Timeout = cmp.Or(o.Timeout, DefaultTimeout)
}

// Result is what [Check] found.
type Result struct {
	// Keys and Calls that were looked at, and how many of the calls were of
	// unknown outcome.
	Keys, Calls, Unknown int
	// Undecided are the keys for which the search was given up after
	// Options.Timeout. Nothing is known about them.
	Undecided []string
	// Violation is the first one by time, nil if there is none.
	Violation *Violation
}

// OK reports whether the history is proven to be linearizable.
func (r Result) OK() bool { return r.Violation == nil && len(r.Undecided) == 0 }

// String sums r up in one line.
func (r Result) String() string {
	s := fmt.Sprintf("%d histories, %d calls, %d of unknown outcome", r.Keys, r.Calls, r.Unknown)
	switch {
	case r.Violation != nil:
		return s + ": " + r.Violation.Error()
	case len(r.Undecided) > 0:
		return s + fmt.Sprintf(": %d histories could not be decided in time", len(r.Undecided))
	default:
		return s + ": linearizable"
	}
}

// Check looks for an order of the calls of h that a correct lock would have
// answered in the same way. Keys are independent of each other, and each is
// searched alone; the time for one grows with the number of clients that were
// busy with it at the same time, and hardly with the number of calls.
func Check(h History, o Options) Result {
	o.fill()
	byKey := h.byKey()
	var (
		r    Result
		mu   sync.Mutex
		wg   sync.WaitGroup
		gate = make(chan struct{}, runtime.GOMAXPROCS(0))
	)
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		wg.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			one := checkKey(byKey[key], o)
			mu.Lock()
			defer mu.Unlock()
			r = r.plus(one)
		})
	}
	wg.Wait()
	return r
}

// plus returns r and the result of another key together.
func (r Result) plus(other Result) Result {
	r.Keys += other.Keys
	r.Calls += other.Calls
	r.Unknown += other.Unknown
	r.Undecided = slices.Concat(r.Undecided, other.Undecided)
	slices.Sort(r.Undecided)
	if r.Violation == nil || other.Violation != nil && other.Violation.at() < r.Violation.at() {
		r.Violation = other.Violation
	}
	return r
}

// byKey divides h. Each part has the faults of all.
func (h History) byKey() map[string]History {
	parts := make(map[string]History)
	for _, op := range h.Ops {
		part := parts[op.Key]
		part.Ops = append(part.Ops, op)
		part.Faults = h.Faults
		parts[op.Key] = part
	}
	for _, part := range parts {
		slices.SortStableFunc(part.Ops, func(a, b Op) int { return cmp.Compare(a.Call, b.Call) })
	}
	return parts
}

// checkKey checks the history of one key.
func checkKey(h History, o Options) Result {
	r := Result{Keys: 1, Calls: len(h.Ops)}
	for _, op := range h.Ops {
		if op.Unknown() {
			r.Unknown++
		}
	}
	switch explicable(h, o, h.end(), strict) {
	case porcupine.Illegal:
		r.Violation = explain(h, o)
		if r.Violation == nil {
			r.Undecided = []string{h.Ops[0].Key}
		}
	case porcupine.Unknown:
		r.Undecided = []string{h.Ops[0].Key}
	}
	return r
}

// explicable tells whether a model explains h as it was at the time until.
func explicable(h History, o Options, until time.Duration, relax relaxation) porcupine.CheckResult {
	m := &model{slack: o.Slack, relax: relax}
	return porcupine.CheckOperationsTimeout(m.porcupine(), operations(steps(h, o, until)), o.Timeout)
}

// firstInexplicable returns the time of the first answer that no order
// explains, given that h as a whole has none. What explains a history explains
// its beginning, so that it can be found by bisection. ok is false if the time
// did not suffice.
func firstInexplicable(h History, o Options, relax relaxation) (at time.Duration, ok bool) {
	var answers []time.Duration
	for _, op := range h.Ops {
		if op.Return > 0 {
			answers = append(answers, op.Return)
		}
	}
	slices.Sort(answers)
	decided := true
	i := sort.Search(len(answers), func(i int) bool {
		result := explicable(h, o, answers[i], relax)
		decided = decided && result != porcupine.Unknown
		return result == porcupine.Illegal
	})
	if !decided || i == len(answers) {
		return 0, false
	}
	return answers[i], true
}
