package etcdstore_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

const ttl = 2 * time.Second

func TestNewRefuses(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	for _, test := range []struct {
		name    string
		client  *clientv3.Client
		options etcdstore.Options
	}{
		{"no client", nil, etcdstore.Options{}},
		{"client without a connection", clientv3.NewCtxClient(t.Context()), etcdstore.Options{}},
		{"prefix that is no UTF-8", client, etcdstore.Options{Prefix: "\xff"}},
		{"negative retention", client, etcdstore.Options{Retention: -1}},
	} {
		if _, err := etcdstore.New(test.client, test.options); !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%s: New = %v, want an error that matches ErrInvalid", test.name, err)
		}
	}
}

// keyOf reads the key as etcd has it; nil if it is not there.
func keyOf(t *testing.T, client *clientv3.Client, key string) (lease clientv3.LeaseID, revision int64) {
	t.Helper()
	resp, err := client.Get(t.Context(), etcdstore.DefaultPrefix+key)
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return 0, 0
	}
	return clientv3.LeaseID(resp.Kvs[0].Lease), resp.Kvs[0].CreateRevision
}

func release(t testing.TB, store core.LockStore, key, owner string) {
	t.Helper()
	if err := store.Release(t.Context(), key, owner); err != nil {
		t.Fatalf("Release = %v", err)
	}
}

func TestTokenIsTheRevisionOfCreation(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	store, key := open(t, client, etcdstore.Options{}), random("token-")
	g := acquire(t, store, key, "owner", ttl)
	if _, revision := keyOf(t, client, key); g.Token != revision {
		t.Errorf("token %d, want the key's create revision %d", g.Token, revision)
	}
	if renewed, err := store.Renew(t.Context(), key, "owner", time.Minute); !renewed || err != nil {
		t.Fatalf("Renew = %t, %v", renewed, err)
	}
	if _, revision := keyOf(t, client, key); g.Token != revision {
		t.Errorf("token %d, but after a renewal with another ttl the key's create revision is %d", g.Token, revision)
	}
	release(t, store, key, "owner")
}

func TestReleasedLeaseServesTheNextKey(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store := openPatient(t, client, etcdstore.Options{})
	for i := range 10 {
		key := random("reuse-")
		acquire(t, store, key, "owner", time.Minute)
		lease, _ := keyOf(t, client, key)
		release(t, store, key, "owner")
		if pooled := etcdstore.Pooled(store); len(pooled) != 1 || pooled[0] != lease {
			t.Fatalf("round %d: the pool has %x, want the released lease %x", i, pooled, lease)
		}
	}
	if n := w.grants.Load(); n != 1 {
		t.Errorf("%d leases granted for 10 acquisitions, want 1", n)
	}
	// For another length a lease of its own.
	acquire(t, store, random("reuse-"), "owner", time.Hour)
	if n := w.grants.Load(); n != 2 {
		t.Errorf("%d leases granted, want another one for another ttl", n)
	}
}

// A lease is used again after part of its time has passed; the key that gets it
// then must live a whole ttl all the same.
func TestReusedLeaseLivesAWholeTTL(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store := openPatient(t, client, etcdstore.Options{})
	var key string
	var sent time.Time
	for tries := 1; ; tries++ {
		key = random("reuse-")
		granted := w.grants.Load()
		began := time.Now()
		acquire(t, store, key, "owner", ttl)
		release(t, store, key, "owner")
		time.Sleep(ttl/2 + 200*time.Millisecond) // less than a ttl is left of the lease
		sent = time.Now()
		acquire(t, store, key, "owner", ttl)
		if w.grants.Load()-granted <= 1 {
			break
		}
		// A lease that is about to end is not used again.
		if slow := time.Since(began); slow < ttl+500*time.Millisecond || tries == 10 {
			t.Fatalf("%d leases granted within %v, want the first to be kept alive", w.grants.Load()-granted, slow)
		}
	}
	other := open(t, connect(t, testserver.Etcd(t).URL), etcdstore.Options{})
	for {
		tried := time.Now()
		g, err := other.Acquire(t.Context(), key, "other", ttl)
		if err != nil {
			t.Fatal(err)
		}
		if g.Acquired {
			if d := time.Since(sent); d < ttl {
				t.Errorf("the lease ended %v after it was asked for, want at least %v", d, ttl)
			}
			break
		}
		if tried.Sub(sent) > 30*time.Second {
			t.Fatal("the lease does not end")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// The clock that counts how much is left of a lease stands still while the
// machine is suspended, but etcd's does not.
func TestPoolIsNotTrustedAfterASuspend(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store := openPatient(t, client, etcdstore.Options{})
	acquire(t, store, random("suspend-"), "owner", ttl)
	key := random("suspend-")
	acquire(t, store, key, "owner", ttl)
	release(t, store, key, "owner")
	granted := w.grants.Load()
	etcdstore.Suspended(store, time.Hour)
	acquire(t, store, key, "owner", ttl)
	if n := w.grants.Load() - granted; n != 1 {
		t.Errorf("%d leases granted after the machine was suspended, want 1: a pooled one may be gone", n)
	}
	release(t, store, key, "owner")
}

// An etcd lease that is shared by two keys keeps one of them alive.
func TestALeaseNeverHasTwoKeys(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	prefix := random("shared-") + "/"
	store := open(t, client, etcdstore.Options{Prefix: prefix})
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	ttls := []time.Duration{ttl, 5 * time.Second, 20 * time.Second}
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				key, owner := fmt.Sprintf("%d", rand.N(8)), fmt.Sprintf("%d-%d", i, n)
				// Some calls are given up on the way.
				one, cancel := ctx, context.CancelFunc(func() {})
				if rand.N(4) == 0 {
					one, cancel = context.WithTimeout(ctx, rand.N(2*time.Millisecond))
				}
				g, err := store.Acquire(one, key, owner, ttls[rand.N(3)])
				if err == nil && g.Acquired && rand.N(2) == 0 {
					_, _ = store.Renew(one, key, owner, ttls[rand.N(3)])
				}
				if g.Acquired || err != nil {
					_ = store.Release(one, key, owner)
				}
				cancel()
			}
		})
	}
	worst := 0
	for ctx.Err() == nil {
		resp, err := client.Get(t.Context(), prefix, clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		keys := make(map[int64]int)
		for _, kv := range resp.Kvs {
			keys[kv.Lease]++
			worst = max(worst, keys[kv.Lease])
		}
		pooled := etcdstore.Pooled(store)
		for _, id := range pooled {
			// It may be taken in the meantime, by one key.
			if ttl, err := client.TimeToLive(t.Context(), id, clientv3.WithAttachedKeys()); err == nil {
				worst = max(worst, len(ttl.Keys))
			}
		}
	}
	wg.Wait()
	if worst != 1 {
		t.Errorf("a lease had %d keys, want 1", worst)
	}
	for _, id := range etcdstore.Pooled(store) {
		ttl, err := client.TimeToLive(t.Context(), id, clientv3.WithAttachedKeys())
		if err != nil {
			t.Fatal(err)
		}
		if len(ttl.Keys) > 0 {
			t.Errorf("a lease in the pool has the keys %q", ttl.Keys)
		}
	}
}

