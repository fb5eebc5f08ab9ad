package etcdstore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

// errProxy makes the client library itself send a request again.
var errProxy = status.Error(codes.Canceled, "proxy: upstream took too long")

// wrapped returns a client over a wire whose KV and Watcher are in a namespace of
// their own, and a plain one that sees the same keys.
func wrapped(t *testing.T, endpoints ...string) (client, admin *clientv3.Client, w *wire) {
	t.Helper()
	w = new(wire)
	client = connectWith(t, clientv3.Config{
		Endpoints:   endpoints,
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(w.intercept)},
	})
	admin = connect(t, endpoints[0])
	space := random("tenant-") + "/"
	for _, c := range []*clientv3.Client{client, admin} {
		c.KV = namespace.NewKV(c.KV, space)
		c.Watcher = namespace.NewWatcher(c.Watcher, space)
	}
	return client, admin, w
}

// overtaken returns a rule under which the first delivery of the next put is kept
// back, and the client sends another one.
func overtaken(late *func(context.Context) error) func(context.Context, request, func(context.Context) error) error {
	return func(ctx context.Context, r request, deliver func(context.Context) error) error {
		gone, cancel := context.WithCancel(ctx)
		cancel()
		_ = deliver(gone) // it is a request like any other for the client
		*late = r.late
		return errProxy
	}
}

// The request that fills the quota is executed, and answered as if it was not.
func TestLeaseOfTheRequestThatFillsTheQuotaIsNotReused(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("quota-")
	w.loseAnswers("put", 1, rpctypes.ErrGRPCNoSpace)
	if g, err := store.Acquire(t.Context(), key, "owner", time.Minute); !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Errorf("Acquire = %+v, %v; want %v", g, err, rpctypes.ErrNoSpace)
	}
	release(t, store, key, "owner")
	if lease, _ := keyOf(t, client, key); lease != 0 {
		t.Error("the key is there after its release")
	}

	acquire(t, store, key, "owner", time.Minute)
	w.loseAnswers("put", 1, rpctypes.ErrGRPCNoSpace)
	if renewed, err := store.Renew(t.Context(), key, "owner", time.Hour); !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Errorf("Renew = %t, %v; want %v", renewed, err, rpctypes.ErrNoSpace)
	}
	if lease, _ := keyOf(t, client, key); slices.Contains(etcdstore.Pooled(store), lease) {
		t.Errorf("lease %x is in the pool, and the key hangs on it", lease)
	}
}

// A put that is late comes between the answer to the next delivery and the end of
// their lease.
func TestFirstDeliveryIsExecutedAfterTheSecondLost(t *testing.T) {
	url := testserver.Etcd(t).URL
	other := open(t, connect(t, url), etcdstore.Options{})
	client, w := connectOver(t, url)
	store, key := open(t, client, etcdstore.Options{}), random("after-")
	acquire(t, other, key, "first", time.Minute)
	var puts, revokes atomic.Int64
	var late func(context.Context) error
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		switch {
		case r.kind == "put" && puts.Add(1) == 1:
			late = r.late
			return w.keepWaiting(ctx)
		case r.kind == "revoke" && revokes.Add(1) == 1:
			release(t, other, key, "first")
			if err := late(context.Background()); err != nil {
				t.Error(err)
			}
			if g, err := other.Acquire(t.Context(), key, "rival", time.Minute); g.Acquired || err != nil {
				t.Errorf("the rival's Acquire = %+v, %v; want not acquired", g, err)
			}
		}
		return deliver(ctx)
	})
	if g, err := store.Acquire(t.Context(), key, "owner", time.Minute); err == nil || g.Acquired {
		t.Errorf("Acquire = %+v, %v; want an error: the call had the key, and a rival was refused for it", g, err)
	}
}

