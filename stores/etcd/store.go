package etcdstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/leasekit/leasekit/core"
)

var (
	_ core.LockStore = (*Store)(nil)
	_ core.Notifier  = (*Store)(nil)
	_ core.Inspector = (*Store)(nil)
	_ core.Breaker   = (*Store)(nil)
)

// DefaultPrefix is what the names of etcd keys begin with when Options.Prefix
// is empty.
const DefaultPrefix = "leasekit/"

// ErrClosed is what the methods of a closed store return.
var ErrClosed = errors.New("etcd: the store is closed")

// closeBound is the longest that Close waits for the revocation of leases.
const closeBound = 2 * time.Second

// maxTries is how often Renew and Release follow a key that others, who have the
// same owner, change again and again meanwhile.
const maxTries = 3

// Options configures a [Store]. The zero value is ready to use.
type Options struct {
	// Prefix is what the names of etcd keys begin with; the lock's key follows
	// as it is. Stores that are to exclude each other need the same one, also
	// from one release of a program to the next. End it with a separator: the
	// prefixes "a" and "ab" do not keep apart the keys "bc" and "c". Default
	// [DefaultPrefix].
	Prefix string

	// Retention is how long other stores keep the record of a key after its
	// lease has ended, because their tokens need it. etcd deletes the key with
	// its lease and its tokens do not need it, so any value, from 0 up, means
	// the same here; it can be set so that one configuration fits all stores.
	Retention time.Duration
}

// Store is a [core.LockStore] and a [core.Notifier] on etcd. Create it with
// [New]. It is safe for concurrent use.
type Store struct {
	client *clientv3.Client
	kv     countingKV
	prefix string
	clock  func() instant
	timing timing

	// The greatest Raft term, and the greatest revision, that an answer has
	// named.
	term, revision atomic.Uint64

	ctx    context.Context // until Close
	cancel context.CancelFunc

	closing sync.Once
	closed  atomic.Bool    // no call begins any more
	mu      sync.Mutex     // guards stopped
	stopped bool           // no goroutine begins any more
	wg      sync.WaitGroup // every goroutine of the store

	leases  leasePool
	keeper  keeper
	reaper  reaper
	reader  reader
	holds   holds
	tries   tries
	watches watches
}

// New returns a store that keeps its leases on the cluster of client. It does
// no I/O. The client stays the caller's: the store never closes it, and it must
// be closed after the store. The store uses the client's KV, Lease and Watcher,
// so that a client whose three interfaces were wrapped by clientv3/namespace
// works, and its connection for keep-alives.
//
// Errors match [core.ErrInvalid].
func New(client *clientv3.Client, o Options) (*Store, error) {
	if o.Prefix == "" {
		o.Prefix = DefaultPrefix
	}
	switch {
	case client == nil:
		return nil, fmt.Errorf("%w: etcdstore.New: client is nil", core.ErrInvalid)
	case client.ActiveConnection() == nil:
		return nil, fmt.Errorf("%w: etcdstore.New: client has no connection: use one of clientv3.New", core.ErrInvalid)
	case !utf8.ValidString(o.Prefix):
		return nil, fmt.Errorf("%w: etcdstore.Options.Prefix %q: use UTF-8", core.ErrInvalid, o.Prefix)
	case o.Retention < 0:
		return nil, fmt.Errorf("%w: etcdstore.Options.Retention %v: use 0 or more", core.ErrInvalid, o.Retention)
	}
	s := &Store{client: client, kv: newCountingKV(client), prefix: o.Prefix, clock: now, timing: defaultTiming}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.keeper.init(s, func(ctx context.Context) (pb.Lease_LeaseKeepAliveClient, error) {
		// A member that has lost its leader ends the stream, which is opened
		// again on the next one, instead of keeping it waiting for seconds.
		ctx = clientv3.WithRequireLeader(ctx)
		return pb.NewLeaseClient(client.ActiveConnection()).LeaseKeepAlive(ctx, grpc.WaitForReady(true))
	})
	s.leases.init(s)
	s.reaper.init(s)
	s.reader.init(s)
	s.holds.init(s)
	s.tries.init()
	s.watches.init(s)
	return s, nil
}