func TestPoolIsBounded(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store := openPatient(t, client, etcdstore.Options{})
	prefix := random("pool-")
	const keys = 2 * etcdstore.MaxIdle
	each := func(f func(key string)) {
		var wg sync.WaitGroup
		for i := range keys {
			wg.Go(func() { f(prefix + fmt.Sprint(i)) })
		}
		wg.Wait()
	}
	each(func(key string) { acquire(t, store, key, "owner", time.Minute) })
	each(func(key string) { release(t, store, key, "owner") })
	if n := len(etcdstore.Pooled(store)); n != etcdstore.MaxIdle {
		t.Errorf("%d leases in the pool, want %d", n, etcdstore.MaxIdle)
	}
	eventually(t, "the others are revoked", func() bool { return w.revokes.Load() == keys-etcdstore.MaxIdle })
}

// eventually waits until ok, which is going to be true soon.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// What an operator or a restored server may do to a lease in the pool.
func TestPooledLeaseThatIsGone(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("gone-")
	for range 2 { // two in the pool
		acquire(t, store, key+"1", "owner", ttl)
		acquire(t, store, key+"2", "owner", ttl)
		release(t, store, key+"1", "owner")
		release(t, store, key+"2", "owner")
	}
	for _, id := range etcdstore.Pooled(store) {
		if _, err := client.Revoke(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	granted := w.grants.Load()
	acquire(t, store, key, "owner", ttl)
	if n := w.grants.Load() - granted; n != 1 {
		t.Errorf("%d leases granted, want 1", n)
	}
	if n := len(etcdstore.Pooled(store)); n != 0 {
		t.Errorf("%d leases in the pool, want none: the server has lost them", n)
	}
	release(t, store, key, "owner")
}

func TestRenewIsFalseWhenTheKeyIsGone(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	store := open(t, client, etcdstore.Options{})
	for name, end := range map[string]func(t *testing.T, key string){
		"key deleted, lease alive": func(t *testing.T, key string) {
			if _, err := client.Delete(t.Context(), etcdstore.DefaultPrefix+key); err != nil {
				t.Fatal(err)
			}
		},
		"lease revoked": func(t *testing.T, key string) {
			lease, _ := keyOf(t, client, key)
			if _, err := client.Revoke(t.Context(), lease); err != nil {
				t.Fatal(err)
			}
		},
		"another holds the key": func(t *testing.T, key string) {
			if _, err := client.Delete(t.Context(), etcdstore.DefaultPrefix+key); err != nil {
				t.Fatal(err)
			}
			acquire(t, open(t, client, etcdstore.Options{}), key, "successor", time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			key := random("gone-")
			acquire(t, store, key, "owner", ttl)
			end(t, key)
			for _, ttl := range []time.Duration{ttl, ttl, time.Minute} {
				if renewed, err := store.Renew(t.Context(), key, "owner", ttl); renewed || err != nil {
					t.Errorf("Renew for %v = %t, %v; want false, nil", ttl, renewed, err)
				}
			}
			release(t, store, key, "owner")
			if name == "another holds the key" {
				if lease, _ := keyOf(t, client, key); lease == 0 {
					t.Error("the successor's key is gone")
				}
			}
		})
	}
}

// A process that starts again knows nothing of its leases but their owner, and
// another one may have moved them.
func TestRenewOfAKeyThatAnotherStoreAcquired(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	first, second := open(t, client, etcdstore.Options{}), open(t, client, etcdstore.Options{})
	key := random("reopen-")
	g := acquire(t, first, key, "owner", ttl)
	for i := range 6 {
		store := []*etcdstore.Store{second, second, first}[i%3]
		if renewed, err := store.Renew(t.Context(), key, "owner", ttl); !renewed || err != nil {
			t.Fatalf("renewal %d = %t, %v; want true, nil", i, renewed, err)
		}
	}
	if _, revision := keyOf(t, client, key); revision != g.Token {
		t.Errorf("the token was %d and is %d", g.Token, revision)
	}
	release(t, second, key, "owner")
	// What the first store believes about its lease must not reach the pool.
	release(t, first, key, "owner")
	acquire(t, first, key, "successor", ttl)
	release(t, first, key, "successor")
}

func TestLostAnswers(t *testing.T) {
	server := testserver.Etcd(t)
	resent := status.Error(codes.Canceled, "proxy: stream closed")
	for _, lost := range []error{errLost, resent} { // sent again by the store, by the client
		t.Run(status.Code(lost).String(), func(t *testing.T) {
			client, w := connectOver(t, server.URL)
			store, key := openPatient(t, client, etcdstore.Options{}), random("lost-")

			w.loseAnswers("put", 1, lost)
			g := acquire(t, store, key, "owner", ttl)
			first := w.leases()[0]
			lease, revision := keyOf(t, client, key)
			if g.Token != revision {
				t.Errorf("token %d, want %d", g.Token, revision)
			}
			if n := w.puts.Load(); n != 3 {
				t.Errorf("%d deliveries, want 3: twice to acquire, and to move the key", n)
			}
			// A third delivery of the Acquire could come yet, with that lease.
			if lease == first || !gone(t, client, first) {
				t.Errorf("the key hangs on lease %x; want another one than %x, which is revoked", lease, first)
			}
			if g, err := store.Acquire(t.Context(), key, "owner", ttl); g.Acquired || err != nil {
				t.Errorf("another Acquire of the same owner = %+v, %v; want not acquired", g, err)
			}

			w.loseAnswers("put", 1, lost)
			if renewed, err := store.Renew(t.Context(), key, "owner", time.Minute); !renewed || err != nil {
				t.Errorf("Renew = %t, %v; want true, nil", renewed, err)
			}
			if moved, _ := keyOf(t, client, key); moved == lease {
				t.Error("Renew with another ttl kept the lease")
			}

			w.loseAnswers("delete", 1, lost)
			release(t, store, key, "owner")
			if lease, _ := keyOf(t, client, key); lease != 0 {
				t.Error("the key is there after its release")
			}
		})
	}
}

func gone(t *testing.T, client *clientv3.Client, id clientv3.LeaseID) bool {
	t.Helper()
	resp, err := client.TimeToLive(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return resp.TTL < 0
}

// A lease that went back into the pool after a request whose outcome was not
// known kept another key alive.
func TestLeaseOfAResentAcquireIsNotReused(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("resent-")
	w.loseAnswers("put", 1, errLost)
	acquire(t, store, key, "owner", time.Minute)
	lease := w.leases()[0]
	release(t, store, key, "owner")
	if pooled := etcdstore.Pooled(store); slices.Contains(pooled, lease) || len(pooled) != 1 {
		t.Errorf("the pool has %x, want the lease that the key was moved to, and not %x", pooled, lease)
	}
	if !gone(t, client, lease) {
		t.Error("the lease is not revoked")
	}

	// The same for a try that lost: its first delivery may come late.
	other := open(t, connect(t, testserver.Etcd(t).URL), etcdstore.Options{})
	acquire(t, other, key, "other", time.Minute)
	w.loseAnswers("put", 1, errLost)
	if g, err := store.Acquire(t.Context(), key, "owner", time.Minute); g.Acquired || err != nil {
		t.Fatalf("Acquire = %+v, %v; want not acquired", g, err)
	}
	if pooled := etcdstore.Pooled(store); len(pooled) > 0 {
		t.Errorf("the pool has %x, want nothing", pooled)
	}
	if leases := w.leases(); !gone(t, client, leases[len(leases)-1]) {
		t.Error("the lease of the try that lost is not revoked")
	}
	release(t, other, key, "other")
}

// A put that is delivered twice, and loses, says "held" only if its first
// delivery has not put the key: in between somebody has the key, or had it.
func TestAcquireThatLostToItsSuccessor(t *testing.T) {
	server := testserver.Etcd(t)
	admin := connect(t, server.URL)
	other := open(t, admin, etcdstore.Options{})
	for _, test := range []struct {
		name string
		// between happens before the second delivery; first delivers the first.
		between func(t *testing.T, key string, first func())
		want    string // in the error; "" for an answer
		holder  string
	}{
		{name: "executed, and over", between: func(t *testing.T, key string, first func()) {
			t.Helper()
			first()
			release(t, other, key, "owner")
			acquire(t, other, key, "successor", time.Minute)
		}, want: "lost it before", holder: "successor"},
		{name: "executed, and moved to another lease", between: func(t *testing.T, key string, first func()) {
			t.Helper()
			first()
			if renewed, err := other.Renew(t.Context(), key, "owner", time.Hour); !renewed || err != nil {
				t.Errorf("Renew = %t, %v; want true, nil", renewed, err)
			}
		}, want: "lost it before", holder: "owner"},
		{name: "not executed", between: func(t *testing.T, key string, _ func()) {
			t.Helper()
			acquire(t, other, key, "first", time.Minute)
			release(t, other, key, "first")
			acquire(t, other, key, "successor", time.Minute)
		}, holder: "successor"},
		{name: "nobody can tell", between: func(t *testing.T, key string, first func()) {
			t.Helper()
			first()
			release(t, other, key, "owner")
			g := acquire(t, other, key, "successor", time.Minute)
			if _, err := admin.Compact(t.Context(), g.Token); err != nil {
				t.Error(err)
			}
		}, want: rpctypes.ErrCompacted.Error(), holder: "successor"},
	} {
		t.Run(test.name, func(t *testing.T) {
			client, w := connectOver(t, server.URL)
			store, key := openPatient(t, client, etcdstore.Options{}), random("successor-")
			var lease clientv3.LeaseID
			w.onFirst("put", func(ctx context.Context, _ request, deliver func(context.Context) error) error {
				test.between(t, key, func() {
					if err := deliver(ctx); err != nil {
						t.Error(err)
					}
				})
				lease, _ = keyOf(t, admin, key)
				return errLost
			})
			g, err := store.Acquire(t.Context(), key, "owner", time.Minute)
			if g.Acquired || err == nil != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("Acquire = %+v, %v; want not acquired, and an error with %q", g, err, test.want)
			}
			if now, _ := keyOf(t, admin, key); now != lease {
				t.Errorf("the key hangs on lease %x, and before on %x: it is not this call's", now, lease)
			}
			eventually(t, "the lease of both deliveries is revoked", func() bool { return gone(t, admin, w.leases()[0]) })
			if pooled := etcdstore.Pooled(store); len(pooled) > 0 {
				t.Errorf("the pool has %x, want nothing", pooled)
			}
			release(t, other, key, test.holder)
			if err := store.Release(t.Context(), key, "owner"); err != nil {
				t.Error(err)
			}
		})
	}
}

// The lease is gone when the second delivery comes. If the first has put the key,
// which is gone with it, then with another lease one Acquire would get it twice.
func TestAcquireWhoseLeaseVanishes(t *testing.T) {
	server := testserver.Etcd(t)
	admin := connect(t, server.URL)
	for _, lost := range []error{errLost, errProxy} { // sent again by the store, by the client
		for _, executed := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v/executed=%t", status.Code(lost), executed), func(t *testing.T) {
				client, w := connectOver(t, server.URL)
				store, key := openPatient(t, client, etcdstore.Options{}), random("vanished-")
				w.onFirst("put", func(ctx context.Context, _ request, deliver func(context.Context) error) error {
					if !executed { // a request like any other for the client, all the same
						gone, cancel := context.WithCancel(ctx)
						cancel()
						ctx = gone
					}
					if err := deliver(ctx); err == nil != executed {
						t.Error(err)
					}
					if _, err := admin.Revoke(t.Context(), w.leases()[0]); err != nil {
						t.Error(err)
					}
					return lost
				})
				g, err := store.Acquire(t.Context(), key, "owner", time.Minute)
				lease, _ := keyOf(t, admin, key)
				switch {
				case executed && (err == nil || !strings.Contains(err.Error(), "lost it before") || lease != 0):
					t.Errorf("Acquire = %+v, %v, the key is on lease %x; want that the call has lost it, and nothing left", g, err, lease)
				case !executed && (err != nil || !g.Acquired || lease == 0):
					t.Errorf("Acquire = %+v, %v, the key is on lease %x; want acquired", g, err, lease)
				}
			})
		}
	}
}

