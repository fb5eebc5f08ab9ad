package etcdstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

func awaitSignal(t testing.TB, signals <-chan struct{}) {
	t.Helper()
	select {
	case _, ok := <-signals:
		if !ok {
			t.Fatal("the channel was closed")
		}
	case <-time.After(time.Minute):
		t.Fatal("no signal for a minute")
	}
}

// All keys share one stream, and all who wait for a key one watcher.
func TestOneWatchStream(t *testing.T) {
	server := testserver.StartEtcd(t)
	store := open(t, connect(t, server.URL), etcdstore.Options{})
	watchers := func() (streams, watchers int64) {
		return metric(t, server.URL, "etcd_debugging_mvcc_watch_stream_total"),
			metric(t, server.URL, "etcd_debugging_mvcc_watcher_total")
	}
	const keys, each = 20, 5
	var all []<-chan struct{}
	var stops []func()
	for i := range keys * each {
		signals, stop, err := store.Subscribe(t.Context(), fmt.Sprint(i%keys))
		if err != nil {
			t.Fatal(err)
		}
		all, stops = append(all, signals), append(stops, stop)
	}
	if streams, watchers := watchers(); streams != 1 || watchers != keys {
		t.Errorf("%d streams with %d watchers, want 1 with %d", streams, watchers, keys)
	}
	for i := range keys {
		acquire(t, store, fmt.Sprint(i), "owner", ttl)
		release(t, store, fmt.Sprint(i), "owner")
	}
	for _, signals := range all {
		awaitSignal(t, signals)
	}
	for _, stop := range stops {
		stop()
		stop()
	}
	eventually(t, "no stream and no watcher is left", func() bool {
		streams, watchers := watchers()
		return streams == 0 && watchers == 0
	})
	if _, _, _, _, watches := etcdstore.Remembered(store); watches != 0 {
		t.Errorf("%d watches in memory, want 0", watches)
	}
}

func TestSignalComesFromTheKeyAlone(t *testing.T) {
	store := open(t, connect(t, testserver.Etcd(t).URL), etcdstore.Options{})
	key := random("alone-")
	signals, stop, err := store.Subscribe(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	// Neither an acquisition, nor a renewal of any kind, nor a neighbour's
	// release is a signal.
	acquire(t, store, key, "owner", ttl)
	for _, ttl := range []time.Duration{ttl, time.Minute} {
		if _, err := store.Renew(t.Context(), key, "owner", ttl); err != nil {
			t.Fatal(err)
		}
	}
	acquire(t, store, key+"/x", "owner", ttl)
	release(t, store, key+"/x", "owner")
	other, stopOther, err := store.Subscribe(t.Context(), key+"/y")
	if err != nil {
		t.Fatal(err)
	}
	defer stopOther()
	acquire(t, store, key+"/y", "owner", ttl)
	release(t, store, key+"/y", "owner")
	awaitSignal(t, other) // what came before has been delivered on the same stream
	select {
	case <-signals:
		t.Error("a signal while the key is held")
	default:
	}
	release(t, store, key, "owner")
	awaitSignal(t, signals)
}

// The history that a broken watch would resume from is compacted while the
// server is away.
func TestWatchOutlivesCompactionAndRestart(t *testing.T) {
	server := testserver.StartEtcd(t)
	client := connect(t, server.URL)
	store := open(t, client, etcdstore.Options{})
	acquire(t, store, "key", "owner", time.Minute)
	signals, stop, err := store.Subscribe(t.Context(), "key")
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	compact := func() {
		t.Helper()
		for range 5 {
			if _, err := client.Put(t.Context(), "other", "value"); err != nil {
				t.Fatal(err)
			}
		}
		resp, err := client.Get(t.Context(), "other")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Compact(t.Context(), resp.Header.Revision); err != nil {
			t.Fatal(err)
		}
	}
	compact()
	server.Kill(t)
	server.Start(t)
	compact()
	release(t, store, "key", "owner")
	awaitSignal(t, signals)
	// And again, without a restart.
	acquire(t, store, "key", "owner", time.Minute)
	compact()
	for len(signals) > 0 {
		<-signals
	}
	release(t, store, "key", "owner")
	awaitSignal(t, signals)
}

func TestSubscribeEndsWithItsContext(t *testing.T) {
	server := testserver.StartEtcd(t)
	store := open(t, connect(t, server.URL), etcdstore.Options{})
	server.Pause(t)
	defer server.Resume(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, _, err := store.Subscribe(ctx, "key")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Subscribe = %v, want the context's error", err)
	}
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("Subscribe returned after %v", d)
	}
	eventually(t, "nothing is left", func() bool {
		_, _, _, _, watches := etcdstore.Remembered(store)
		return watches == 0
	})
}

// A user who may not read the key polls in vain too; his waiters must be told
// once and not be kept waiting.
func TestSubscribeWithoutPermission(t *testing.T) {
	server := testserver.StartEtcd(t, "--bcrypt-cost", "4")
	disable := enableAuth(t, server.URL)
	defer disable()
	store := open(t, connectAs(t, server.URL, "nobody", "secret"), etcdstore.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 3 {
		_, stop, err := store.Subscribe(ctx, "key")
		if err == nil {
			stop()
		}
		if !errors.Is(err, rpctypes.ErrPermissionDenied) {
			t.Errorf("Subscribe = %v, want %v", err, rpctypes.ErrPermissionDenied)
		}
	}
}

func TestWaitersOfADeadHolderAreWoken(t *testing.T) {
	url := testserver.Etcd(t).URL
	dead, store := open(t, connect(t, url), etcdstore.Options{}), open(t, connect(t, url), etcdstore.Options{})
	key := random("dead-")
	acquire(t, dead, key, "dead", ttl)
	signals, stop, err := store.Subscribe(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	awaitSignal(t, signals)
	acquire(t, store, key, "next", ttl)
	release(t, store, key, "next")
}

// A hundred who wait cost the server reads, and not many.
func TestWaitersCostReads(t *testing.T) {
	client, w := connectOver(t, testserver.Etcd(t).URL)
	store, key := open(t, client, etcdstore.Options{}), random("waiters-")
	acquire(t, store, key, "owner", time.Minute)
	locks := strategy(t, store)
	const waiters, watched = 100, 3 * time.Second
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for range waiters {
		wg.Go(func() {
			if _, err := locks.Acquire(ctx, key); !errors.Is(err, context.Canceled) {
				t.Errorf("Acquire = %v, want %v", err, context.Canceled)
			}
		})
	}
	// Polls begin after 50 ms and come every second after about two.
	time.Sleep(2 * time.Second)
	writes := w.puts.Load() + w.grants.Load()
	reads := w.reads.Load()
	time.Sleep(watched)
	writes = w.puts.Load() + w.grants.Load() - writes
	reads = w.reads.Load() - reads
	t.Logf("%d waiters: %d reads and %d writes in %v", waiters, reads, writes, watched)
	if writes > 0 {
		t.Errorf("%d writes while %d waited, want none", writes, waiters)
	}
	if limit := int64(waiters * (watched/time.Second + 1) * 2); reads > limit {
		t.Errorf("%d reads while %d waited for %v, want at most %d", reads, waiters, watched, limit)
	}
}

var _ core.Notifier = (*etcdstore.Store)(nil)