// Close ends the store's streams and goroutines, closes the channels of its
// subscriptions, and revokes the leases that it kept for reuse. It waits for
// the revocations, at most 2 s; whatever is left ends by itself within its ttl.
//
// Leases of keys that are held are not touched: Close cannot know whether their
// holders are done. Their keys become free when they are released through
// another store with the same prefix, or when their ttl is over, as nobody
// renews them any more. Stop your strategies first.
//
// Close always returns nil, and may be called more than once. It does not close
// the client.
func (s *Store) Close() error {
	s.closing.Do(func() {
		s.closed.Store(true)
		for _, l := range s.leases.close() {
			s.reaper.revoke(l)
		}
		s.reaper.finish(closeBound)
		s.mu.Lock()
		s.stopped = true
		s.mu.Unlock()
		s.cancel()
		s.wg.Wait()
	})
	return nil
}

// spawn runs f on a goroutine that Close waits for; false if it is too late for
// that.
func (s *Store) spawn(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	s.wg.Go(f)
	return true
}

// Acquire implements [core.LockStore].
//
// At best it is one transaction, on a lease that was released before. It grants
// a lease first if there is none, and reads first if the key was seen held, so
// that a try that will fail costs no write. Calls of one store for the same
// key, while one of them is on its way, wait for its answer, and then read.
//
// Grant.Left is never known.
func (s *Store) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	if err := s.usable(ctx); err != nil {
		return core.Grant{}, err
	}
	start := s.clock()
	name := s.prefix + key
	held, t, err := s.enter(ctx, name)
	if held || err != nil {
		return core.Grant{}, s.wrap(ctx, err)
	}
	g, err := s.acquire(ctx, holdID{key, owner}, name, ttl, start)
	s.tries.leave(name, t, err == nil)
	return g, s.wrap(ctx, err)
}

// enter looks whether a try to put the key makes sense. If it does the caller
// has to call tries.leave with t.
func (s *Store) enter(ctx context.Context, name string) (held bool, t *try, err error) {
	var waited, looked bool
	for {
		step, t := s.tries.enter(name, waited, looked)
		switch step {
		case stepSend:
			return false, t, nil
		case stepAlone:
			return false, nil, nil
		case stepWait:
			if err := t.wait(ctx, s.timing.tryPatience); err != nil {
				return false, nil, err
			}
			waited = true
		case stepLook:
			read := s.get // soonest for one
			if waited {
				read = s.reader.get // all who have waited, in one request
			}
			kv, err := read(ctx, name)
			if err == nil {
				err = foreign(name, kv)
			}
			if kv != nil || err != nil {
				return kv != nil, nil, err
			}
			looked = true
		}
	}
}

// acquire tries to put the key.
func (s *Store) acquire(ctx context.Context, id holdID, name string, ttl time.Duration, start instant) (core.Grant, error) {
	var vanished *lease // an earlier delivery may have put the key on it,
	var before position // but not before that
	for again := false; ; again = true {
		l, err := s.leases.get(ctx, ttl, start)
		if err != nil {
			return core.Grant{}, err
		}
		if !again {
			before = s.known()
		}
		g, err := s.put(ctx, id, name, ttl, start, l)
		switch {
		case err == nil && vanished != nil:
			if _, err := s.unused(ctx, name, vanished, before); err != nil {
				_ = s.release(ctx, id, name) // it would be the second time
				return core.Grant{}, err
			}
			return g, nil
		case again || !isLeaseNotFound(err):
			return g, err
		case errors.Is(err, errVanished):
			vanished = l
		}
		// The lease is gone before its time: the server has lost it, or
		// somebody has revoked it, and perhaps not this one alone.
		s.leases.forget()
	}
}

// errVanished is in the error of a put that found no lease when it was not
// delivered for the first time.
var errVanished = errors.New("the key may have been put, and be gone with its lease")

