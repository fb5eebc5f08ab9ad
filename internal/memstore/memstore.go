// Package memstore is the engine of the memory store: leases in a map of this
// process. It is a package of its own because core defaults to it and package
// memory wraps it.
package memstore

import (
	"container/list"
	"hash/maphash"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	shardCount = 64 // a power of two; far more than cores that fight for one key space

	// An acquisition looks at sweepOwn slots of its shard, and every
	// sweepEvery-th one at sweepOther slots of another shard, so that expired
	// leases go although nobody asks for their keys again: more slots are
	// looked at than were filled.
	sweepOwn   = 2
	sweepEvery = 64
	sweepOther = 256

	// Below this many slots a shard does not bother to give memory back.
	smallShard = 64
)

// Store keeps leases. Keys, owners and ttls are checked by its callers. All
// methods are safe for concurrent use.
type Store struct {
	now    func() time.Time
	seed   maphash.Seed
	token  atomic.Int64 // the last one granted, of all keys
	swept  atomic.Uint32
	shards [shardCount]shard
}

// shard holds the leases of some keys in slots. A slot is reused, so that
// locking and unlocking allocates nothing.
type shard struct {
	mu       sync.Mutex
	slots    []slot
	index    map[string]int32 // key -> slot
	free     []int32
	hand     int // the next slot that is swept
	acquired int
	waiting  map[string]*list.List // of chan struct{}
	_        [64]byte              // keeps the next shard's mutex off this cache line
}

// slot is one lease; key is "" when the slot is free.
type slot struct {
	key, owner string
	until      time.Time
	token      int64
}

// New returns an empty store that reads the time from now; nil means time.Now,
// whose monotonic reading makes leases immune to steps of the wall clock.
func New(now func() time.Time) *Store {
	if now == nil {
		now = time.Now
	}
	return &Store{now: now, seed: maphash.MakeSeed()}
}

func (s *Store) shard(key string) *shard {
	return &s.shards[maphash.String(s.seed, key)%shardCount]
}

// Acquire grants key to owner and returns the token, or 0 and how long the
// present lease still lives.
func (s *Store) Acquire(key, owner string, ttl time.Duration) (token int64, left time.Duration) {
	h := s.shard(key)
	h.mu.Lock()
	now := s.now()
	i, ok := h.index[key]
	if ok {
		if left := h.slots[i].until.Sub(now); left > 0 {
			h.mu.Unlock()
			return 0, left
		}
	} else {
		i = h.add(key)
	}
	token = s.nextToken(now)
	h.slots[i] = slot{key: key, owner: owner, until: now.Add(ttl), token: token}
	h.sweep(now, sweepOwn)
	h.acquired++
	elsewhere := h.acquired%sweepEvery == 0
	h.mu.Unlock()
	if elsewhere {
		s.sweepNext()
	}
	return token, 0
}

// Renew pushes the end of owner's live lease to now + ttl.
func (s *Store) Renew(key, owner string, ttl time.Duration) bool {
	h := s.shard(key)
	h.mu.Lock()
	defer h.mu.Unlock()
	now := s.now()
	i, ok := h.index[key]
	if !ok || h.slots[i].owner != owner || !now.Before(h.slots[i].until) {
		return false
	}
	h.slots[i].until = now.Add(ttl)
	return true
}

// Release ends owner's live lease and signals those who wait for the key.
func (s *Store) Release(key, owner string) {
	h := s.shard(key)
	h.mu.Lock()
	i, ok := h.index[key]
	if !ok || h.slots[i].owner != owner {
		h.mu.Unlock()
		return
	}
	h.remove(i)
	signalled := h.signal(key)
	h.mu.Unlock()
	if signalled {
		// Whoever releases in a loop would take the key again before any
		// waiter has run, every time.
		runtime.Gosched()
	}
}

// Subscribe returns a channel that gets a value when key is released, and what
// ends that.
func (s *Store) Subscribe(key string) (signals <-chan struct{}, stop func()) {
	h := s.shard(key)
	c := make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waiting == nil {
		h.waiting = make(map[string]*list.List)
	}
	waiting := h.waiting[key]
	if waiting == nil {
		waiting = list.New()
		h.waiting[key] = waiting
	}
	e := waiting.PushBack(c)
	return c, sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		waiting.Remove(e)
		if waiting.Len() == 0 {
			delete(h.waiting, key)
		}
		if len(h.waiting) == 0 {
			h.waiting = nil // a map does not shrink by itself
		}
	})
}

// Lease is a live lease as [Store.Leases] shows it.
type Lease struct {
	Key, Owner string
	Token      int64
	Left       time.Duration
}

