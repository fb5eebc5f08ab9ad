package core

import (
	"context"
	"iter"
	"time"
)

// Inspector is an optional capability of a store: it shows who holds what. Find
// it with [Capability].
type Inspector interface {
	// Leases returns the live leases that q asks for, in no order that one may
	// rely on. The sequence reads on from the store as it is consumed, so that
	// a million leases need not fit in memory; a lease that lives the whole
	// time is seen exactly once, one that begins or ends meanwhile may be
	// seen or not. An error ends it. It may be used once.
	//
	// Reading changes nothing: not the leases, not their tokens.
	Leases(ctx context.Context, q LeaseQuery) iter.Seq2[LeaseInfo, error]
}

// LeaseQuery says which leases an [Inspector] shows.
type LeaseQuery struct {
	// Key asks for the lease on this key alone.
	Key string
	// Prefix asks, when Key is empty, for the leases of all keys that begin
	// with these bytes; "" for all leases of the store.
	Prefix string
}

// Check returns an error that matches [ErrInvalid] if q asks for both a key and
// a prefix, or for what [CheckKey] refuses.
func (q LeaseQuery) Check() error {
	switch {
	case q.Key != "" && q.Prefix != "":
		return invalid("both Key and Prefix: ask for one")
	case q.Key != "":
		return CheckKey(q.Key)
	case q.Prefix != "":
		return checkText("prefix", q.Prefix)
	}
	return nil
}

// LeaseInfo is a live lease as an operator may see it. It has no owner: whoever
// knows that could end the lease.
type LeaseInfo struct {
	// Key that is locked.
	Key string
	// Label of the holder, see [OwnerLabel].
	Label string
	// Token is the fencing token.
	Token int64
	// Left is how long the lease still lives unless it is renewed.
	Left time.Duration
}

// Breaker is an optional capability of a store: it ends a lease whoever holds
// it. Find it with [Capability].
type Breaker interface {
	// Break ends the live lease on key and returns what it was; broken is
	// false if there was none. Afterwards all is as after a release by the
	// owner: the key is free, waiters are signalled, the token goes on
	// growing. The holder learns of it at its next renewal, which is refused;
	// what it writes until then must be refused by its token.
	Break(ctx context.Context, key string) (was LeaseInfo, broken bool, err error)
}