// put tries to put the key on l, which it hands over to the hold, the pool, or
// the reaper.
func (s *Store) put(ctx context.Context, id holdID, name string, ttl time.Duration, start instant, l *lease) (core.Grant, error) {
	op := clientv3.OpTxn(
		[]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(name), "=", 0)},
		[]clientv3.Op{clientv3.OpPut(name, id.owner, clientv3.WithLease(l.id))},
		[]clientv3.Op{clientv3.OpGet(name)})
	before := s.known()
	resp, n, err := s.do(ctx, s.timing.putPatience, op)
	switch {
	case isLeaseNotFound(err) && n.sent == 0: // for certain, or most likely
		return core.Grant{}, err
	case isLeaseNotFound(err):
		return core.Grant{}, fmt.Errorf("%w: %w", errVanished, err)
	case err != nil && n.none(): // nothing can arrive late
		s.leases.put(l)
		return core.Grant{}, err
	case err != nil:
		// The request may be executed yet. Without its lease etcd refuses it,
		// or takes the key away again.
		s.holds.haunt(id, l)
		s.reaper.revoke(l)
		return core.Grant{}, err
	}
	txn := resp.Txn()
	kv := found(txn)
	if rev := txn.Header.Revision; txn.Succeeded {
		kv = &mvccpb.KeyValue{Value: []byte(id.owner), Lease: int64(l.id), CreateRevision: rev, ModRevision: rev}
	}
	// No other call has this lease: if the key is on it, this call has put it,
	// with an earlier delivery perhaps.
	won := kv != nil && kv.Lease == int64(l.id) && string(kv.Value) == id.owner
	switch {
	case won && (n.repeated() || l.term != s.term.Load()):
		return s.settle(ctx, id, name, ttl, start, l, kv)
	case won:
		if !n.certain {
			s.holds.haunt(id, l)
		}
		s.leases.put(s.holds.put(id, l, kv.CreateRevision, kv.ModRevision))
		return core.Grant{Acquired: true, Token: kv.CreateRevision}, nil
	case n.once():
		s.leases.put(l)
		return core.Grant{}, foreign(name, kv)
	default:
		return s.concede(ctx, id, name, l, n, before, kv)
	}
}

// settle makes final that the key was put on l, by a request that was delivered
// more than once, or after an election. A delivery that is late could put the key
// again after it was released; a lease that was kept alive in another term may
// end early. So the key is moved to another lease, and l revoked.
func (s *Store) settle(ctx context.Context, id holdID, name string, ttl time.Duration, start instant, l *lease, kv *mvccpb.KeyValue) (core.Grant, error) {
	s.holds.haunt(id, l)
	// If it is gone already it has been acquired all the same.
	if _, err := s.move(ctx, id, name, ttl, start, kv); err != nil {
		s.reaper.revoke(l)
		return core.Grant{}, err
	}
	if err := s.expel(ctx, id, l); err != nil {
		return core.Grant{}, err
	}
	return core.Grant{Acquired: true, Token: kv.CreateRevision}, nil
}

// concede makes final that the key, as kv shows it, was not put on l, by a request
// that was delivered more than once, perhaps. "Held" would not be true if one of
// the deliveries has put the key, and has lost it again, or does so yet.
func (s *Store) concede(ctx context.Context, id holdID, name string, l *lease, n tally, before position, kv *mvccpb.KeyValue) (core.Grant, error) {
	s.holds.haunt(id, l)
	if err := s.expel(ctx, id, l); err != nil {
		return core.Grant{}, err
	}
	if n.repeated() { // for certain
		var err error
		if kv, err = s.unused(ctx, name, l, before); err != nil {
			return core.Grant{}, err
		}
	}
	return core.Grant{}, foreign(name, kv)
}

// expel revokes l, a ghost of id, now, or else in the background.
func (s *Store) expel(ctx context.Context, id holdID, l *lease) error {
	if err := s.revoke(ctx, l); err != nil {
		s.reaper.revoke(l)
		return err
	}
	s.holds.banish(id, []*lease{l})
	return nil
}

// unused returns the key as it is, and an error unless it is certain that since
// before it was not put on l, as it cannot be any more.
func (s *Store) unused(ctx context.Context, name string, l *lease, before position) (*mvccpb.KeyValue, error) {
	kv, err := s.get(ctx, name)
	if err != nil {
		return nil, err
	}
	put := false
	switch {
	case kv == nil:
		err = errors.New("it is free by now")
	case kv.CreateRevision > int64(before.revision): // younger than the call
		put, err = s.wasPut(ctx, name, l, before, kv)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("whether the call had the key before somebody else is not known: %w", err)
	case put:
		return nil, errors.New("the call got the key, and lost it before it was answered")
	}
	return kv, nil
}

