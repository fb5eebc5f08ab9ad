package history

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// maxToken is the largest token that the contract allows.
const maxToken = 1<<53 - 1

// model is the lock that a history is compared with: one key.
//
// Its state is the set of everything that may be the case, because answers do
// not tell all: when exactly the server began to count a lease, and whether and
// when it executed a call that was never answered. Such a call is no step of
// its own that porcupine would have to place anywhere up to the end of the
// history, which takes exponential time; it is put on a list at the time it was
// made, and whatever is on the list may happen between any two steps from then
// on.
type model struct {
	slack time.Duration
	relax relaxation
}

// relaxation is a breach of the contract that the model tolerates. A history
// that only a tolerant model explains breaks that rule.
type relaxation int

const (
	strict relaxation = iota
	anyToken
	tokenOutOfRange
	reentry
	strangerReleases
	strangerRenews
	releaseKeepsLease
	expiredRenews
	renewalOtherwise
	lateExpiry
	earlyExpiry
	doubleGrant
	needlessRefusal
)

// step is a call as the model sees it: the input of a porcupine operation.
type step struct {
	Op
	number int // from 1, in the key's history
	// again is how often the server may still execute the call after, or
	// instead of, the execution that the answer is about.
	again int
	slot  int // where state.used counts that, -1 if it is not counted
}

// state is what is known after some steps. It is never modified.
type state struct {
	token   int64         // the largest so far
	pending []*step       // calls that the server may still execute
	may     []possibility // sorted; at least one
}

// possibility is one thing that may be the case.
type possibility struct {
	// owner of the lease; free if there is none. With relaxation expiredRenews
	// a negative number is the owner of an expired lease that nobody took.
	owner int
	// at is the earliest time at which this can be the case: the steps so far
	// had begun by then, and the leases that have ended had lived their time.
	at time.Duration
	// The lease ends at an unknown time between earliest and latest.
	earliest, latest time.Duration
	// after is set if nobody was told when the lease began: it ends at most
	// that long after the next step.
	after time.Duration
	// used counts how often pending steps have been executed: 4 bits for each
	// slot.
	used uint64
}

const (
	free     = 0
	nobody   = 1 << 30 // has a lease all the same
	slots    = 16
	maxAgain = 15
)

// drift is what clocks may disagree about a duration: the allowance that
// core.Strategy makes too.
func drift(ttl time.Duration) time.Duration { return ttl / 100 }

// told returns p with the lease that the answer of st is about.
func (m *model) told(p possibility, owner int, st *step) possibility {
	p.owner, p.after = owner, 0
	p.earliest = st.Call + st.TTL - drift(st.TTL)
	p.latest = st.Return + st.TTL + drift(st.TTL) + m.slack
	return p
}

// untold returns p with the lease that the server gives to the owner of st some
// time between p and until.
func (m *model) untold(p possibility, st *step, until time.Duration) possibility {
	p.owner, p.after = st.Owner, st.TTL+drift(st.TTL)+m.slack
	p.earliest = p.at + st.TTL - drift(st.TTL)
	p.latest = until + p.after
	return p
}

// vacated returns p without its lease.
func (p possibility) vacated(at time.Duration) possibility {
	return possibility{owner: free, at: at, used: p.used}
}

func (p possibility) isFree() bool { return p.owner <= free }

// mayLive reports whether the lease of p can be alive.
func (m *model) mayLive(p possibility) bool {
	return !p.isFree() && (p.at <= p.latest || m.relax == lateExpiry)
}

// apply is the step function of the model: the state after s and then st, and
// whether the answer of st is possible at all.
func (m *model) apply(s *state, st *step) (*state, bool) {
	next := &state{token: s.token, pending: s.pending}
	var may possibilities
	for _, p := range s.may {
		for _, q := range m.meanwhile(s, p, st.Return) {
			q.at = max(q.at, st.Call)
			// A lease that must have ended has ended, which is another
			// possibility.
			if q.at <= st.Return && (q.isFree() || m.mayLive(q)) {
				m.answer(&may, s, q, st)
			}
		}
	}
	if len(may.all) == 0 {
		return nil, false
	}
	next.may = may.normal()
	if st.Kind == Acquire && st.Yes && !st.Unknown() {
		next.token = max(next.token, st.Token)
	}
	if st.again > 0 {
		next.pending = append(slices.Clone(s.pending), st)
	}
	return next, true
}