// A lease whose second delivery is refused may have the key of the first.
func TestLeaseOfARefusedResendIsNotReused(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("refused-resend-")
	puts := 0
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind != "put" {
			return deliver(ctx)
		}
		if puts++; puts == 1 {
			if err := deliver(ctx); err != nil {
				t.Error(err)
			}
			return status.Error(codes.Canceled, "proxy: stream closed") // the client sends it again
		}
		gone, cancel := context.WithCancel(ctx)
		cancel()
		_ = deliver(gone) // it is a request like any other for the client
		return rpctypes.ErrGRPCRequestTooManyRequests
	})
	if g, err := store.Acquire(t.Context(), key, "owner", time.Minute); !errors.Is(err, rpctypes.ErrTooManyRequests) {
		t.Errorf("Acquire = %+v, %v; want %v", g, err, rpctypes.ErrTooManyRequests)
	}
	if pooled := etcdstore.Pooled(store); len(pooled) > 0 {
		t.Errorf("the pool has %x, want nothing: the key may be on it", pooled)
	}
	eventually(t, "the lease is revoked", func() bool { return gone(t, client, w.leases()[0]) })
}

// The client library itself sends a request again, and the first delivery
// arrives when the key has been released, with a lease that another key might
// have by then.
func TestDeliveryThatTheClientOvertookIsRefused(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(fmt.Sprintf("plain=%t", plain), func(t *testing.T) {
			client, w := connectOver(t, testserver.Etcd(t).URL)
			var space string
			if !plain {
				space = random("tenant-") + "/"
				client.KV = namespace.NewKV(client.KV, space)
			}
			store, key := openPatient(t, client, etcdstore.Options{}), random("overtaken-")
			var late func(context.Context) error
			w.onFirst("put", func(ctx context.Context, r request, deliver func(context.Context) error) error {
				gone, cancel := context.WithCancel(ctx)
				cancel()
				_ = deliver(gone) // it is a request like any other for the client
				late = r.late
				return status.Error(codes.Canceled, "proxy: upstream took too long")
			})
			acquire(t, store, key, "owner", time.Minute)
			lease := w.leases()[0]
			if plain { // whoever counts knows at once, else the release sees to it
				if n := w.puts.Load(); n != 3 {
					t.Fatalf("%d deliveries, want 3, the second by the client", n)
				}
			}
			release(t, store, key, "owner")
			if pooled := etcdstore.Pooled(store); slices.Contains(pooled, lease) {
				t.Errorf("the pool has %x, want no %x", pooled, lease)
			}
			if err := rpctypes.Error(late(context.Background())); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
				t.Errorf("the late delivery: %v, want %v", err, rpctypes.ErrLeaseNotFound)
			}
		})
	}
}