// wasPut looks in the key's history, from what was known before up to what kv
// shows, whether it was put on l.
func (s *Store) wasPut(ctx context.Context, name string, l *lease, before position, kv *mvccpb.KeyValue) (bool, error) {
	if !s.kv.plain {
		return false, errors.New("the client was wrapped, which hides what the key is called")
	}
	put, _, err := resend(ctx, s, s.timing.patience, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		// A stream for each delivery: the client's one may lead to a member that
		// has fallen silent. And none of the client's: those outlive a watch that
		// ends before it is confirmed.
		stream, err := pb.NewWatchClient(s.client.ActiveConnection()).Watch(clientv3.WithRequireLeader(ctx))
		if err != nil {
			return false, err
		}
		if err := stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{
			CreateRequest: &pb.WatchCreateRequest{Key: []byte(name), StartRevision: int64(before.revision) + 1},
		}}); err != nil && !errors.Is(err, io.EOF) { // after that Recv says what is wrong
			return false, err
		}
		for {
			resp, err := stream.Recv()
			switch {
			case err != nil:
				return false, err
			case resp.CompactRevision > 0:
				return false, rpctypes.ErrCompacted
			case resp.Canceled:
				return false, watchError(errors.New(resp.CancelReason))
			}
			for _, event := range resp.Events {
				if event.Kv.Lease == int64(l.id) {
					return true, nil
				}
				if event.Kv.ModRevision >= kv.ModRevision {
					return false, nil
				}
			}
		}
	})
	return put, err
}

// Renew implements [core.LockStore].
//
// It costs no write as long as ttl is the one that the key was acquired with
// and the lease has some time left. Keep-alives of all keys share one stream,
// and reads that fall together go out in one transaction.
func (s *Store) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return false, err
	}
	if err := s.usable(ctx); err != nil {
		return false, err
	}
	start := s.clock()
	id := holdID{key, owner}
	name := s.prefix + key
	held := s.holds.get(id)
	l := held.lease
	if l != nil && !held.doubt && l.class == classOf(ttl) && l.term == s.term.Load() && l.life(start) > minLife {
		renewed, certain, err := s.keep(ctx, name, owner, l)
		if err != nil {
			return false, s.wrap(ctx, err)
		}
		if certain {
			if !renewed {
				s.holds.gone(id, held.created)
			}
			return renewed, nil
		}
	}
	var kv *mvccpb.KeyValue
	if l != nil && !held.doubt {
		kv = &mvccpb.KeyValue{Value: []byte(owner), Lease: int64(l.id), CreateRevision: held.created, ModRevision: held.rev}
	} else {
		var err error
		if kv, err = s.get(ctx, name); err != nil {
			return false, s.wrap(ctx, err)
		}
	}
	renewed, err := s.move(ctx, id, name, ttl, start, kv)
	return renewed, s.wrap(ctx, err)
}

// keep keeps l alive and looks whether the key hangs on it. If neither yes nor
// no is certain the key has to be moved to another lease.
//
// An answer to a keep-alive that took longer than an election proves nothing by
// itself: the revoke of the lease may be in the log already, as was seen when a
// leader died, or it may have been given in another term, see lease.term. A read
// that begins after the answer sees what is in the log.
func (s *Store) keep(ctx context.Context, name, owner string, l *lease) (renewed, certain bool, err error) {
	sent := s.clock()
	beat := s.keeper.send(l)
	kv, err := s.reader.get(ctx, name)
	if err != nil {
		s.keeper.abandon(beat)
		return false, false, err
	}
	if err := foreign(name, kv); err != nil {
		s.keeper.abandon(beat)
		return false, false, err
	}
	if kv == nil || string(kv.Value) != owner {
		s.keeper.abandon(beat)
		return false, true, nil
	}
	alive, err := s.keeper.wait(ctx, beat)
	if err != nil {
		return false, false, err
	}
	if alive && s.clock().since(sent) >= s.timing.shortElection {
		kv, err = s.reader.get(ctx, name)
		if err != nil {
			return false, false, err
		}
		if kv == nil || string(kv.Value) != owner {
			return false, true, nil
		}
	}
	return true, alive && kv.Lease == int64(l.id) && l.term == s.term.Load(), nil
}