// Nobody can count what a wrapped client sends. When it has said "held" nothing
// that it has sent can put the key any more.
func TestLateDeliveryOfAWrappedClientIsRefused(t *testing.T) {
	url := testserver.Etcd(t).URL
	for name, endpoints := range map[string][]string{
		"one endpoint":  {url},
		"two endpoints": {url, url}, // the client does not wait before it tries the next
	} {
		t.Run(name, func(t *testing.T) {
			client, admin, w := wrapped(t, endpoints...)
			store, other := openPatient(t, client, etcdstore.Options{}), open(t, admin, etcdstore.Options{})
			acquire(t, other, "a", "first", time.Minute)
			var late func(context.Context) error
			w.onFirst("put", overtaken(&late))
			if g, err := store.Acquire(t.Context(), "a", "owner", time.Minute); g.Acquired || err != nil {
				t.Errorf("Acquire = %+v, %v; want not acquired", g, err)
			}
			release(t, other, "a", "first")
			acquire(t, store, "b", "owner", time.Minute)
			if err := rpctypes.Error(late(context.Background())); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
				t.Errorf("the late delivery: %v, want %v", err, rpctypes.ErrLeaseNotFound)
			}
			acquire(t, other, "a", "next", time.Minute)
		})
	}
}

// Every request of a wrapped client that takes long may have been sent twice.
func TestWrappedClientOfASlowServer(t *testing.T) {
	url := testserver.Etcd(t).URL
	client, admin, w := wrapped(t, url)
	store, other := openPatient(t, client, etcdstore.Options{}), open(t, admin, etcdstore.Options{})
	const n = 5
	for i := range n {
		acquire(t, store, fmt.Sprint(i), "owner", time.Minute)
	}
	acquire(t, other, "held", "other", time.Minute)
	for i := range n {
		release(t, store, fmt.Sprint(i), "owner")
	}
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind == "put" {
			time.Sleep(25 * time.Millisecond)
		}
		return deliver(ctx)
	})
	if g, err := store.Acquire(t.Context(), "held", "owner", time.Minute); g.Acquired || err != nil {
		t.Errorf("Acquire of a held key = %+v, %v; want not acquired", g, err)
	}
	for _, id := range etcdstore.Pooled(store) {
		if _, err := admin.Revoke(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	failed := 0
	for i := range n {
		if _, err := store.Acquire(t.Context(), fmt.Sprint(i), "owner", time.Minute); err != nil {
			failed++
		}
	}
	if failed > 1 {
		t.Errorf("%d of %d Acquires failed, because leases in the pool were gone; want one at most", failed, n)
	}
}

// prefixed is a client of the KV service that gives every key a prefix.
type prefixed struct {
	pb.KVClient
	prefix string
}

func (c prefixed) Range(ctx context.Context, in *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	in.Key = []byte(c.prefix + string(in.Key))
	return c.KVClient.Range(ctx, in, opts...)
}

func (c prefixed) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	for _, compare := range in.Compare {
		compare.Key = []byte(c.prefix + string(compare.Key))
	}
	for _, op := range slices.Concat(in.Success, in.Failure) {
		if r := op.GetRequestRange(); r != nil {
			r.Key = []byte(c.prefix + string(r.Key))
		}
		if r := op.GetRequestPut(); r != nil {
			r.Key = []byte(c.prefix + string(r.Key))
		}
	}
	return c.KVClient.Txn(ctx, in, opts...)
}

// A wrapper below clientv3's KV has the type of clientv3's own.
func TestClientWhoseKVIsWrappedInside(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	client.KV = clientv3.NewKVFromKVClient(prefixed{clientv3.RetryKVClient(client), random("tenant-") + "/"}, client)
	store := open(t, client, etcdstore.Options{})
	acquire(t, store, "key", "owner", time.Minute)
	if renewed, err := store.Renew(t.Context(), "key", "owner", time.Minute); !renewed || err != nil {
		t.Errorf("Renew of a live lease = %t, %v", renewed, err)
	}
}

// One call ends one lease, however often it is delivered, and by whom.
func TestRequestsThatEndALeaseSpareTheNext(t *testing.T) {
	url := testserver.Etcd(t).URL
	other := open(t, connect(t, url), etcdstore.Options{})
	for name, call := range map[string]func(ctx context.Context, store *etcdstore.Store, key string) error{
		"Release": func(ctx context.Context, store *etcdstore.Store, key string) error {
			_ = store.Release(ctx, key, "owner") // an error is right too
			return nil
		},
		"Break": func(ctx context.Context, store *etcdstore.Store, key string) error {
			_, _, err := store.Break(ctx, key)
			return err
		},
	} {
		for _, lost := range []error{errLost, errProxy} { // sent again by the store, by the client
			t.Run(name+"/"+status.Code(lost).String(), func(t *testing.T) {
				client, w := connectOver(t, url)
				store, key := openPatient(t, client, etcdstore.Options{}), random("twice-")
				acquire(t, store, key, "owner", time.Minute)
				met := w.onFirst("delete", func(ctx context.Context, _ request, deliver func(context.Context) error) error {
					if err := deliver(ctx); err != nil {
						t.Error(err)
					}
					acquire(t, other, key, "owner", time.Minute)
					return lost
				})
				if err := call(t.Context(), store, key); err != nil || !met() {
					t.Errorf("error %v, a delete was sent: %t", err, met())
				}
				if renewed, err := other.Renew(t.Context(), key, "owner", time.Minute); !renewed || err != nil {
					t.Errorf("Renew of the next lease = %t, %v: one %s has ended two", renewed, err, name)
				}
			})
		}
	}
}