// The first delivery of a Release arrives when the owner has the key again.
func TestReleaseThatIsLateSparesTheNextAcquisition(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("late-release-")
	acquire(t, store, key, "owner", time.Minute)
	var late func(context.Context) error
	w.onFirst("delete", func(_ context.Context, r request, _ func(context.Context) error) error {
		late = r.late
		return errLost
	})
	release(t, store, key, "owner")
	if late == nil || w.deletes.Load() != 2 {
		t.Fatalf("%d deliveries, want 2", w.deletes.Load())
	}
	g := acquire(t, store, key, "owner", time.Minute)
	if err := late(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, created := keyOf(t, client, key); created != g.Token {
		t.Errorf("after the late delivery the key was created at %d, want %d", created, g.Token)
	}
	release(t, store, key, "owner")
}

// The answer to a Release says that the key is gone, because an earlier delivery
// has deleted it: the lease serves again, and the next try need not look first.
func TestReleaseAnsweredToItsSecondDelivery(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := open(t, client, etcdstore.Options{}), random("answered-")
	acquire(t, store, key, "owner", time.Minute)
	lease, _ := keyOf(t, client, key)
	w.onFirst("delete", func(ctx context.Context, _ request, deliver func(context.Context) error) error {
		_ = deliver(ctx)
		return w.keepWaiting(ctx)
	})
	release(t, store, key, "owner")
	if pooled := etcdstore.Pooled(store); !slices.Contains(pooled, lease) {
		t.Errorf("the pool has %x, want the released lease %x", pooled, lease)
	}
	etcdstore.Wait(store)
	reads := w.reads.Load()
	acquire(t, store, key, "owner", time.Minute)
	if n := w.reads.Load() - reads; n != 0 {
		t.Errorf("the next try read %d times, want 0", n)
	}
	release(t, store, key, "owner")
}

// An Acquire of unknown outcome, and another store has the key for its owner:
// Release ends both.
func TestReleaseAfterAnUnknownAcquireFreesTheKey(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("ghost-")
	deliverLate := w.hold("put")
	acquireUnknown(t, w, store, key, "owner")
	w.set(nil)
	other := open(t, connect(t, testserver.Etcd(t).URL), etcdstore.Options{})
	acquire(t, other, key, "owner", time.Minute)
	release(t, store, key, "owner")
	if lease, _ := keyOf(t, client, key); lease != 0 {
		t.Error("the key is there after its release")
	}
	for _, err := range deliverLate() {
		if !errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound) {
			t.Errorf("the late delivery: %v, want %v", err, rpctypes.ErrLeaseNotFound)
		}
	}
}

