package mongostore

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/await"
)

// DefaultRetention is the default of [Options].Retention.
const DefaultRetention = time.Hour

// maxRaces bounds how often one Acquire is tried again because another client
// inserted the document first. One repeat is enough unless the document is
// deleted and inserted over and over.
const maxRaces = 10

// Options of [New]. The zero value means the defaults.
type Options struct {
	// Prefix goes in front of every key, as it is: the document of a lock has
	// the _id Prefix + key. Default none, for a collection of its own. Two
	// stores exclude each other only if their prefixes are the same, so it must
	// not change while old and new processes run side by side. At most 512
	// bytes of UTF-8 with no NUL.
	Prefix string

	// Retention is how long the document of a lock, and with it the last
	// token, outlives its lease; then the server's TTL index may delete it,
	// up to an eighth of Retention later, and when its monitor, which runs once
	// a minute, comes by. Default 1 h. While the document is there, the next
	// token is larger whatever the server's clock does; afterwards it is
	// larger as long as the clock is past the time of the last grant.
	Retention time.Duration

	// PollOnly keeps the store from opening a change stream: waiters poll.
	PollOnly bool
}

// Store keeps leases in a collection of MongoDB. It is safe for concurrent use;
// make it with [New].
type Store struct {
	coll    *mongo.Collection
	prefix  string
	keep    time.Duration // Options.Retention
	updates *pipelines
	indexed indexed
	held    *heldKeys
	wakeups *notifier
	workers *await.Workers
}

var (
	_ core.LockStore = (*Store)(nil)
	_ core.Notifier  = (*Store)(nil)
)

// New returns a store that keeps leases in coll, through its client, which
// stays the caller's: the store never disconnects it. Call [EnsureIndexes] for
// coll once before. New does no I/O. It returns an error that matches
// [core.ErrInvalid] when coll is nil or an option is outside its limits.
//
// Calls run on goroutines of the store's, so that they can return when their
// context ends, whatever the driver does. One that has done its call waits a
// second for the next. [Store.Subscribe] keeps one more. [Store.Close] ends them.
//
// Of the client's defaults, those that a lock must not depend on are overruled:
// writes are acknowledged by a majority, from its journal; reads go to the
// primary; BSON is not subject to the client's registry and options.
func New(coll *mongo.Collection, o Options) (*Store, error) {
	switch {
	case coll == nil:
		return nil, fmt.Errorf("mongostore: %w: no collection", core.ErrInvalid)
	case o.Retention < 0:
		return nil, fmt.Errorf("mongostore: %w: retention %v: use 0 for the default of %v, or more", core.ErrInvalid, o.Retention, DefaultRetention)
	case len(o.Prefix) > core.MaxKeyLen, !utf8.ValidString(o.Prefix), strings.IndexByte(o.Prefix, 0) >= 0:
		return nil, fmt.Errorf("mongostore: %w: prefix %q: use at most %d bytes of UTF-8 with no NUL", core.ErrInvalid, o.Prefix, core.MaxKeyLen)
	}
	if o.Retention == 0 {
		o.Retention = DefaultRetention
	}
	updates, err := newPipelines(o.Retention)
	if err != nil {
		return nil, err
	}
	s := &Store{
		coll:    strict(coll),
		prefix:  o.Prefix,
		keep:    o.Retention,
		updates: updates,
		held:    newHeldKeys(),
		workers: await.New("mongo"),
	}
	s.indexed.again = checkEvery
	// A signal says that a read would be in vain.
	s.wakeups = newNotifier(s.coll, o, func(id string) { s.held.set(id, 0) })
	return s, nil
}

// strict is coll with what a lock needs instead of the client's defaults.
func strict(coll *mongo.Collection) *mongo.Collection {
	journaled := true
	return coll.Clone(options.Collection().
		SetWriteConcern(&writeconcern.WriteConcern{W: "majority", Journal: &journaled}).
		// Local, because a majority read may be behind what a majority has
		// acknowledged; a lease seen too early only delays the one who looks.
		SetReadConcern(readconcern.Local()).
		SetReadPreference(readpref.Primary()).
		SetRegistry(bson.NewRegistry()).
		SetBSONOptions(&options.BSONOptions{}))
}

// simple compares strings byte by byte, also in a collection that would not.
var simple = options.Collation{Locale: "simple"}