// Lease returns the live lease on key.
func (s *Store) Lease(key string) (Lease, bool) {
	h := s.shard(key)
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.live(key, s.now())
}

// Leases calls yield for each live lease whose key begins with prefix, until
// that returns false. It copies a shard at a time and holds no lock while yield
// runs.
func (s *Store) Leases(prefix string, yield func(Lease) bool) {
	for i := range s.shards {
		h := &s.shards[i]
		var found []Lease
		h.mu.Lock()
		now := s.now()
		for key := range h.index {
			if l, ok := h.live(key, now); ok && strings.HasPrefix(key, prefix) {
				found = append(found, l)
			}
		}
		h.mu.Unlock()
		for _, l := range found {
			if !yield(l) {
				return
			}
		}
	}
}

// Break ends the live lease on key, whoever owns it, and returns what it was.
func (s *Store) Break(key string) (was Lease, broken bool) {
	h := s.shard(key)
	h.mu.Lock()
	defer h.mu.Unlock()
	was, broken = h.live(key, s.now())
	if broken {
		h.remove(h.index[key])
		h.signal(key)
	}
	return was, broken
}

// Len returns how many leases are kept, expired ones that were not swept yet
// included.
func (s *Store) Len() int {
	n := 0
	for i := range s.shards {
		h := &s.shards[i]
		h.mu.Lock()
		n += len(h.index)
		h.mu.Unlock()
	}
	return n
}

// nextToken is max(last + 1, clock in microseconds): it grows although the
// process that granted the last one is gone, and its successor knows nothing.
func (s *Store) nextToken(now time.Time) int64 {
	clock := now.UnixMicro()
	for {
		last := s.token.Load()
		next := max(last+1, clock)
		if s.token.CompareAndSwap(last, next) {
			return next
		}
	}
}

// sweepNext sweeps some slots of the shard whose turn it is, unless it is busy.
func (s *Store) sweepNext() {
	h := &s.shards[s.swept.Add(1)%shardCount]
	if h.mu.TryLock() {
		h.sweep(s.now(), sweepOther)
		h.mu.Unlock()
	}
}

// add takes a slot for key.
func (h *shard) add(key string) int32 {
	var i int32
	if n := len(h.free); n > 0 {
		i = h.free[n-1]
		h.free = h.free[:n-1]
	} else {
		i = int32(len(h.slots))
		h.slots = append(h.slots, slot{})
	}
	if h.index == nil {
		h.index = make(map[string]int32)
	}
	h.index[key] = i
	return i
}

// live returns the lease on key if it has not expired.
func (h *shard) live(key string, now time.Time) (Lease, bool) {
	i, ok := h.index[key]
	if !ok || !now.Before(h.slots[i].until) {
		return Lease{}, false
	}
	l := h.slots[i]
	return Lease{Key: l.key, Owner: l.owner, Token: l.token, Left: l.until.Sub(now)}, true
}

// remove frees slot i. A shard that was once much larger gives its memory back:
// neither slices nor maps shrink by themselves.
func (h *shard) remove(i int32) {
	delete(h.index, h.slots[i].key)
	h.slots[i] = slot{}
	h.free = append(h.free, i)
	if len(h.slots) <= smallShard || len(h.index) > len(h.slots)/4 {
		return
	}
	old := h.slots
	h.slots = make([]slot, 0, 2*len(h.index))
	h.index = make(map[string]int32, len(h.index))
	h.free, h.hand = nil, 0
	for _, kept := range old {
		if kept.key != "" {
			h.slots[h.add(kept.key)] = kept
		}
	}
}

// sweep looks at the next n slots and removes leases that have expired.
func (h *shard) sweep(now time.Time, n int) {
	for range min(n, len(h.slots)) {
		if len(h.slots) == 0 {
			return // removing the last one gave the memory back
		}
		if h.hand >= len(h.slots) {
			h.hand = 0
		}
		if l := &h.slots[h.hand]; l.key != "" && !now.Before(l.until) {
			h.remove(int32(h.hand))
		}
		h.hand++
	}
}

// signal tells everybody who waits for key. The oldest is told last: the Go
// scheduler runs next whom it made ready last, and that should be the one who
// has waited longest. It returns whether anybody was told.
func (h *shard) signal(key string) bool {
	waiting := h.waiting[key]
	if waiting == nil {
		return false
	}
	for e := waiting.Back(); e != nil; e = e.Prev() {
		select {
		case e.Value.(chan struct{}) <- struct{}{}: //nolint:forcetypeassert // it holds nothing else
		default: // has a signal already
		}
	}
	return true
}