func TestAcquireWhoseAnswerIsLostEndsAtOnce(t *testing.T) {
	for _, how := range []string{"by its release", "by itself"} {
		t.Run(how, func(t *testing.T) {
			client, w := connectOver(t, testserver.Etcd(t).URL)
			store, key := openPatient(t, client, etcdstore.Options{}), random("unknown-")
			w.swallowAnswers("put")
			acquireUnknown(t, w, store, key, "owner")
			w.set(nil)
			if how == "by its release" {
				release(t, store, key, "owner")
				if lease, _ := keyOf(t, client, key); lease != 0 {
					t.Error("the key is there after its release")
				}
			} else {
				eventually(t, "the key is gone", func() bool {
					lease, _ := keyOf(t, client, key)
					return lease == 0
				})
			}
			acquire(t, store, key, "successor", ttl)
			release(t, store, key, "owner")
			if lease, _ := keyOf(t, client, key); lease == 0 {
				t.Error("a second release of the lost owner took the successor's key")
			}
			release(t, store, key, "successor")
		})
	}
}

// etcd executes a request long after its caller has given up and released.
func TestLateAcquireIsRefused(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("late-")
	deliver := w.hold("put")
	acquireUnknown(t, w, store, key, "owner")
	release(t, store, key, "owner")
	errs := deliver()
	if len(errs) != 1 || !errors.Is(rpctypes.Error(errs[0]), rpctypes.ErrLeaseNotFound) {
		t.Errorf("the late requests were answered %v, want one with %v", errs, rpctypes.ErrLeaseNotFound)
	}
	if lease, _ := keyOf(t, client, key); lease != 0 {
		t.Error("a ghost holds the key")
	}
}

// A renewal with another ttl is executed after its key was released, and after
// a renewal that came later.
func TestLateMoveIsRefused(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("late-")
	acquire(t, store, key, "owner", time.Minute)
	renew := func(ctx context.Context, ttl time.Duration) error {
		renewed, err := store.Renew(ctx, key, "owner", ttl)
		if err == nil && !renewed {
			err = errors.New("not renewed")
		}
		return err
	}
	late := func() (deliver func() []error) {
		t.Helper()
		deliver = w.hold("put")
		w.giveUp(t, func(ctx context.Context) error { return renew(ctx, time.Hour) })
		w.set(nil)
		return deliver
	}
	overtaken := late()
	// The lease is in doubt now: even with its old ttl the key has to be moved,
	// lest the late one take it to a lease that nobody keeps alive.
	if err := renew(t.Context(), time.Minute); err != nil {
		t.Fatalf("Renew = %v", err)
	}
	lease, _ := keyOf(t, client, key)
	overtaken()
	if now, _ := keyOf(t, client, key); now != lease {
		t.Errorf("a late renewal moved the key from lease %x to %x", lease, now)
	}
	afterRelease := late()
	release(t, store, key, "owner")
	afterRelease()
	if lease, _ := keyOf(t, client, key); lease != 0 {
		t.Error("a late renewal put a key that had been released")
	}
}

// The answer to a release is lost for good: the lease is revoked, so that the
// key does not stay for its ttl.
func TestReleaseThatFailsIsMadeUpFor(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("release-")
	acquire(t, store, key, "owner", time.Minute)
	deliver := w.hold("delete")
	w.giveUp(t, func(ctx context.Context) error { return store.Release(ctx, key, "owner") })
	eventually(t, "the key is gone", func() bool {
		lease, _ := keyOf(t, client, key)
		return lease == 0
	})
	w.set(nil)
	acquire(t, store, key, "successor", ttl)
	deliver()
	if lease, _ := keyOf(t, client, key); lease == 0 {
		t.Error("a late release took the successor's key")
	}
	release(t, store, key, "successor")
}

