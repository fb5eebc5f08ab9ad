package etcdstore

import (
	"cmp"
	"context"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// reserve is what a lease lives longer than the ttl that is asked for, at
	// least. Within that time of its last request a released lease has still a
	// whole ttl left, and serves again without another request. As etcd counts
	// whole seconds it is between this and a second more; for a ttl of whole
	// seconds, one second.
	reserve = 500 * time.Millisecond

	// maxIdle is how many released leases of one length are kept, maxIdleAll
	// of all lengths together. Each ends by itself when nobody uses it, which
	// costs the server as much as revoking it.
	maxIdle    = 64
	maxIdleAll = 256

	// minLife is how much a lease must have left to be worth a keep-alive.
	// The server answers the keep-alive of an expired lease only after it has
	// revoked it, up to 500 ms later, and keeps the stream waiting meanwhile.
	minLife = 300 * time.Millisecond

	// shortElection is less than any time in which etcd replaces a leader that
	// is silent: its least timeout is five heartbeats, 1 s by default, and it
	// warns if a heartbeat is shorter than a round trip.
	shortElection = 100 * time.Millisecond
)

// instant is a moment on two clocks.
type instant struct {
	mono time.Time // with Go's monotonic reading
	wall time.Time // without
}

func now() instant {
	t := time.Now()
	return instant{mono: t, wall: t.Round(0)}
}

// since is how much time has passed from earlier to i, at least: the monotonic
// clock stands still while the machine is suspended, the wall clock may be set
// back.
func (i instant) since(earlier instant) time.Duration {
	return max(i.mono.Sub(earlier.mono), i.wall.Sub(earlier.wall))
}

// lease is an etcd lease of ours. It has one owner at a time: a call, a hold,
// the pool, or the reaper.
type lease struct {
	id    clientv3.LeaseID
	class int64         // seconds that were asked for
	ttl   time.Duration // that was granted

	// term is a Raft term in which, or after which, the lease was granted. It
	// is kept alive in that term only. A leader that was frozen, replaced, and
	// continues, revokes at once the leases that have expired by its own clock,
	// although they were kept alive by its successor meanwhile: etcd checks for
	// that (https://github.com/etcd-io/etcd/issues/15247), but not if the
	// frozen leader's clock has ticked before (EtcdServer.isActive), which it
	// does first of all. It does not know the leases of a later term.
	term uint64

	mu   sync.Mutex
	sent instant // the last request that was answered with yes
}

// life is how much the lease has left at the moment t, at least.
func (l *lease) life(t instant) time.Duration {
	l.mu.Lock()
	age := t.since(l.sent)
	l.mu.Unlock()
	return l.ttl - age - age/100
}

// extend notes that a keep-alive, sent at that moment, was answered with yes.
func (l *lease) extend(sent instant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Answers may come out of order when streams change.
	if sent.mono.After(l.sent.mono) {
		l.sent = sent
	}
}

// classOf returns how many seconds to ask for, for leases of ttl: ttl and the
// reserve, rounded up.
func classOf(ttl time.Duration) int64 {
	if ttl > clientv3.MaxLeaseTTL*time.Second-reserve { // 285 years
		return clientv3.MaxLeaseTTL
	}
	return int64((ttl + reserve + time.Second - 1) / time.Second)
}

// leasePool grants leases, and keeps released ones for reuse. A lease in the
// pool has no key, and no request that could put one on it is on its way.
type leasePool struct {
	s      *Store
	mu     sync.Mutex
	idle   map[int64][]*lease // by class; the last released is the last
	n      int
	closed bool
}

func (p *leasePool) init(s *Store) {
	p.s = s
	p.idle = make(map[int64][]*lease)
}

// get returns a lease without a key that lives at least until start + ttl.
func (p *leasePool) get(ctx context.Context, ttl time.Duration, start instant) (*lease, error) {
	class := classOf(ttl)
	for {
		l := p.take(class)
		if l == nil {
			return p.grant(ctx, class)
		}
		if l.term != p.s.term.Load() {
			continue // ends by itself
		}
		if l.life(start) >= ttl {
			return l, nil
		}
		if l.life(start) < minLife {
			continue // ends by itself
		}
		sent := p.s.clock()
		switch alive, err := p.s.keeper.wait(ctx, p.s.keeper.send(l)); {
		case alive && p.s.clock().since(sent) >= p.s.timing.shortElection:
			p.s.reaper.revoke(l) // the answer may be too late, see Store.keep
			return p.grant(ctx, class)
		case alive:
			return l, nil
		case ctx.Err() != nil:
			p.put(l)
			return nil, ctx.Err()
		case err != nil:
			return p.grant(ctx, class)
		}
	}
}

func (p *leasePool) grant(ctx context.Context, class int64) (*lease, error) {
	// A grant that is executed twice, or whose outcome is not known, leaves an
	// empty lease, which ends by itself.
	l := &lease{class: class, term: p.s.term.Load(), sent: p.s.clock()}
	resp, _, err := resend(ctx, p.s, p.s.timing.patience, func(ctx context.Context) (*clientv3.LeaseGrantResponse, error) {
		return p.s.client.Grant(ctx, class)
	})
	if err != nil {
		return nil, err
	}
	l.id, l.ttl = resp.ID, time.Duration(resp.TTL)*time.Second
	l.term = cmp.Or(l.term, resp.GetRaftTerm())
	p.s.observe(resp.ResponseHeader, position{})
	return l, nil
}

// take returns the lease of that class that was released last, or nil.
func (p *leasePool) take(class int64) *lease {
	p.mu.Lock()
	defer p.mu.Unlock()
	leases := p.idle[class]
	if len(leases) == 0 {
		return nil
	}
	last := len(leases) - 1
	l := leases[last]
	leases[last] = nil
	p.idle[class] = leases[:last]
	p.n--
	return l
}

// put takes a lease back that certainly has no key. l may be nil.
func (p *leasePool) put(l *lease) {
	if l == nil {
		return
	}
	t := p.s.clock()
	if l.life(t) < minLife {
		return // ends by itself
	}
	p.mu.Lock()
	full := p.closed || p.n >= maxIdleAll || len(p.idle[l.class]) >= maxIdle
	if full && !p.closed {
		p.sweepLocked(t)
		full = p.n >= maxIdleAll || len(p.idle[l.class]) >= maxIdle
	}
	if !full {
		p.idle[l.class] = append(p.idle[l.class], l)
		p.n++
	}
	p.mu.Unlock()
	if full {
		p.s.reaper.revoke(l)
	}
}

// sweepLocked drops leases that have ended or are about to, and classes that
// have none.
func (p *leasePool) sweepLocked(t instant) {
	for class, leases := range p.idle {
		live := leases[:0]
		for _, l := range leases {
			if l.life(t) >= minLife {
				live = append(live, l)
			}
		}
		clear(leases[len(live):])
		p.n -= len(leases) - len(live)
		if len(live) == 0 {
			delete(p.idle, class)
		} else {
			p.idle[class] = live
		}
	}
}

// forget drops all leases: the server seems to have lost them.
func (p *leasePool) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.idle)
	p.n = 0
}

// close empties the pool for good and returns what was in it.
func (p *leasePool) close() []*lease {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	var all []*lease
	for _, leases := range p.idle {
		all = append(all, leases...)
	}
	clear(p.idle)
	p.n = 0
	return all
}
