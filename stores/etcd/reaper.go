package etcdstore

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

const (
	// reapers is how many revocations are on their way at once.
	reapers = 4
	// maxReap is how many leases wait for theirs. More end by themselves.
	maxReap = 4096
	// reapBound is how long one revocation may take, reapPause how long to
	// wait after one that failed.
	reapBound = 2 * time.Second
	reapPause = 250 * time.Millisecond
)

// reaper revokes leases that nobody may use any more, in the background. Each
// would end by itself; the reaper makes it sooner, and certain.
type reaper struct {
	s    *Store
	stop chan struct{} // closed by finish

	mu      sync.Mutex
	queue   []*lease
	workers int
	idle    chan struct{} // closed when no worker is left, if finish waits
}

func (r *reaper) init(s *Store) {
	r.s = s
	r.stop = make(chan struct{})
}

// revoke ends l soon.
func (r *reaper) revoke(l *lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) >= maxReap {
		return
	}
	r.queue = append(r.queue, l)
	if r.workers < reapers && r.s.spawn(r.work) {
		r.workers++
	}
}

func (r *reaper) work() {
	for {
		r.mu.Lock()
		if len(r.queue) == 0 {
			r.workers--
			if r.workers == 0 && r.idle != nil {
				close(r.idle)
				r.idle = nil
			}
			r.mu.Unlock()
			return
		}
		l := r.queue[0]
		r.queue[0] = nil
		r.queue = r.queue[1:]
		r.mu.Unlock()

		ctx, cancel := context.WithTimeout(r.s.ctx, reapBound)
		err := r.s.revoke(ctx, l)
		cancel()
		final := isRefusal(err) && !errors.Is(err, rpctypes.ErrTooManyRequests)
		if err != nil && !final && l.life(r.s.clock()) > 0 {
			r.again(l)
		}
	}
}

// again queues l once more, after a pause.
func (r *reaper) again(l *lease) {
	timer := time.NewTimer(reapPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		r.mu.Lock()
		defer r.mu.Unlock()
		r.queue = append(r.queue, l)
	case <-r.stop:
	case <-r.s.ctx.Done():
	}
}

// finish waits until everything is revoked, at most for bound. What fails is
// not tried again.
func (r *reaper) finish(bound time.Duration) {
	close(r.stop)
	r.mu.Lock()
	if r.workers == 0 {
		r.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	r.idle = idle
	r.mu.Unlock()
	timer := time.NewTimer(bound)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
	}
}