// A member that is frozen or cut off says nothing. The client does not notice
// for minutes, so the store sends again, which goes to the next member.
func TestUnansweredRequestGoesOutAgain(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := open(t, client, etcdstore.Options{}), random("silent-")
	for _, step := range []struct {
		kind string
		do   func()
	}{
		{"grant", func() { acquire(t, store, key, "owner", ttl) }},
		{"read", func() {
			if renewed, err := store.Renew(t.Context(), key, "owner", ttl); !renewed || err != nil {
				t.Errorf("Renew = %t, %v; want true, nil", renewed, err)
			}
		}},
		{"delete", func() { release(t, store, key, "owner") }},
		{"put", func() { acquire(t, store, key, "owner", ttl) }},
	} {
		waited := w.onFirst(step.kind, func(ctx context.Context, _ request, _ func(context.Context) error) error {
			return w.keepWaiting(ctx)
		})
		step.do()
		if !waited() {
			t.Errorf("no %s was sent", step.kind)
		}
	}
	lease, _ := keyOf(t, client, key)
	release(t, store, key, "owner")
	// The first put may still be on its way.
	eventually(t, "the lease of the second put is revoked", func() bool { return gone(t, client, lease) })
}

// A server that refuses must not be pressed harder: nothing is revoked when it
// is certain that nothing was done.
func TestRefusedAcquireCostsNothingMore(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := openPatient(t, client, etcdstore.Options{}), random("refused-")
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind == "put" {
			return rpctypes.ErrGRPCRequestTooManyRequests
		}
		return deliver(ctx)
	})
	for range 3 {
		_, err := store.Acquire(t.Context(), key, "owner", ttl)
		if !errors.Is(err, rpctypes.ErrTooManyRequests) {
			t.Errorf("Acquire = %v, want etcd's error", err)
		}
	}
	w.set(nil)
	acquire(t, store, key, "owner", ttl)
	release(t, store, key, "owner")
	if p, g, r := w.puts.Load(), w.grants.Load(), w.revokes.Load(); p != 4 || g != 1 || r != 0 {
		t.Errorf("%d puts, %d grants, %d revocations; want 4, 1, 0", p, g, r)
	}
}

// A hundred who wait for one key in one process send one request at a release.
func TestOneRequestDecidesForAllWhoWait(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store := openPatient(t, client, etcdstore.Options{})
	key := random("crowd-")
	acquire(t, store, random("warm-"), "owner", ttl)
	const crowd = 100
	arrived := make(chan struct{})
	w.set(func(ctx context.Context, r request, deliver func(context.Context) error) error {
		if r.kind == "put" {
			<-arrived
			time.Sleep(20 * time.Millisecond) // until the last one waits
		}
		return deliver(ctx)
	})
	before := w.puts.Load()
	var wg, begun sync.WaitGroup
	results := make(chan core.Grant, crowd)
	begun.Add(crowd)
	for i := range crowd {
		wg.Go(func() {
			begun.Done()
			g, err := store.Acquire(t.Context(), key, fmt.Sprint(i), ttl)
			if err != nil {
				t.Error(err)
			}
			results <- g
		})
	}
	begun.Wait()
	close(arrived)
	wg.Wait()
	close(results)
	won := 0
	for g := range results {
		if g.Acquired {
			won++
		}
	}
	if n := w.puts.Load() - before; won != 1 || n != 1 {
		t.Errorf("%d of %d won, with %d requests; want 1, with 1", won, crowd, n)
	}
}