// Acquire implements [core.LockStore]: one findAndModify. On a key that is held
// a read follows, which tells how long the lease still lives. For that long, and
// while a lease of its own lives, further tries of this store on the key read
// only.
//
// The first Acquire of a store also asks for the collection's indexes, and one
// an hour from then on.
func (s *Store) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	return call(ctx, s.workers, func(ctx context.Context) (core.Grant, error) {
		if err := s.indexed.check(ctx, s.coll); err != nil {
			return core.Grant{}, err
		}
		id := s.prefix + key
		if s.held.contains(id) {
			if left, err := s.left(ctx, id); err != nil || left > 0 {
				return core.Grant{Left: left}, err
			}
		}
		token, err := s.acquire(ctx, id, owner, ttl)
		if err != nil {
			return core.Grant{}, err
		}
		if token > 0 {
			s.held.set(id, ttl)
			return core.Grant{Acquired: true, Token: token}, nil
		}
		left, err := s.left(ctx, id)
		if err != nil && ctx.Err() == nil {
			return core.Grant{}, nil // held is the answer; how long is a hint
		}
		return core.Grant{Left: left}, err
	})
}

// acquire returns the token, or 0 if the key is held.
func (s *Store) acquire(ctx context.Context, id, owner string, ttl time.Duration) (int64, error) {
	v := s.vars(owner, ttl)
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After).SetCollation(&simple).SetLet(v.let)
	for race := 1; ; race++ {
		raw, err := s.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: id}}, s.updates.acquire, opts).Raw()
		// Two upserts of a fresh key: one inserts, and the other hears that the
		// _id exists, or, from some servers, nothing. Neither wrote anything,
		// so it is safe to look again.
		if lost := mongo.IsDuplicateKeyError(err) || errors.Is(err, mongo.ErrNoDocuments); lost && race < maxRaces && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return 0, wrap(ctx, owner, err)
		}
		r, err := s.parse(raw)
		if err != nil {
			return 0, err
		}
		// The nonce, not the owner, tells that this call won: a live lease of
		// the same owner is not acquired twice, and a call that was delivered
		// twice was won by its first delivery.
		if r.call == v.call && r.owner == owner {
			return r.token, nil
		}
		return 0, nil
	}
}

// Renew implements [core.LockStore]: one update, and a read if it changed
// nothing, to tell a lease that has ended from a document that is no lease.
func (s *Store) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return false, err
	}
	return call(ctx, s.workers, func(ctx context.Context) (bool, error) {
		id := s.prefix + key
		renewed, err := s.update(ctx, id, owner, s.updates.renew, s.vars(owner, ttl))
		if renewed {
			s.held.set(id, ttl)
		}
		return renewed, err
	})
}

// Release implements [core.LockStore]: one update, and a read if it changed
// nothing.
func (s *Store) Release(ctx context.Context, key, owner string) error {
	if err := core.CheckKey(key); err != nil {
		return err
	}
	if err := core.CheckOwner(owner); err != nil {
		return err
	}
	_, err := call(ctx, s.workers, func(ctx context.Context) (bool, error) {
		return s.release(ctx, s.prefix+key, owner)
	})
	return err
}

// release reports whether owner's lease was there to be ended.
func (s *Store) release(ctx context.Context, id, owner string) (bool, error) {
	released, err := s.update(ctx, id, owner, s.updates.release, s.vars(owner, 0))
	if released {
		s.held.set(id, 0)
	}
	return released, err
}

// update runs a pipeline on an existing document and reports whether it changed
// it. The filter is the _id alone, which is the server's fastest, and the
// pipeline decides.
func (s *Store) update(ctx context.Context, id, owner string, pipeline []bson.Raw, v vars) (bool, error) {
	result, err := s.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, pipeline,
		options.UpdateOne().SetCollation(&simple).SetLet(v.let))
	switch {
	case err != nil:
		return false, wrap(ctx, owner, err)
	case result.ModifiedCount > 0:
		return true, nil
	case result.MatchedCount == 0:
		return false, nil
	}
	r, err := s.look(ctx, id)
	// A server without retryable writes that was sent this call twice reports
	// the second delivery, which may have had nothing left to change.
	return err == nil && r.call == v.call, err
}

// left returns how long the key is still held, 0 if it is not, and remembers it.
func (s *Store) left(ctx context.Context, id string) (time.Duration, error) {
	r, err := s.look(ctx, id)
	if err != nil {
		return 0, err
	}
	left := r.left()
	s.held.set(id, left)
	return left, nil
}

