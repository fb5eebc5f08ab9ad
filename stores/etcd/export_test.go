package etcdstore

import (
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Skew makes the clocks of s wrong by d.
func Skew(s *Store, d time.Duration) {
	s.clock = func() instant {
		t := now()
		return instant{mono: t.mono.Add(d), wall: t.wall.Add(d)}
	}
}

// Suspended makes it look to s as if the machine had been suspended for d: the
// wall clock has gone on, the monotonic one has not.
func Suspended(s *Store, d time.Duration) {
	s.clock = func() instant {
		t := now()
		return instant{mono: t.mono, wall: t.wall.Add(d)}
	}
}

// Wait has s wait for answers as long as they take: a server that is slow gets no
// request twice, and no answer counts as too late.
func Wait(s *Store) {
	s.timing = timing{patience: time.Hour, putPatience: time.Hour, tryPatience: time.Hour, shortElection: time.Hour}
}

// Pooled returns the leases that s keeps for reuse.
func Pooled(s *Store) []clientv3.LeaseID {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	var ids []clientv3.LeaseID
	for _, leases := range s.leases.idle {
		for _, l := range leases {
			ids = append(ids, l.id)
		}
	}
	return ids
}

// Remembered counts what s keeps in memory about keys.
func Remembered(s *Store) (holds, queue, tries, held, watches int) {
	s.holds.mu.Lock()
	holds, queue = len(s.holds.m), len(s.holds.queue)
	s.holds.mu.Unlock()
	s.tries.mu.Lock()
	tries, held = len(s.tries.m), len(s.tries.held)
	s.tries.mu.Unlock()
	s.watches.mu.Lock()
	watches = len(s.watches.m)
	s.watches.mu.Unlock()
	return holds, queue, tries, held, watches
}

// Limits that tests rely on.
const (
	MaxIdle = maxIdle
	MaxRead = maxRead
)
