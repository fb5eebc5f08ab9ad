// Package memory is the lock store of one process: leases in a map. Locks on it
// exclude the goroutines that share the store, and nobody else.
//
// # Clock
//
// The process's own, with its monotonic reading: steps of the wall clock change
// no lease. While the machine is suspended that clock stands still, and so do
// the leases.
//
// # Atomicity
//
// A mutex for each of 64 shards of the keys. A lease expires at its instant, no
// cleaner has to come by.
//
// # Fencing
//
// One sequence of tokens for the whole store: max(last + 1, wall clock in
// microseconds). They go on growing when the process is restarted, as long as
// the clock is not set back by more than the process was away.
//
// # Limits
//
// Nothing is kept for a key that was released. An expired lease that nobody
// asks for again is swept by the acquisitions that follow, on whatever keys. A
// try takes about 100 ns and allocates nothing.
package memory

import (
	"context"
	"iter"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/memstore"
)

// Options configures a [Store]. The zero value is ready to use.
type Options struct {
	// Now is the clock that decides when a lease ends. It is there to play a
	// server whose clock disagrees with its clients'. It must be safe for
	// concurrent use. Default [time.Now].
	Now func() time.Time
}

// Store is a [core.LockStore] in memory, with every optional capability. It holds no
// resources but memory, so there is nothing to close. All methods are safe for
// concurrent use.
type Store struct{ engine *memstore.Store }

var (
	_ core.LockStore = (*Store)(nil)
	_ core.Notifier  = (*Store)(nil)
	_ core.Inspector = (*Store)(nil)
	_ core.Breaker   = (*Store)(nil)
)

// New returns an empty store. The error is nil; it is there because every
// store's New has one.
func New(o Options) (*Store, error) {
	return &Store{engine: memstore.New(o.Now)}, nil
}

// Acquire implements [core.LockStore].
func (s *Store) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	if err := ctx.Err(); err != nil {
		return core.Grant{}, err
	}
	token, left := s.engine.Acquire(key, owner, ttl)
	return core.Grant{Acquired: token != 0, Token: token, Left: left}, nil
}

// Renew implements [core.LockStore].
func (s *Store) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return false, err
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	return s.engine.Renew(key, owner, ttl), nil
}

// Release implements [core.LockStore].
func (s *Store) Release(ctx context.Context, key, owner string) error {
	if err := core.CheckKey(key); err != nil {
		return err
	}
	if err := core.CheckOwner(owner); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	s.engine.Release(key, owner)
	return nil
}

// Subscribe implements [core.Notifier].
func (s *Store) Subscribe(ctx context.Context, key string) (signals <-chan struct{}, stop func(), err error) {
	if err := core.CheckKey(key); err != nil {
		return nil, nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	signals, stop = s.engine.Subscribe(key)
	return signals, stop, nil
}

// Leases implements [core.Inspector]. It copies one of 64 parts of the store at
// a time.
func (s *Store) Leases(ctx context.Context, q core.LeaseQuery) iter.Seq2[core.LeaseInfo, error] {
	return func(yield func(core.LeaseInfo, error) bool) {
		err := q.Check()
		if err == nil {
			err = ctx.Err()
		}
		switch {
		case err != nil:
		case q.Key != "":
			if l, ok := s.engine.Lease(q.Key); ok {
				yield(info(l), nil)
			}
		default:
			s.engine.Leases(q.Prefix, func(l memstore.Lease) bool {
				err = ctx.Err()
				return err == nil && yield(info(l), nil)
			})
		}
		if err != nil {
			yield(core.LeaseInfo{}, err)
		}
	}
}

// Break implements [core.Breaker].
func (s *Store) Break(ctx context.Context, key string) (was core.LeaseInfo, broken bool, err error) {
	if err := core.CheckKey(key); err != nil {
		return core.LeaseInfo{}, false, err
	}
	if err := ctx.Err(); err != nil {
		return core.LeaseInfo{}, false, err
	}
	l, broken := s.engine.Break(key)
	if !broken {
		return core.LeaseInfo{}, false, nil
	}
	return info(l), true, nil
}

func info(l memstore.Lease) core.LeaseInfo {
	return core.LeaseInfo{Key: l.Key, Label: core.OwnerLabel(l.Owner), Token: l.Token, Left: l.Left}
}

// Len returns the number of leases that the store keeps, expired ones that were
// not swept yet included.
func (s *Store) Len() int { return s.engine.Len() }
