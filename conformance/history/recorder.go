package history

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/leasekit/leasekit/core"
)

// Recorder records the calls of the stores that it wraps. One Recorder is one
// clock: only calls of the same process can be compared. It is safe for
// concurrent use; make it with [NewRecorder].
type Recorder struct {
	start time.Time

	mu     sync.Mutex
	last   time.Duration
	keys   map[string]*keyLog
	faults []*FaultSpan
}

// keyLog has the calls of one key.
type keyLog struct {
	ops    []*Op
	owners map[string]int
}

// NewRecorder returns a Recorder whose clock begins now.
func NewRecorder() *Recorder {
	return &Recorder{start: time.Now(), keys: make(map[string]*keyLog)}
}

// Record returns store with its calls recorded as those of client. Optional
// capabilities of store stay visible, and are not recorded.
//
// Calls that are refused with core.ErrInvalid are not recorded: they change
// nothing.
func (r *Recorder) Record(store core.LockStore, client int) core.LockStore {
	return &recorded{r: r, store: store, client: client}
}

// Fault notes that something is broken from now on, until end is called. The
// times in span are set by that. Call it before the fault begins, and end after
// it has ended.
func (r *Recorder) Fault(span FaultSpan) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := &span
	f.Begin, f.End = r.nowLocked(), 0
	r.faults = append(r.faults, f)
	return sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		f.End = r.nowLocked()
	})
}

// History returns what has been recorded so far. It is best called when no call
// is running: one that is counts as unknown.
func (r *Recorder) History() History {
	r.mu.Lock()
	defer r.mu.Unlock()
	var h History
	for _, log := range r.keys {
		for _, op := range log.ops {
			h.Ops = append(h.Ops, *op)
		}
	}
	slices.SortFunc(h.Ops, func(a, b Op) int { return cmp.Compare(a.Call, b.Call) })
	h.Faults = r.faultsLocked(0)
	return h
}

// take removes the calls of one key and returns them, with the faults that
// overlap them. No call on the key may be running, nor come later.
func (r *Recorder) take(key string) History {
	r.mu.Lock()
	defer r.mu.Unlock()
	log := r.keys[key]
	if log == nil {
		return History{}
	}
	delete(r.keys, key)
	var h History
	for _, op := range log.ops {
		h.Ops = append(h.Ops, *op)
	}
	h.Faults = r.faultsLocked(h.Ops[0].Call)
	return h
}

// faultsLocked returns the faults that lasted until after since.
func (r *Recorder) faultsLocked(since time.Duration) []FaultSpan {
	var spans []FaultSpan
	for _, f := range r.faults {
		if f.End == 0 || f.End > since {
			spans = append(spans, *f)
		}
	}
	return spans
}

// nowLocked returns the time since the start, later than all before. Clocks may
// be coarse, and that of a synctest bubble stands still; the order of the calls
// must not be lost.
func (r *Recorder) nowLocked() time.Duration {
	r.last = max(r.last+1, time.Since(r.start))
	return r.last
}

// begin notes that a call is about to be made.
func (r *Recorder) begin(client int, kind Kind, key, owner string, ttl time.Duration) *Op {
	r.mu.Lock()
	defer r.mu.Unlock()
	log := r.keys[key]
	if log == nil {
		log = &keyLog{owners: make(map[string]int)}
		r.keys[key] = log
	}
	if log.owners[owner] == 0 {
		log.owners[owner] = len(log.owners) + 1
	}
	op := &Op{Client: client, Key: key, Kind: kind, Owner: log.owners[owner], TTL: ttl, Call: r.nowLocked()}
	log.ops = append(log.ops, op)
	return op
}

// end notes the answer.
func (r *Recorder) end(op *Op, yes bool, token int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	op.Return = r.nowLocked()
	switch {
	case errors.Is(err, core.ErrInvalid):
		log := r.keys[op.Key]
		log.ops = slices.DeleteFunc(log.ops, func(other *Op) bool { return other == op })
		if len(log.ops) == 0 {
			delete(r.keys, op.Key)
		}
	case err != nil:
		op.Err = err.Error()
	default:
		op.Yes, op.Token = yes, token
	}
}

// recorded is a store whose calls are recorded.
type recorded struct {
	r      *Recorder
	store  core.LockStore
	client int
}

func (s *recorded) Unwrap() core.LockStore { return s.store }

func (s *recorded) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	op := s.r.begin(s.client, Acquire, key, owner, ttl)
	grant, err := s.store.Acquire(ctx, key, owner, ttl)
	s.r.end(op, grant.Acquired, grant.Token, err)
	return grant, err
}

func (s *recorded) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	op := s.r.begin(s.client, Renew, key, owner, ttl)
	renewed, err := s.store.Renew(ctx, key, owner, ttl)
	s.r.end(op, renewed, 0, err)
	return renewed, err
}

func (s *recorded) Release(ctx context.Context, key, owner string) error {
	op := s.r.begin(s.client, Release, key, owner, 0)
	err := s.store.Release(ctx, key, owner)
	s.r.end(op, err == nil, 0, err)
	return err
}