// A server that is busy refuses a revocation. What it is for comes all the same.
func TestRevocationIsAskedForAgain(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := open(t, client, etcdstore.Options{}), random("busy-")
	acquire(t, store, key, "owner", time.Minute)
	var deletes, revokes atomic.Int64
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind == "delete" && deletes.Add(1) == 1 || r.kind == "revoke" && revokes.Add(1) == 1 {
			return rpctypes.ErrGRPCRequestTooManyRequests
		}
		return deliver(ctx)
	})
	if err := store.Release(t.Context(), key, "owner"); !errors.Is(err, rpctypes.ErrTooManyRequests) {
		t.Errorf("Release = %v, want %v", err, rpctypes.ErrTooManyRequests)
	}
	eventually(t, "the key is free", func() bool {
		lease, _ := keyOf(t, client, key)
		return lease == 0
	})
}

// A cluster that was built anew has the same Raft term, and smaller revisions.
func TestClusterBuiltAnewInTheSameTerm(t *testing.T) {
	server := testserver.StartEtcd(t)
	client, w := connectOver(t, server.URL)
	store := openPatient(t, client, etcdstore.Options{})
	for i := range 50 {
		acquire(t, store, fmt.Sprint(i), "owner", time.Minute)
		release(t, store, fmt.Sprint(i), "owner")
	}
	server.Stop(t)
	if err := os.RemoveAll(filepath.Join(server.Dir, "data")); err != nil {
		t.Fatal(err)
	}
	server.Start(t)
	eventually(t, "the store works again", func() bool {
		g, err := store.Acquire(t.Context(), random("new-"), "owner", time.Minute)
		return err == nil && g.Acquired
	})
	other := open(t, connect(t, server.URL), etcdstore.Options{})
	w.onFirst("put", func(ctx context.Context, _ request, deliver func(context.Context) error) error {
		if err := deliver(ctx); err != nil {
			t.Error(err)
		}
		release(t, other, "key", "owner")
		acquire(t, other, "key", "successor", time.Minute)
		return errLost
	})
	if g, err := store.Acquire(t.Context(), "key", "owner", time.Minute); err == nil || g.Acquired {
		t.Errorf("Acquire = %+v, %v; want an error: the call had the key, and lost it", g, err)
	}
}

// The server goes away while the history of a key is read.
func TestHistoryLeavesNoStream(t *testing.T) {
	server := testserver.StartEtcd(t)
	other := open(t, connect(t, server.URL), etcdstore.Options{})
	client, w := connectOver(t, server.URL)
	store := open(t, client, etcdstore.Options{})
	acquire(t, store, "warm", "owner", time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var puts, reads atomic.Int64
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind == "put" && puts.Add(1) == 1 {
			acquire(t, other, "key", "first", time.Minute)
			return errLost
		}
		err := deliver(ctx)
		if r.kind == "read" && reads.Add(1) == 1 { // the last thing before the history
			server.Pause(t)
			time.AfterFunc(500*time.Millisecond, cancel) // a few deliveries later
		}
		return err
	})
	g, err := store.Acquire(ctx, "key", "owner", time.Minute)
	server.Resume(t)
	if g.Acquired || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "before") || reads.Load() == 0 {
		t.Errorf("Acquire = %+v, %v after %d reads; want that the history was not to be had in time", g, err, reads.Load())
	}
	eventually(t, "all streams have ended", func() bool {
		all := make([]byte, 4<<20)
		all = all[:runtime.Stack(all, true)]
		return !strings.Contains(string(all), "wasPut") && !strings.Contains(string(all), "watchGRPCStream")
	})
}
