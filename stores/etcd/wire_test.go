package etcdstore_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// wire stands between a client and its server: it counts requests, and does to
// them what a network can do.
type wire struct {
	puts, deletes, reads, grants, revokes atomic.Int64 // requests that were sent

	mu    sync.Mutex
	putOn []clientv3.LeaseID // of every put
	rule  func(ctx context.Context, r request, deliver func(context.Context) error) error
	stuck chan struct{} // gets a value when a caller is kept waiting
}

// request is what a rule sees of a request.
type request struct {
	kind string // put, delete, read, grant, revoke, or the method's name
	key  string // of a put or delete
	// late delivers the request when its caller has given up, or is about to:
	// the answer is for nobody.
	late func(ctx context.Context) error
}

// set makes rule decide what becomes of requests from now on; nil delivers
// them.
func (w *wire) set(rule func(ctx context.Context, r request, deliver func(context.Context) error) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rule = rule
}

func (w *wire) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	r := request{kind: method[strings.LastIndexByte(method, '/')+1:]}
	switch req := req.(type) {
	case *pb.TxnRequest:
		r.kind = "read"
		if len(req.Success) > 0 {
			if put := req.Success[0].GetRequestPut(); put != nil {
				r = request{kind: "put", key: string(put.Key)}
				w.mu.Lock()
				w.putOn = append(w.putOn, clientv3.LeaseID(put.Lease))
				w.mu.Unlock()
			}
			if del := req.Success[0].GetRequestDeleteRange(); del != nil {
				r = request{kind: "delete", key: string(del.Key)}
			}
		}
	case *pb.RangeRequest:
		r.kind = "read"
	case *pb.LeaseGrantRequest:
		r.kind = "grant"
	case *pb.LeaseRevokeRequest:
		r.kind = "revoke"
	}
	counter := map[string]*atomic.Int64{
		"put": &w.puts, "delete": &w.deletes, "read": &w.reads, "grant": &w.grants, "revoke": &w.revokes,
	}[r.kind]
	if counter != nil {
		counter.Add(1)
	}
	w.mu.Lock()
	rule := w.rule
	w.mu.Unlock()
	deliver := func(ctx context.Context) error { return invoke(ctx, method, req, reply, cc, opts...) }
	if rule == nil {
		return deliver(ctx)
	}
	r.late = func(ctx context.Context) error {
		// The caller reads its own reply, and what its options point to.
		return invoke(ctx, method, req, reflect.New(reflect.TypeOf(reply).Elem()).Interface(), cc)
	}
	return rule(ctx, r, deliver)
}

// leases returns the leases of all puts, in their order.
func (w *wire) leases() []clientv3.LeaseID {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.putOn)
}

// connectOver returns a client whose requests go over a wire.
func connectOver(t testing.TB, url string) (*clientv3.Client, *wire) {
	t.Helper()
	w := new(wire)
	return connect(t, url, grpc.WithChainUnaryInterceptor(w.intercept)), w
}

// errLost is what a client is told when the connection breaks before the
// answer.
var errLost = status.Error(codes.Unavailable, "error reading from server: EOF")

// loseAnswers delivers requests of a kind, and instead of the answer to the
// next n of them returns lost.
func (w *wire) loseAnswers(kind string, n int64, lost error) {
	left := new(atomic.Int64)
	left.Store(n)
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		err := deliver(ctx)
		if err == nil && r.kind == kind && left.Add(-1) >= 0 {
			return lost
		}
		return err
	})
}

// onFirst makes rule decide what becomes of the next request of a kind, and
// delivers all others. met tells whether there was one.
func (w *wire) onFirst(kind string, rule func(ctx context.Context, r request, deliver func(context.Context) error) error) (met func() bool) {
	var first atomic.Bool
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind == kind && first.CompareAndSwap(false, true) {
			return rule(ctx, r, deliver)
		}
		return deliver(ctx)
	})
	return first.Load
}

// swallowAnswers delivers requests of a kind, and then says nothing until the
// caller gives up.
func (w *wire) swallowAnswers(kind string) {
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind != kind {
			return deliver(ctx)
		}
		_ = deliver(ctx)
		return w.keepWaiting(ctx)
	})
}

// keepWaiting returns when the caller of a request has given up.
func (w *wire) keepWaiting(ctx context.Context) error {
	w.mu.Lock()
	stuck := w.stuck
	w.mu.Unlock()
	select {
	case stuck <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}

// giveUp makes a call, and gives it up when it is kept waiting by hold or
// swallowAnswers.
func (w *wire) giveUp(t testing.TB, call func(context.Context) error) {
	t.Helper()
	stuck := make(chan struct{}, 1)
	w.mu.Lock()
	w.stuck = stuck
	w.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		select {
		case <-stuck:
			cancel()
		case <-ctx.Done():
		}
	}()
	if err := call(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("the call returned %v, want the context's error", err)
	}
}

// hold keeps requests of a kind back. Their callers give up; release delivers
// the requests, late, and returns what the server answered.
func (w *wire) hold(kind string) (release func() []error) {
	var mu sync.Mutex
	var late []func(context.Context) error
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind != kind {
			return deliver(ctx)
		}
		mu.Lock()
		late = append(late, r.late)
		mu.Unlock()
		return w.keepWaiting(ctx)
	})
	return func() []error {
		mu.Lock()
		defer mu.Unlock()
		var errs []error
		for _, deliver := range late {
			errs = append(errs, deliver(context.Background()))
		}
		return errs
	}
}
