package etcdstore

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
)

// soonestResend is less than the 25 ms, give or take a tenth, that clientv3
// waits before it sends a request again (Config.BackoffWaitBetween).
const soonestResend = 20 * time.Millisecond

// countingKV is the client's KV. It counts how often a request really went out:
// the client sends a transaction again when the answer is that a context has
// ended which was not its caller's, as a proxy says that lost its patience. The
// first delivery may still be on its way then.
type countingKV struct {
	clientv3.KV
	client *clientv3.Client
	plain  bool
}

// newCountingKV returns the KV of client. One that was wrapped, with a
// namespace say, hides the request from us.
func newCountingKV(client *clientv3.Client) countingKV {
	if kvType(client.KV) != kvType(clientv3.NewKV(client)) {
		return countingKV{KV: client.KV, client: client}
	}
	return countingKV{
		KV:     clientv3.NewKVFromKVClient(countingClient{clientv3.RetryKVClient(client)}, client),
		client: client,
		plain:  true,
	}
}

// kvType names what kv is made of: for one of clientv3's, with the type of the
// client that it sends its requests with.
func kvType(kv clientv3.KV) string {
	name := fmt.Sprintf("%T", kv)
	if v := reflect.Indirect(reflect.ValueOf(kv)); v.Kind() == reflect.Struct {
		if remote := v.FieldByName("remote"); remote.IsValid() && remote.Kind() == reflect.Interface && !remote.IsNil() {
			name += " " + remote.Elem().Type().String()
		}
	}
	return name
}

// tally is how often a request was delivered to etcd, or may be yet: at least,
// if that is not certain.
type tally struct {
	sent    int
	certain bool
}

func (t tally) none() bool     { return t.certain && t.sent == 0 }
func (t tally) once() bool     { return t.certain && t.sent == 1 }
func (t tally) repeated() bool { return t.sent > 1 }

// count returns a context under which deliveries are counted, and a function
// that returns how many there were.
func (kv countingKV) count(ctx context.Context) (counted func() tally, counting context.Context) {
	if !kv.plain {
		start := time.Now()
		return func() tally {
			// With several endpoints the client does not wait before it turns
			// to the next one.
			return tally{1, len(kv.client.Endpoints()) == 1 && time.Since(start) < soonestResend}
		}, ctx
	}
	var n atomic.Int64
	return func() tally { return tally{int(n.Load()), true} }, context.WithValue(ctx, countKey{}, &n)
}

// countKey is the key of the counter, an *atomic.Int64, in a context.
type countKey struct{}

// countingClient counts transactions whose context has a counter.
type countingClient struct{ pb.KVClient }

func (c countingClient) Txn(ctx context.Context, in *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	if n, ok := ctx.Value(countKey{}).(*atomic.Int64); ok {
		opts = append(slices.Clip(opts), grpc.OnFinish(func(error) { n.Add(1) }))
	}
	return c.KVClient.Txn(ctx, in, opts...)
}
