package etcdstore

import "sync"

// holdID names an acquisition: a key and the owner that asked for it.
type holdID struct{ key, owner string }

// hold is what the store remembers of a key that it has put. The truth is in
// etcd: without a hold, Renew and Release ask there, and cost more.
type hold struct {
	id    holdID
	lease *lease // that the key hangs on

	// ghost: the outcome of the Acquire is not known, and its lease is being
	// revoked.
	ghost bool
	// tainted: a second delivery of the Acquire may be on its way. It could
	// put the key again after its release, so the lease must not live on.
	tainted bool
	// doubt: the key may have been moved to another lease.
	doubt bool

	removed bool
	// swept: removed because its lease seemed to have ended, and not because
	// the key was released.
	swept bool
}

// holds are the holds of a store.
type holds struct {
	s  *Store
	mu sync.Mutex
	m  map[holdID]*hold
	// queue has every hold of m, and some that were removed. Each that is
	// added looks at two in front, and drops those that have ended: holds that
	// nobody releases do not pile up, and nobody has to come by to sweep them.
	queue []*hold
}

func (hs *holds) init(s *Store) {
	hs.s = s
	hs.m = make(map[holdID]*hold)
}

func (hs *holds) add(h *hold) {
	t := hs.s.clock()
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if old := hs.m[h.id]; old != nil {
		old.removed = true
	}
	hs.m[h.id] = h
	hs.queue = append(hs.queue, h)
	for range min(2, len(hs.queue)) {
		first := hs.queue[0]
		hs.queue[0] = nil
		hs.queue = hs.queue[1:]
		if !first.removed && first.lease.life(t) <= 0 {
			first.swept = true
			hs.removeLocked(first)
		}
		if !first.removed {
			hs.queue = append(hs.queue, first)
		}
	}
}

// get returns the hold of id and its present state, or nil.
func (hs *holds) get(id holdID) (*hold, hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.m[id]; h != nil {
		return h, *h
	}
	return nil, hold{}
}

// remove forgets h. It returns the lease, which is the caller's from then on,
// or nil if h was forgotten before. h may be nil.
func (hs *holds) remove(h *hold) *lease {
	if h == nil {
		return nil
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h.removed {
		return nil
	}
	hs.removeLocked(h)
	return h.lease
}

func (hs *holds) removeLocked(h *hold) {
	h.removed = true
	delete(hs.m, h.id)
}

// doubted notes that nobody knows which lease the key of h hangs on. h may be
// nil.
func (hs *holds) doubted(h *hold) {
	if h == nil {
		return
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h.doubt = true
}

// moved notes that the key of id hangs on l now. h is its hold, or nil.
func (hs *holds) moved(h *hold, id holdID, l *lease) {
	if h == nil {
		hs.add(&hold{id: id, lease: l})
		return
	}
	hs.mu.Lock()
	old, tainted, removed, swept := h.lease, h.tainted || h.ghost, h.removed, h.swept
	if !removed {
		h.lease, h.tainted, h.ghost, h.doubt = l, false, false, false
	}
	hs.mu.Unlock()
	switch {
	case swept:
		// The key lived on, in etcd's own time, and hangs on l.
		hs.add(&hold{id: id, lease: l})
	case removed:
		// Released meanwhile: l has no key any more, unless that release
		// failed, and then it shall not have it for long.
		hs.s.reaper.revoke(l)
	case tainted:
		hs.s.reaper.revoke(old)
	default:
		hs.s.leases.put(old)
	}
}
