package redisstore

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/await"
)

// The defaults of [Options].
const (
	DefaultPrefix    = "leasekit:"
	DefaultRetention = time.Hour
)

// Options of [New]. The zero value means the defaults.
type Options struct {
	// Prefix goes in front of every key, as it is: the record of a lock is the
	// hash Prefix + key. Default "leasekit:". Two stores exclude each other
	// only if their prefixes are the same, so it must not change while old
	// and new processes run side by side.
	Prefix string

	// Retention is how long the record of a lock, and with it the last token,
	// outlives its lease; Redis then deletes it. Default 1 h, finer than 1 ms
	// is rounded up. While the record is there, the next token is larger
	// whatever the server's clock does; afterwards it is larger as long as
	// the clock is past the time of the last grant.
	Retention time.Duration

	// Logger says when waiters fall back to polling because the connection
	// for wake-ups was lost, and when there is one again. Default
	// slog.Default().
	Logger *slog.Logger
}

// Store keeps leases in Redis. It is safe for concurrent use; make it with
// [New].
//
// Calls run on goroutines of the store's, so that they can return when their
// context ends; each waits a second for another call, or until [Store.Close],
// and then ends.
type Store struct {
	client    redis.UniversalClient
	prefix    string
	retention any // milliseconds, an int64
	wakeups   *hub
	workers   *await.Workers

	acquire, renew, release, inspect, breaking script
}

var (
	_ core.LockStore = (*Store)(nil)
	_ core.Notifier  = (*Store)(nil)
	_ core.Inspector = (*Store)(nil)
	_ core.Breaker   = (*Store)(nil)
)

// New returns a store on client, which stays the caller's: the store never
// closes it. New does no I/O. It returns an error that matches
// [core.ErrInvalid] when client is nil or a [redis.Ring], or when an option is
// outside its limits.
//
// A *redis.Client is fine, of one server or of a Sentinel (NewFailoverClient),
// and so is a *redis.ClusterClient, of a cluster or of a Sentinel
// (NewFailoverClusterClient). A type that embeds one of them, or a
// redis.UniversalClient, is seen through. A Ring is not fine: it sends a key to
// another server when the first does not answer, and then both servers grant it.
func New(client redis.UniversalClient, o Options) (*Store, error) {
	if client == nil || reflect.ValueOf(client).Kind() == reflect.Pointer && reflect.ValueOf(client).IsNil() {
		return nil, fmt.Errorf("redisstore: %w: no client", core.ErrInvalid)
	}
	if _, ring := inner[interface{ SetAddrs(map[string]string) }](client); ring { // only a Ring has it
		return nil, fmt.Errorf("redisstore: %w: a Ring moves keys to another server when one is down, so that both grant them: use a Client or a ClusterClient", core.ErrInvalid)
	}
	if o.Retention < 0 {
		return nil, fmt.Errorf("redisstore: %w: retention %v: use 0 for the default of %v, or more", core.ErrInvalid, o.Retention, DefaultRetention)
	}
	if o.Retention == 0 {
		o.Retention = DefaultRetention
	}
	if o.Prefix == "" {
		o.Prefix = DefaultPrefix
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return &Store{
		client:    client,
		prefix:    o.Prefix,
		retention: roundUp(o.Retention, time.Millisecond),
		wakeups:   newHub(client, o.Logger),
		workers:   await.New("redis"),
		acquire:   newScript(acquireSource),
		renew:     newScript(renewSource),
		release:   newScript(releaseSource),
		inspect:   newScript(inspectSource),
		breaking:  newScript(breakSource),
	}, nil
}

// inner returns client as a T, or the client that it embeds, as a wrapper does
// that adds tracing, say.
func inner[T any](client redis.UniversalClient) (found T, ok bool) {
	for range 8 { // more than anybody wraps
		if found, ok = client.(T); ok {
			return found, true
		}
		v := reflect.Indirect(reflect.ValueOf(client))
		if v.Kind() != reflect.Struct {
			return found, false
		}
		client = nil
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.Anonymous && f.IsExported() && client == nil {
				client, _ = reflect.TypeAssert[redis.UniversalClient](v.Field(i))
			}
		}
		if client == nil {
			return found, false
		}
	}
	return found, false
}

// newNonce names a call, so that the script can tell a second delivery of it.
func newNonce() string { return strconv.FormatUint(rand.Uint64(), 36) }

// Acquire implements [core.LockStore]: one EVALSHA, which only reads when the
// key is held.
func (s *Store) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	// The nonce tells two calls of one owner apart: the driver's second
	// delivery of a call gets the answer of the first, another call does not.
	n, err := s.run(ctx, s.acquire, key, owner, newNonce(), roundUp(ttl, time.Microsecond), s.retention)
	if err != nil {
		return core.Grant{}, err
	}
	if n > 0 {
		return core.Grant{Acquired: true, Token: n}, nil
	}
	return core.Grant{Left: time.Duration(-n) * time.Microsecond}, nil
}

// Renew implements [core.LockStore]: one EVALSHA. The driver may deliver it
// twice, which pushes the end of the lease twice, both times to the server's
// now + ttl.
func (s *Store) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return false, err
	}
	n, err := s.run(ctx, s.renew, key, owner, roundUp(ttl, time.Microsecond), s.retention)
	return n == 1, err
}

// Release implements [core.LockStore]: one EVALSHA, which also wakes the
// waiters. The driver may deliver it twice; the second finds no lease.
func (s *Store) Release(ctx context.Context, key, owner string) error {
	if err := core.CheckKey(key); err != nil {
		return err
	}
	if err := core.CheckOwner(owner); err != nil {
		return err
	}
	_, err := s.run(ctx, s.release, key, owner, s.retention)
	return err
}

// Subscribe implements [core.Notifier]. All subscriptions of a store share one
// connection, or one for each master of a cluster that has something to say.
// It is dialled, with two goroutines, when somebody first waits, and closed
// half a minute after the last one has stopped, or by [Store.Close].
//
// When the connection breaks, it is dialled again until that succeeds, and every
// waiter is then woken once, because a signal may have been lost in between.
// The channel is closed by Close alone.
func (s *Store) Subscribe(ctx context.Context, key string) (<-chan struct{}, func(), error) {
	if err := core.CheckKey(key); err != nil {
		return nil, nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("redis: %w", err)
	}
	channel := s.prefix + key
	signals, stop, err := s.wakeups.subscribe(ctx, channel)
	if err != nil {
		return nil, nil, explain(ctx, channel, err)
	}
	return signals, stop, nil
}

// Close ends all subscriptions and the connections and goroutines behind them,
// waits until they are gone, and closes their channels; and it ends the
// goroutines that wait for another call. The client stays open,
// and so do Acquire, Renew and Release: leases that are held can still be
// released. A dial that is under way when the server is silent holds Close up
// for as long as the client's own timeouts. Close may be called more than once
// and returns nil.
func (s *Store) Close() error {
	s.wakeups.close()
	s.workers.Close()
	return nil
}

// roundUp returns d in units, as an int64, rounded up: a lease must not be
// shorter than it was asked for.
func roundUp(d, unit time.Duration) int64 {
	n := int64(d / unit)
	if d%unit != 0 {
		n++
	}
	return n
}