// move puts the key on another lease, if it has that owner. kv is how it was last
// seen, however long ago.
func (s *Store) move(ctx context.Context, id holdID, name string, ttl time.Duration, start instant, kv *mvccpb.KeyValue) (bool, error) {
	created := s.holds.get(id).created
	for tries := 1; ; tries++ {
		if err := foreign(name, kv); err != nil {
			return false, err
		}
		if kv == nil || string(kv.Value) != id.owner {
			s.holds.gone(id, created)
			return false, nil
		}
		l, err := s.leases.get(ctx, ttl, start)
		if err != nil {
			return false, err
		}
		// Every put changes the key's ModRevision, and a deleted key never has
		// it again: a delivery that comes late is refused.
		op := clientv3.OpTxn(
			[]clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(name), "=", kv.ModRevision)},
			[]clientv3.Op{clientv3.OpPut(name, id.owner, clientv3.WithLease(l.id))},
			[]clientv3.Op{clientv3.OpGet(name)})
		resp, n, err := s.do(ctx, s.timing.patience, op)
		switch {
		case isLeaseNotFound(err) && tries < maxTries:
			s.leases.forget()
			continue
		case err != nil && n.none() && !isLeaseNotFound(err):
			s.leases.put(l)
			return false, err
		case err != nil:
			// The key hangs on the old lease or on l. Both stay: the next
			// Renew has to find out, by moving it again.
			s.holds.doubt(id)
			return false, err
		}
		txn := resp.Txn()
		rev := txn.Header.Revision
		if !txn.Succeeded {
			kv = found(txn)
			if kv == nil || kv.Lease != int64(l.id) {
				// Touched in between, by another Renew of this owner perhaps.
				s.leases.put(l)
				if tries == maxTries {
					return false, fmt.Errorf("key %q keeps changing", name)
				}
				continue
			}
			rev = kv.ModRevision // an earlier delivery has moved it
		}
		s.leases.put(s.holds.put(id, l, kv.CreateRevision, rev))
		return true, nil
	}
}

// Release implements [core.LockStore].
//
// It is one transaction for a key that this store has acquired or renewed; else
// it reads first.
func (s *Store) Release(ctx context.Context, key, owner string) error {
	if err := core.CheckKey(key); err != nil {
		return err
	}
	if err := core.CheckOwner(owner); err != nil {
		return err
	}
	if err := s.usable(ctx); err != nil {
		return err
	}
	return s.wrap(ctx, s.release(ctx, holdID{key, owner}, s.prefix+key))
}

func (s *Store) release(ctx context.Context, id holdID, name string) error {
	held := s.holds.get(id)
	// Deliveries of an Acquire that are late must find no lease.
	for _, l := range held.ghosts {
		if err := s.revoke(ctx, l); err != nil {
			return err
		}
	}
	s.holds.banish(id, held.ghosts)
	created := held.created
	if created == 0 {
		kv, err := s.get(ctx, name)
		if err == nil {
			err = foreign(name, kv)
		}
		if err != nil || kv == nil || string(kv.Value) != id.owner {
			return err
		}
		created = kv.CreateRevision
	}
	for range maxTries {
		// A key that is created again has another revision: a delivery that
		// comes late finds nothing to delete.
		op := clientv3.OpTxn(
			[]clientv3.Cmp{
				clientv3.Compare(clientv3.CreateRevision(name), "=", created),
				clientv3.Compare(clientv3.Value(name), "=", id.owner),
			},
			[]clientv3.Op{clientv3.OpDelete(name)},
			[]clientv3.Op{clientv3.OpGet(name)})
		resp, n, err := s.do(ctx, s.timing.patience, op)
		if err != nil {
			if l := s.holds.end(id, math.MaxInt64); l != nil {
				s.reaper.revoke(l) // its holder is done with it
			}
			return err
		}
		txn := resp.Txn()
		l := s.holds.end(id, txn.Header.Revision)
		kv := found(txn)
		if txn.Succeeded || !n.once() && kv == nil { // by an earlier delivery
			if txn.Succeeded || n.certain {
				s.leases.put(l)
			} // else it may have ended, and the key with it
			// If somebody waits here, the signal that he is about to get says
			// so, and his try comes first: whoever has just released a key and
			// wants it again at once would otherwise always be faster.
			if !s.watches.watched(name) {
				s.tries.free(name)
			}
			return nil
		}
		// Not this one any more. The lease, if it is still there, ends by itself.
		switch {
		case kv == nil || string(kv.Value) != id.owner || foreign(name, kv) != nil:
			return foreign(name, kv)
		case !n.once():
			return fmt.Errorf("key %q was acquired again by its owner while it was being released", name)
		}
		created = kv.CreateRevision // acquired again, through another store
	}
	return fmt.Errorf("key %q keeps changing", name)
}