// look reads the document of a lock, and the server's clock with it. A document
// that does not exist is a zero record.
//
// It is an aggregation because find cannot be given a projection with
// expressions everywhere; both read by _id from the primary.
func (s *Store) look(ctx context.Context, id string) (record, error) {
	cursor, err := s.coll.Aggregate(ctx, bson.A{
		bson.D{{Key: "$match", Value: bson.D{{Key: "_id", Value: id}}}},
		bson.D{{Key: "$addFields", Value: bson.D{{Key: fieldNow, Value: "$$NOW"}}}},
	}, options.Aggregate().SetCollation(&simple))
	if err != nil {
		return record{}, wrap(ctx, "", err)
	}
	defer cursor.Close(ctx)
	if !cursor.Next(ctx) {
		return record{}, wrap(ctx, "", cursor.Err())
	}
	return s.parse(cursor.Current)
}

// Close ends all subscriptions and the change stream behind them, waits until
// that is gone, and closes their channels; and it ends the goroutines that wait
// for another call. The client stays connected, and
// Acquire, Renew and Release go on working: leases that are held can still be
// released. Close may be called more than once and returns nil.
func (s *Store) Close() error {
	s.wakeups.close()
	s.workers.Close()
	return nil
}

// vars are what a call hands to a pipeline.
type vars struct {
	call int64
	let  bson.D
}

func (s *Store) vars(owner string, ttl time.Duration) vars {
	call := rand.Int64()
	// $$NOW is cut to the millisecond, so the lease gets one more: it must not
	// be shorter than it was asked for.
	ms := milliseconds(ttl) + 1
	return vars{call, bson.D{
		{Key: "owner", Value: literal(owner)},
		{Key: "call", Value: call},
		{Key: "ttl", Value: ms},
		{Key: "keep", Value: ms + milliseconds(s.keep)},
	}}
}

// milliseconds returns d rounded up.
func milliseconds(d time.Duration) int64 {
	ms := d.Milliseconds()
	if time.Duration(ms)*time.Millisecond < d {
		ms++
	}
	return ms
}

// fieldNow is where look finds the server's clock. It is not stored.
const fieldNow = "now"

// record is the document of a lock.
type record struct {
	id, owner   string
	call, token int64
	until, now  int64 // milliseconds since 1970; now is known from look only
}

// left returns how long the lease still lives, 0 if there is none.
func (r record) left() time.Duration {
	ms := r.until - r.now
	switch {
	case r.owner == "" || ms <= 0:
		return 0
	case ms > math.MaxInt64/int64(time.Millisecond):
		return math.MaxInt64
	}
	return time.Duration(ms) * time.Millisecond
}

// parse reads a document. Its error, for one that is not a lease, shows the
// fields' types but not what is in them.
func (s *Store) parse(raw bson.Raw) (record, error) {
	var r record
	r.id, _ = raw.Lookup("_id").StringValueOK()
	owner, token, until := raw.Lookup(fieldOwner), raw.Lookup(fieldToken), raw.Lookup(fieldUntil)
	var okOwner, okToken, okUntil bool
	r.owner, okOwner = owner.StringValueOK()
	r.token, okToken = token.Int64OK()
	r.until, okUntil = until.DateTimeOK()
	r.call, _ = raw.Lookup(fieldCall).Int64OK()
	r.now, _ = raw.Lookup(fieldNow).DateTimeOK()
	okToken = okToken && 0 < r.token && r.token < maxToken
	if !okOwner || !okToken || !okUntil {
		return record{}, fmt.Errorf("mongo: document %q in %s is not a lease (owner: %s, token: %s, until: %s): somebody else's, or damaged; it was left alone",
			r.id, name(s.coll), typeName(owner), typeName(token), typeName(until))
	}
	return r, nil
}

func typeName(v bson.RawValue) string {
	if v.Type == 0 {
		return "missing"
	}
	return v.Type.String()
}

// heldKeys remembers until when keys are known to be held, so that tries on them
// begin with a read. It is a fixed table of what was seen last for each hash:
// two keys that share a slot cost one of them a read too many or too few.
type heldKeys struct {
	seed  maphash.Seed
	start time.Time
	slots [1 << 10]atomic.Int64 // end, as time since start
}

func newHeldKeys() *heldKeys { return &heldKeys{seed: maphash.MakeSeed(), start: time.Now()} }

func (h *heldKeys) slot(id string) *atomic.Int64 {
	return &h.slots[maphash.String(h.seed, id)%uint64(len(h.slots))]
}

func (h *heldKeys) contains(id string) bool {
	return int64(time.Since(h.start)) < h.slot(id).Load()
}

// set notes that id is held for left longer, or, if that is 0, that it is free.
func (h *heldKeys) set(id string, left time.Duration) {
	end := int64(time.Since(h.start)) + int64(left)
	if left > 0 && end < 0 { // overflow
		end = math.MaxInt64
	}
	h.slot(id).Store(end)
}