func TestTryOnAHeldKeyReads(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	holder, store := openPatient(t, client, etcdstore.Options{}), openPatient(t, client, etcdstore.Options{})
	key := random("held-")
	acquire(t, holder, key, "holder", time.Minute)
	try := func() bool {
		t.Helper()
		g, err := store.Acquire(t.Context(), key, "waiter", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		return g.Acquired
	}
	try()
	puts, reads := w.puts.Load(), w.reads.Load()
	for range 10 {
		if try() {
			t.Fatal("acquired a held key")
		}
	}
	if p, r := w.puts.Load()-puts, w.reads.Load()-reads; p != 0 || r != 10 {
		t.Errorf("10 tries cost %d writes and %d reads, want 0 and 10", p, r)
	}
	release(t, holder, key, "holder")
	if !try() {
		t.Error("not acquired after the release")
	}
	// The store's own release is known at once: no read before the next try.
	release(t, store, key, "waiter")
	reads = w.reads.Load()
	if !try() || w.reads.Load() != reads {
		t.Errorf("the try after an own release read %d times, want 0", w.reads.Load()-reads)
	}
	release(t, store, key, "waiter")
}

func TestForeignKeysAreLeftAlone(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	store := open(t, client, etcdstore.Options{})
	lease, err := client.Grant(t.Context(), 60)
	if err != nil {
		t.Fatal(err)
	}
	for name, put := range map[string][]clientv3.OpOption{
		"without a lease":                 nil,
		"with a lease, and a value of ''": {clientv3.WithLease(lease.ID)},
	} {
		t.Run(name, func(t *testing.T) {
			key := random("foreign-")
			if _, err := client.Put(t.Context(), etcdstore.DefaultPrefix+key, "", put...); err != nil {
				t.Fatal(err)
			}
			defer client.Delete(t.Context(), etcdstore.DefaultPrefix+key)
			_, err := store.Acquire(t.Context(), key, "owner", ttl)
			_, errAgain := store.Acquire(t.Context(), key, "owner", ttl)
			_, errRenew := store.Renew(t.Context(), key, "owner", ttl)
			_, _, errBreak := store.Break(t.Context(), key)
			for call, err := range map[string]error{
				"Acquire": err, "second Acquire": errAgain, "Renew": errRenew,
				"Release": store.Release(t.Context(), key, "owner"), "Break": errBreak,
			} {
				if err == nil || !strings.Contains(err.Error(), "is no lock") {
					t.Errorf("%s = %v, want an error that says it is no lock", call, err)
				}
			}
			if n := count(t, client, etcdstore.DefaultPrefix+key); n != 1 {
				t.Error("the key is gone")
			}
			for info, err := range store.Leases(t.Context(), core.LeaseQuery{Prefix: key}) {
				t.Errorf("Leases shows %+v, %v; want nothing", info, err)
			}
		})
	}
}

func TestPrefixesKeepStoresApart(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	one := open(t, client, etcdstore.Options{Prefix: random("one-") + "/"})
	two := open(t, client, etcdstore.Options{Prefix: random("two-") + "/"})
	acquire(t, one, "key", "owner", ttl)
	acquire(t, two, "key", "owner", ttl)
	release(t, one, "key", "owner")
	if renewed, err := two.Renew(t.Context(), "key", "owner", ttl); !renewed || err != nil {
		t.Errorf("Renew = %t, %v; want true, nil", renewed, err)
	}
	release(t, two, "key", "owner")
}

// A client whose interfaces are wrapped sees its own part of etcd, with waiting
// too.
func TestClientInANamespace(t *testing.T) {
	plain, wrapped := connect(t, testserver.Etcd(t).URL), connect(t, testserver.Etcd(t).URL)
	space := random("tenant-") + "/"
	wrapped.KV = namespace.NewKV(wrapped.KV, space)
	wrapped.Lease = namespace.NewLease(wrapped.Lease, space)
	wrapped.Watcher = namespace.NewWatcher(wrapped.Watcher, space)
	store := open(t, wrapped, etcdstore.Options{})
	acquire(t, store, "key", "owner", ttl)
	if n := count(t, plain, space+etcdstore.DefaultPrefix+"key"); n != 1 {
		t.Fatalf("%d keys in the namespace, want 1", n)
	}
	for _, ttl := range []time.Duration{ttl, time.Minute, time.Minute} {
		if renewed, err := store.Renew(t.Context(), "key", "owner", ttl); !renewed || err != nil {
			t.Fatalf("Renew = %t, %v", renewed, err)
		}
	}
	signals, stop, err := store.Subscribe(t.Context(), "key")
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	release(t, store, "key", "owner")
	awaitSignal(t, signals)
}

func TestLeasesShowsWhoHoldsWhat(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	store := open(t, client, etcdstore.Options{Prefix: random("inspect-") + "/"})
	const keys = 1200 // more than two pages
	want := make(map[string]int64)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := i; n < keys; n += 16 {
				key := fmt.Sprintf("key %04d", n)
				g, err := store.Acquire(t.Context(), key, "host-7|0123456789abcdef0123456789abcdef", time.Minute)
				if err != nil || !g.Acquired {
					t.Errorf("Acquire = %+v, %v", g, err)
				}
				mu.Lock()
				want[key] = g.Token
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	got := make(map[string]int64)
	for info, err := range store.Leases(t.Context(), core.LeaseQuery{}) {
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := got[info.Key]; twice {
			t.Errorf("%q is shown twice", info.Key)
		}
		got[info.Key] = info.Token
		if info.Left < 30*time.Second || info.Left > 62*time.Second {
			t.Errorf("%q: %v left, want about a minute", info.Key, info.Left)
		}
		if strings.Contains(info.Label, "0123456789abcdef") {
			t.Errorf("%q: the label %q shows the owner", info.Key, info.Label)
		}
	}
	if len(got) != keys {
		t.Errorf("%d leases shown, want %d", len(got), keys)
	}
	for key, token := range want {
		if got[key] != token {
			t.Errorf("%q: token %d, want %d", key, got[key], token)
		}
	}
	n := 0
	for range store.Leases(t.Context(), core.LeaseQuery{Prefix: "key 00"}) {
		n++
	}
	if n != 100 {
		t.Errorf("%d leases with the prefix, want 100", n)
	}
	for info, err := range store.Leases(t.Context(), core.LeaseQuery{Key: "key 0007"}) {
		if err != nil || info.Token != want["key 0007"] {
			t.Errorf("Leases of one key = %+v, %v; want token %d", info, err, want["key 0007"])
		}
		break // and stopping early is fine
	}
	was, broken, err := store.Break(t.Context(), "key 0007")
	if err != nil || !broken || was.Token != want["key 0007"] {
		t.Errorf("Break = %+v, %t, %v", was, broken, err)
	}
	if _, broken, err := store.Break(t.Context(), "key 0007"); err != nil || broken {
		t.Errorf("second Break = %t, %v; want false, nil", broken, err)
	}
	acquire(t, store, "key 0007", "next", ttl)
	for _, err := range store.Leases(t.Context(), core.LeaseQuery{Key: "a", Prefix: "b"}) {
		if !errors.Is(err, core.ErrInvalid) {
			t.Errorf("Leases of a key and a prefix: %v, want ErrInvalid", err)
		}
	}
}

func TestManyRenewalsGoOutTogether(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store := openPatient(t, client, etcdstore.Options{})
	prefix := random("many-")
	const keys = 10_000
	each := func(atOnce int, f func(key string)) {
		var wg sync.WaitGroup
		for i := range atOnce {
			wg.Go(func() {
				for n := i; n < keys; n += atOnce {
					f(prefix + fmt.Sprint(n))
				}
			})
		}
		wg.Wait()
	}
	each(256, func(key string) { acquire(t, store, key, "owner", 5*time.Minute) })
	for range 2 {
		reads, writes, start := w.reads.Load(), w.puts.Load()+w.grants.Load(), time.Now()
		each(keys, func(key string) {
			if renewed, err := store.Renew(t.Context(), key, "owner", 5*time.Minute); !renewed || err != nil {
				t.Errorf("Renew = %t, %v; want true, nil", renewed, err)
			}
		})
		took := time.Since(start)
		t.Logf("%d renewals in %v, with %d reads and one stream", keys, took.Round(time.Millisecond), w.reads.Load()-reads)
		if n := w.reads.Load() - reads; n > keys/10 {
			t.Errorf("%d requests read %d keys, want about %d", n, keys, keys/etcdstore.MaxRead)
		}
		if n := w.puts.Load() + w.grants.Load() - writes; n > 0 {
			t.Errorf("%d writes, want none", n)
		}
	}
}

var onceKeys = flag.Int("once-keys", 10_000, "how many keys TestNothingIsLeftOfKeysLockedOnce locks")

// What is left of keys that were locked once, on the server and in memory.
func TestNothingIsLeftOfKeysLockedOnce(t *testing.T) {
	keys := *onceKeys
	client := connect(t, testserver.Etcd(t).URL)
	prefix := random("once-") + "/"
	store := openPatient(t, client, etcdstore.Options{Prefix: prefix})
	before := leases(t, client)
	var wg sync.WaitGroup
	const atOnce = etcdstore.MaxIdle
	for i := range atOnce {
		wg.Go(func() {
			for n := i; n < keys; n += atOnce {
				key := fmt.Sprint(n)
				acquire(t, store, key, "owner", 30*time.Second)
				release(t, store, key, "owner")
			}
		})
	}
	wg.Wait()
	if n := count(t, client, prefix); n != 0 {
		t.Errorf("%d keys on the server, want 0", n)
	}
	if n := leases(t, client) - before; n > atOnce {
		t.Errorf("%d leases on the server, want at most the %d in the pool", n, atOnce)
	}
	if holds, queue, tries, held, watches := etcdstore.Remembered(store); holds+tries+held+watches > 0 || queue > 4*atOnce {
		t.Errorf("in memory: %d holds, a queue of %d, %d tries, %d held keys, %d watches; want none (and a short queue)",
			holds, queue, tries, held, watches)
	}
}

func leases(t *testing.T, client *clientv3.Client) int {
	t.Helper()
	resp, err := client.Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return len(resp.Leases)
}

func TestCloseRevokesThePoolAndSparesHolders(t *testing.T) {
	client := connect(t, testserver.Etcd(t).URL)
	store, err := etcdstore.New(client, etcdstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	etcdstore.Wait(store)
	key := random("close-")
	acquire(t, store, key+"held", "owner", time.Minute)
	acquire(t, store, key, "owner", time.Minute)
	release(t, store, key, "owner")
	pooled := etcdstore.Pooled(store)
	if len(pooled) != 1 {
		t.Fatalf("%d leases in the pool, want 1", len(pooled))
	}
	signals, stop, err := store.Subscribe(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for range 2 {
		if err := store.Close(); err != nil {
			t.Errorf("Close = %v", err)
		}
	}
	if !gone(t, client, pooled[0]) {
		t.Error("the pooled lease is alive")
	}
	if lease, _ := keyOf(t, client, key+"held"); lease == 0 {
		t.Error("Close released a key that is held")
	}
	if _, ok := <-signals; ok {
		t.Error("a signal, want the channel closed")
	}
	_, errAcquire := store.Acquire(t.Context(), key, "owner", ttl)
	_, errRenew := store.Renew(t.Context(), key+"held", "owner", time.Minute)
	_, _, errSubscribe := store.Subscribe(t.Context(), key)
	_, _, errBreak := store.Break(t.Context(), key)
	for call, err := range map[string]error{
		"Acquire": errAcquire, "Renew": errRenew, "Subscribe": errSubscribe, "Break": errBreak,
		"Release": store.Release(t.Context(), key+"held", "owner"),
	} {
		if !errors.Is(err, etcdstore.ErrClosed) {
			t.Errorf("%s after Close = %v, want %v", call, err, etcdstore.ErrClosed)
		}
	}
	// The client is still the caller's.
	other := open(t, client, etcdstore.Options{})
	release(t, other, key+"held", "owner")
}

// Calls that are on their way to a silent server come back when the store is
// closed, also when they have been sent again, or are about to be.
func TestCloseEndsCallsOnTheirWay(t *testing.T) {
	server := testserver.StartEtcd(t)
	for name, lead := range map[string]time.Duration{"at once": 0, "sent once or twice": 100 * time.Millisecond, "sent again": 500 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			store, err := etcdstore.New(connect(t, server.URL), etcdstore.Options{})
			if err != nil {
				t.Fatal(err)
			}
			key := random("close-")
			acquire(t, store, key+"renew", "owner", time.Minute)
			acquire(t, store, key+"release", "owner", time.Minute)
			server.Pause(t)
			defer server.Resume(t)
			type result struct {
				call string
				err  error
			}
			results := make(chan result, 3)
			for call, f := range map[string]func(context.Context) error{
				"Renew": func(ctx context.Context) error {
					_, err := store.Renew(ctx, key+"renew", "owner", time.Minute)
					return err
				},
				"Release": func(ctx context.Context) error { return store.Release(ctx, key+"release", "owner") },
				"Acquire": func(ctx context.Context) error {
					_, err := store.Acquire(ctx, key+"acquire", "owner", time.Minute)
					return err
				},
			} {
				go func() { results <- result{call, f(context.Background())} }()
			}
			select {
			case r := <-results:
				t.Fatalf("%s = %v on a server that is silent", r.call, r.err)
			case <-time.After(lead):
			}
			start := time.Now()
			if err := store.Close(); err != nil {
				t.Errorf("Close = %v", err)
			}
			if d := time.Since(start); d > 5*time.Second {
				t.Errorf("Close took %v, want about 2 s at most", d)
			}
			for range 3 {
				select {
				case r := <-results:
					if !errors.Is(r.err, etcdstore.ErrClosed) {
						t.Errorf("%s = %v, want %v", r.call, r.err, etcdstore.ErrClosed)
					}
				case <-time.After(5 * time.Second):
					t.Fatal("a call did not return")
				}
			}
		})
	}
}
