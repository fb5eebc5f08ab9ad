package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/leasekit/leasekit/core"
)

// Names of impls: what a result was measured on. Peers have their own.
const (
	implOurs  = "ours"
	implFloor = "floor"
)

// unlock ends what a lock function began.
type unlock func(context.Context) error

// locker is one way to lock on one server: ours, a peer, or the floor, which
// does not lock at all. A nil function means that it has no such thing.
type locker struct {
	impl string

	// try locks a free key.
	try func(ctx context.Context, key string) (unlock, error)
	// wait locks a key as soon as it is free.
	wait func(ctx context.Context, key string) (unlock, error)
	// held asks once for a key that somebody holds, and returns an error if it
	// got it.
	held func(ctx context.Context, key string) error
	// hold locks a key and returns what renews it.
	hold func(ctx context.Context, key string) (renew func(context.Context) error, end unlock, err error)
	// run runs an empty callback under the lock.
	run func(ctx context.Context, key string) error
	// contender, if set, is called for each contender of a hand-over and
	// returns its own wait: some peers need a session each.
	contender func(ctx context.Context) (wait func(ctx context.Context, key string) (unlock, error), end func(), err error)
}

func (l *locker) isPeer() bool { return l.impl != implOurs && l.impl != implFloor }

// backend is a store with its floor and its peers, on one server.
type backend struct {
	name    string
	server  string // name and version
	store   core.LockStore
	lockers []locker // ours first, then the floor
	traffic *traffic
	// operations is the server's own count of what it has done; nil if it has
	// none.
	operations func(context.Context) (int64, error)
	close      func()
}

var errGranted = errors.New("a held key was granted")

// ours is our store as a locker.
func ours(store core.LockStore, ttl time.Duration) (locker, error) {
	once, err := core.NewStrategy(store, core.Options{TTL: ttl})
	if err != nil {
		return locker{}, err
	}
	waiting, err := core.NewStrategy(store, core.Options{TTL: ttl, Wait: core.WaitForever})
	if err != nil {
		return locker{}, err
	}
	var owners atomic.Int64
	acquire := func(ctx context.Context, key string) (string, error) {
		owner := fmt.Sprintf("bench-%d", owners.Add(1))
		g, err := store.Acquire(ctx, key, owner, ttl)
		if err == nil && !g.Acquired {
			err = fmt.Errorf("key %q is held", key)
		}
		return owner, err
	}
	return locker{
		impl: implOurs,
		try: func(ctx context.Context, key string) (unlock, error) {
			owner, err := acquire(ctx, key)
			return func(ctx context.Context) error { return store.Release(ctx, key, owner) }, err
		},
		wait: func(ctx context.Context, key string) (unlock, error) {
			lease, err := waiting.Acquire(ctx, key)
			return func(context.Context) error { return lease.Release() }, err
		},
		held: func(ctx context.Context, key string) error {
			g, err := store.Acquire(ctx, key, fmt.Sprintf("bench-%d", owners.Add(1)), ttl)
			if err == nil && g.Acquired {
				err = errGranted
			}
			return err
		},
		hold: func(ctx context.Context, key string) (func(context.Context) error, unlock, error) {
			owner, err := acquire(ctx, key)
			renew := func(ctx context.Context) error {
				ok, err := store.Renew(ctx, key, owner, ttl)
				if err == nil && !ok {
					err = errors.New("not renewed")
				}
				return err
			}
			return renew, func(ctx context.Context) error { return store.Release(ctx, key, owner) }, err
		},
		run: func(ctx context.Context, key string) error {
			return once.Do(ctx, key, func(context.Context) error { return nil })
		},
	}, nil
}

// traffic counts what goes over the connections of one client.
type traffic struct{ bytes atomic.Int64 }

type countedConn struct {
	net.Conn
	t *traffic
}

func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.t.bytes.Add(int64(n))
	return n, err
}

func (c countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.t.bytes.Add(int64(n))
	return n, err
}

// DialContext dials a counted connection. It is what clients call a dialer.
func (t *traffic) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return countedConn{conn, t}, nil
}