// revoke ends l and with it the key on it.
func (s *Store) revoke(ctx context.Context, l *lease) error {
	_, _, err := resend(ctx, s, s.timing.patience, func(ctx context.Context) (*clientv3.LeaseRevokeResponse, error) {
		return s.client.Revoke(ctx, l.id)
	})
	if isLeaseNotFound(err) {
		return nil
	}
	return err
}

// get reads a key, linearizably. nil means that there is none.
func (s *Store) get(ctx context.Context, name string) (*mvccpb.KeyValue, error) {
	before := s.known()
	resp, _, err := resend(ctx, s, s.timing.patience, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return s.client.Get(ctx, name)
	})
	if err == nil {
		s.observe(resp.Header, before)
	}
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return resp.Kvs[0], nil
}

// do sends a transaction. All that the store sends can be told from a second
// delivery of themselves.
func (s *Store) do(ctx context.Context, first time.Duration, op clientv3.Op) (resp clientv3.OpResponse, n tally, err error) {
	before := s.known()
	counted, counting := s.kv.count(ctx)
	resp, sent, err := resend(counting, s, first, func(ctx context.Context) (clientv3.OpResponse, error) {
		return s.kv.Do(ctx, op)
	})
	n = counted()
	if isRefusal(err) {
		n.sent-- // see resend
	}
	n.sent = max(n.sent, sent)
	if err == nil {
		s.observe(resp.Txn().Header, before)
	}
	return resp, n, err
}

// position is how far a cluster has come: a Raft term, and a revision.
type position struct{ term, revision uint64 }

// known returns how far the cluster has come at least.
func (s *Store) known() position {
	return position{s.term.Load(), s.revision.Load()}
}

// observe notes the position that an answer names. before is what was known when
// the request was sent, the zero position for a request whose answer may be old:
// an answer that names less comes from a cluster that was restored, or built
// anew.
func (s *Store) observe(h *pb.ResponseHeader, before position) {
	now := position{h.GetRaftTerm(), uint64(h.GetRevision())}
	restored := now.term < before.term || now.revision < before.revision
	advance(&s.term, now.term, restored)
	advance(&s.revision, now.revision, restored)
}

// advance sets v to n if that is more, or back says that less is right too.
func advance(v *atomic.Uint64, n uint64, back bool) {
	for known := v.Load(); n > known || n < known && back; known = v.Load() {
		if v.CompareAndSwap(known, n) {
			return
		}
	}
}

// usable returns an error if a call cannot even begin.
func (s *Store) usable(ctx context.Context) error {
	if s.closed.Load() {
		return ErrClosed
	}
	return s.wrap(ctx, ctx.Err())
}

// found returns what the read of a transaction's else branch has found.
func found(txn *clientv3.TxnResponse) *mvccpb.KeyValue {
	if txn.Succeeded || len(txn.Responses) == 0 {
		return nil
	}
	if r := txn.Responses[0].GetResponseRange(); r != nil && len(r.Kvs) > 0 {
		return r.Kvs[0]
	}
	return nil
}

// foreign returns an error if kv is nothing that a Store has put: its keys
// always hang on a lease and hold an owner.
func foreign(name string, kv *mvccpb.KeyValue) error {
	switch {
	case kv == nil:
		return nil
	case kv.Lease == 0:
		return fmt.Errorf("key %q is no lock: it has no etcd lease, somebody else has put it; it was left alone", name)
	case core.CheckOwner(string(kv.Value)) != nil:
		return fmt.Errorf("key %q is no lock: its value is no owner, somebody else has put it; it was left alone", name)
	}
	return nil
}