// meanwhile returns what may have become of p between the last step and the
// next, which has its instant before until: leases end, and pending calls are
// executed.
func (m *model) meanwhile(s *state, p possibility, until time.Duration) []possibility {
	if p.after > 0 {
		p.latest = min(p.latest, until+p.after)
	}
	all := []possibility{p}
	add := func(p possibility) {
		if !slices.ContainsFunc(all, func(q possibility) bool { return q.covers(p) }) {
			all = append(all, p)
		}
	}
	for looked := 0; looked < len(all); { // what follows from each may be followed by more
		p := all[looked]
		looked++
		for _, st := range s.pending {
			if st.Owner == p.owner && st.Kind == Release {
				add(p.vacated(p.at))
			}
			used, ok := st.use(p.used)
			if !ok {
				continue
			}
			for _, owner := range m.executed(p, st) {
				q := m.untold(p, st, until)
				q.owner, q.used = owner, used
				if st.Kind == Acquire && p.isFree() {
					// The store may take back at any time what it told nobody
					// of: etcd's revokes the lease of a call that it gave up.
					q.earliest = q.at
				}
				add(q)
			}
		}
		switch {
		case p.isFree(): // there is no lease to end
		case m.relax == earlyExpiry:
			add(p.vacated(p.at))
		case p.earliest <= until:
			q := p.vacated(max(p.at, p.earliest))
			if m.relax == expiredRenews {
				q.owner = -p.owner
			}
			add(q)
		}
	}
	return all
}

// executed returns the owners who can have a lease when the server has executed,
// in p, a pending step that is no release.
func (m *model) executed(p possibility, st *step) []int {
	mine := p.owner == st.Owner
	switch {
	case p.isFree():
		if st.Kind == Acquire || st.Kind == Renew && m.relax == expiredRenews && p.owner == -st.Owner {
			return []int{st.Owner}
		}
		return nil
	case !m.mayLive(p):
		return nil
	case st.Kind == Renew && mine, st.Kind == Acquire && mine && m.relax == reentry:
		return []int{st.Owner}
	case st.Kind == Renew && m.relax == strangerRenews:
		return []int{st.Owner, p.owner}
	default:
		return nil
	}
}

// use counts one more execution of a pending step, if there is one left.
func (st *step) use(used uint64) (uint64, bool) {
	if st.slot < 0 || st.Kind == Release {
		return used, true
	}
	shift := 4 * st.slot
	if int(used>>shift&maxAgain) >= st.again {
		return used, false
	}
	return used + 1<<shift, true
}

// answer adds to may what is the case after st was executed and answered in p.
func (m *model) answer(may *possibilities, s *state, p possibility, st *step) {
	switch {
	case st.Unknown():
		may.add(p)

	case st.Kind == Acquire && st.Yes:
		switch {
		case st.Token <= s.token && m.relax != anyToken && m.relax != tokenOutOfRange:
		case (st.Token <= 0 || st.Token > maxToken) && m.relax != tokenOutOfRange:
		case p.isFree(), m.relax == doubleGrant, m.relax == reentry && p.owner == st.Owner:
			may.add(m.told(p, st.Owner, st))
		}

	case st.Kind == Acquire:
		if !p.isFree() || m.relax == needlessRefusal {
			may.add(p)
		}

	case st.Kind == Renew && st.Yes:
		switch {
		case p.owner == st.Owner, m.relax == expiredRenews && p.owner == -st.Owner:
			may.add(m.told(p, st.Owner, st))
			if m.relax == renewalOtherwise { // not at all, or added
				may.add(p)
				p.latest += st.TTL
				may.add(p)
			}
		case !p.isFree() && m.relax == strangerRenews:
			may.add(p)
			may.add(m.told(p, st.Owner, st))
			may.add(m.told(p, p.owner, st))
		}

	case st.Kind == Renew:
		if p.owner != st.Owner || m.relax == needlessRefusal {
			may.add(p)
			if !p.isFree() && m.relax == strangerRenews {
				may.add(m.told(p, p.owner, st))
			}
		}

	default: // Release: whoever has no lease changes nothing
		if p.owner != st.Owner || m.relax == releaseKeepsLease {
			may.add(p)
		}
		if p.owner == st.Owner || m.relax == strangerReleases {
			may.add(p.vacated(p.at))
		}
		if p.owner == st.Owner && m.relax == releaseKeepsLease {
			p.owner = nobody
			may.add(p)
		}
	}
}

// possibilities is a set.
type possibilities struct{ all []possibility }

// add adds p, unless the set has a possibility that allows all that p does. Two
// leases that differ only in their end, and overlap, are one.
func (s *possibilities) add(p possibility) {
	for i := 0; i < len(s.all); i++ {
		q := s.all[i]
		if q.covers(p) {
			return
		}
		same := p.owner == q.owner && p.used == q.used && p.at == q.at && p.after == q.after
		if same && !p.isFree() && p.earliest <= q.latest && q.earliest <= p.latest {
			p.earliest, p.latest = min(p.earliest, q.earliest), max(p.latest, q.latest)
			s.all = slices.Delete(s.all, i, i+1)
			i = -1 // it may cover or touch others now
		}
	}
	s.all = append(slices.DeleteFunc(s.all, p.covers), p)
}

