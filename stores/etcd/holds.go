package etcdstore

import (
	"slices"
	"sync"
)

// holdID names an acquisition: a key and the owner that asked for it.
type holdID struct{ key, owner string }

// hold is what the store remembers of a key that it has put. The truth is in
// etcd: without a hold, Renew and Release ask there, and cost more.
type hold struct {
	id    holdID
	lease *lease // that the key hangs on; nil: not known
	// created is the revision at which the key was created, rev the one at
	// which it was put on the lease. Answers may arrive in another order than
	// etcd gave them: the one with the greatest revision is right.
	created, rev int64
	// doubt: the key may have been moved to another lease.
	doubt bool

	// ghosts are leases on which the key may be put yet, by an Acquire whose
	// outcome is not known or by a second delivery. They are never used again,
	// and Release revokes them.
	ghosts []*lease

	removed bool
}

// ended reports whether all leases of h have ended by the moment t, probably:
// their life is what they have left at least.
func (h *hold) ended(t instant) bool {
	return (h.lease == nil || h.lease.life(t) <= 0) &&
		!slices.ContainsFunc(h.ghosts, func(l *lease) bool { return l.life(t) > 0 })
}

// free returns the lease of h, whose key is not on it any more, if another key
// can have it.
func (h *hold) free() *lease {
	if slices.Contains(h.ghosts, h.lease) {
		return nil
	}
	return h.lease
}

// holds are the holds of a store. Forgetting one does no harm. A lease that
// goes back to the pool, or is revoked, must not have a key any more: so its
// revision decides, and never the order in which answers came.
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

// get returns the hold of id as it is now; the zero hold if there is none.
func (hs *holds) get(id holdID) hold {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.m[id]; h != nil {
		return *h
	}
	return hold{}
}

// put notes that the key of id, created at that revision, was put on l at the
// revision rev. It returns the lease that is free for another key now, or nil:
// the one that the key was on before, or l if it was put on another one since.
func (hs *holds) put(id holdID, l *lease, created, rev int64) (unused *lease) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.addLocked(id)
	if rev < h.rev {
		return l
	}
	unused = h.free()
	h.lease, h.created, h.rev, h.doubt = l, created, rev, false
	return unused
}

// haunt notes that the key of id may be put on l yet.
func (hs *holds) haunt(id holdID, l *lease) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.addLocked(id)
	h.ghosts = append(slices.Clip(h.ghosts), l) // get has handed out the old slice
}

// banish notes that ghosts of id were revoked.
func (hs *holds) banish(id holdID, ghosts []*lease) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.m[id]
	if h == nil {
		return
	}
	h.ghosts = slices.DeleteFunc(slices.Clone(h.ghosts), func(l *lease) bool { return slices.Contains(ghosts, l) })
	if h.lease == nil && len(h.ghosts) == 0 {
		hs.removeLocked(h)
	}
}

// doubt notes that nobody knows which lease the key of id hangs on.
func (hs *holds) doubt(id holdID) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.m[id]; h != nil {
		h.doubt = true
	}
}

// gone notes that the key of id that was created at that revision is gone.
func (hs *holds) gone(id holdID, created int64) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.m[id]; h != nil && h.created == created {
		hs.clearLocked(h)
	}
}

// end notes that the key of id was gone at the revision rev, whatever has become
// of it since. It returns the lease that is free for another key now, or nil.
func (hs *holds) end(id holdID, rev int64) *lease {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.m[id]
	if h == nil || h.rev > rev {
		return nil
	}
	l := h.free()
	hs.clearLocked(h)
	return l
}

// addLocked returns the hold of id, a new one if there is none.
func (hs *holds) addLocked(id holdID) *hold {
	if h := hs.m[id]; h != nil {
		return h
	}
	h := &hold{id: id}
	hs.m[id] = h
	t := hs.s.clock()
	for range min(2, len(hs.queue)) {
		first := hs.queue[0]
		hs.queue[0] = nil
		hs.queue = hs.queue[1:]
		if !first.removed && first.ended(t) {
			hs.removeLocked(first)
		}
		if !first.removed {
			hs.queue = append(hs.queue, first)
		}
	}
	hs.queue = append(hs.queue, h)
	return h
}

// clearLocked forgets all about h but its ghosts.
func (hs *holds) clearLocked(h *hold) {
	h.lease, h.created, h.rev, h.doubt = nil, 0, 0, false
	if len(h.ghosts) == 0 {
		hs.removeLocked(h)
	}
}

func (hs *holds) removeLocked(h *hold) {
	h.removed = true
	delete(hs.m, h.id)
}