// covers reports whether all that can follow q can follow p.
func (p possibility) covers(q possibility) bool {
	if p.owner != q.owner || p.at > q.at {
		return false
	}
	if !p.isFree() && (p.earliest > q.earliest || p.latest < q.latest || p.after != q.after) {
		return false
	}
	for shift := 0; shift < 4*slots; shift += 4 {
		if p.used>>shift&maxAgain > q.used>>shift&maxAgain {
			return false
		}
	}
	return true
}

// normal returns the set in its one normal form.
func (s *possibilities) normal() []possibility {
	slices.SortFunc(s.all, func(a, b possibility) int {
		return cmp.Or(
			cmp.Compare(a.owner, b.owner), cmp.Compare(a.at, b.at),
			cmp.Compare(a.earliest, b.earliest), cmp.Compare(a.latest, b.latest),
			cmp.Compare(a.after, b.after), cmp.Compare(a.used, b.used))
	})
	return s.all
}

var seed = maphash.MakeSeed()

// porcupine returns m as package porcupine wants it. Steps are the input of an
// operation; the output is in them.
func (m *model) porcupine() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return &state{may: []possibility{{}}} },
		Step: func(s, in, _ any) (bool, any) {
			next, ok := m.apply(asState(s), asStep(in))
			if !ok {
				return false, s
			}
			return true, next
		},
		// Only states after the same steps are compared: all but the
		// possibilities is the same then.
		Equal: func(a, b any) bool { return slices.Equal(asState(a).may, asState(b).may) },
		Hash: func(s any) uint64 {
			var h uint64
			for _, p := range asState(s).may {
				h = h*31 + maphash.Comparable(seed, p)
			}
			return h
		},
		DescribeOperation: func(in, _ any) string {
			st := asStep(in)
			return fmt.Sprintf("#%d %s", st.number, st)
		},
		DescribeOperationMetadata: func(in any) string {
			st := asStep(in)
			return fmt.Sprintf("client %d, %s", st.Client, span(st.Op))
		},
		DescribeState: func(s any) string { return asState(s).String() },
	}
}

// Package porcupine was not made for generics. What it hands out is what it got.
func asState(v any) *state { s, _ := v.(*state); return s }
func asStep(v any) *step   { s, _ := v.(*step); return s }

// String says what may be the case.
func (s *state) String() string {
	var parts []string
	for _, p := range s.may {
		parts = append(parts, p.String())
	}
	text := strings.Join(parts, ", or ")
	if s.token > 0 {
		text += fmt.Sprintf("; last token %d", s.token)
	}
	return text
}

func (p possibility) String() string {
	if p.isFree() {
		return "free"
	}
	return fmt.Sprintf("held by owner %d until %s at least, %s at most", p.owner, seconds(p.earliest), seconds(p.latest))
}

// steps converts the history of one key as it was at the time until: what had
// not been answered by then was of unknown outcome.
func steps(h History, o Options, until time.Duration) []*step {
	var all []*step
	used := 0
	for n, op := range h.Ops {
		if op.Call > until {
			break
		}
		if op.Return > until || op.Return == 0 {
			op.Return, op.Err = until, "no answer yet"
		}
		st := &step{Op: op, number: n + 1, slot: -1}
		switch {
		case st.Unknown():
			st.again = o.Deliveries
		case disturbed(op, h.Faults):
			st.again = o.Deliveries - 1
		}
		st.again = min(st.again, maxAgain)
		if st.again > 0 && st.Kind != Release && used < slots {
			st.slot = used
			used++
		}
		all = append(all, st)
	}
	return all
}

// disturbed reports whether the client's connections broke while op ran.
func disturbed(op Op, faults []FaultSpan) bool {
	return slices.ContainsFunc(faults, func(f FaultSpan) bool {
		return f.Breaks && f.Begin < op.Return && (f.End == 0 || op.Call < f.End) &&
			(len(f.Clients) == 0 || slices.Contains(f.Clients, op.Client))
	})
}

// operations are steps as porcupine wants them. Each client is a row of the
// picture; what it does while it is busy goes to a row below all clients.
func operations(steps []*step) []porcupine.Operation {
	rows := 0
	for _, st := range steps {
		rows = max(rows, st.Client+1)
	}
	ops := make([]porcupine.Operation, len(steps))
	busy := make(map[int]time.Duration)
	for i, st := range steps {
		row := st.Client
		for st.Call < busy[row] {
			row += rows
		}
		busy[row] = st.Return
		ops[i] = porcupine.Operation{ClientId: row, Input: st, Call: int64(st.Call), Return: int64(st.Return), Metadata: st}
	}
	return ops
}

// end is later than all that happened in h.
func (h History) end() time.Duration {
	var end time.Duration
	for _, op := range h.Ops {
		end = max(end, op.Call, op.Return)
	}
	return end + 1
}
