package redisstore_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// clusterEnv names the masters in the processes that the suite starts.
const clusterEnv = "REDISSTORE_TEST_CLUSTER"

const slots = 16384

// startCluster starts a Redis Cluster of n masters with a third of the slots each.
func startCluster(t testing.TB, n int) []*testserver.Server {
	t.Helper()
	ctx := context.Background()
	masters := make([]*testserver.Server, n)
	clients := make([]*redis.Client, n)
	for i := range masters {
		masters[i] = testserver.StartRedis(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
		clients[i] = connect(t, masters[i].Addr, nil)
		must(t, clients[i].ClusterAddSlotsRange(ctx, i*slots/n, (i+1)*slots/n-1).Err())
		must(t, clients[i].Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err())
	}
	for _, master := range masters[1:] {
		host, port, err := net.SplitHostPort(master.Addr)
		must(t, err)
		must(t, clients[0].ClusterMeet(ctx, host, port).Err())
	}
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		ok := 0
		for _, client := range clients {
			state := client.ClusterInfo(ctx).Val()
			if strings.Contains(state, "cluster_state:ok") && strings.Contains(state, fmt.Sprintf("cluster_size:%d", n)) {
				ok++
			}
		}
		if ok == n {
			return masters
		}
		if time.Since(began) > 30*time.Second {
			t.Fatalf("the cluster is not up: %d of %d masters are", ok, n)
		}
	}
}

func addresses(masters []*testserver.Server) []string {
	var addrs []string
	for _, master := range masters {
		addrs = append(addrs, master.Addr)
	}
	return addrs
}

func connectCluster(t testing.TB, addrs []string) *redis.ClusterClient {
	t.Helper()
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// TestConformanceOnCluster runs the suite on three masters.
func TestConformanceOnCluster(t *testing.T) {
	var addrs []string
	if env := os.Getenv(clusterEnv); env != "" {
		addrs = strings.Split(env, ",")
	} else {
		addrs = addresses(startCluster(t, 3))
	}
	conformance.Run(t, conformance.Config{
		Open: func(t testing.TB) core.LockStore {
			return newStore(t, connectCluster(t, addrs), redisstore.Options{})
		},
		Env: func(testing.TB) []string { return []string{clusterEnv + "=" + strings.Join(addrs, ",")} },
		OpenRetention: func(t testing.TB, retention time.Duration) (core.LockStore, func() int) {
			client := connectCluster(t, addrs)
			prefix := random("retention-") + ":"
			return newStore(t, client, redisstore.Options{Prefix: prefix, Retention: retention}), func() int {
				var mu sync.Mutex
				n := 0
				must(t, client.ForEachMaster(context.Background(), func(_ context.Context, master *redis.Client) error {
					mu.Lock()
					defer mu.Unlock()
					n += count(t, master, prefix)
					return nil
				}))
				return n
			}
		},
		OpenResending: func(t testing.TB) core.LockStore {
			client := connectCluster(t, addrs)
			client.AddHook(sendTwice{})
			return newStore(t, client, redisstore.Options{})
		},
	})
}

func TestCluster(t *testing.T) {
	masters := startCluster(t, 3)
	client := connectCluster(t, addresses(masters))
	// The name of a channel is that of a key, so both lie in the same slot.
	keys := []string{"plain", "{", "}", "{}", "{}x", "{a}", "{a}b", "a{b}c", "a{}{b}", "{{a}}", "é{ü}", "a{b"}
	for i := range 20 {
		keys = append(keys, fmt.Sprint("key", i))
	}

	t.Run("keys with braces", func(t *testing.T) {
		for _, prefix := range []string{"", "app:", "{app}:", "{", "a{b"} {
			store := newStore(t, client, redisstore.Options{Prefix: prefix})
			var wg sync.WaitGroup
			for _, key := range keys {
				wg.Go(func() {
					signals, stop, err := store.Subscribe(t.Context(), key)
					if err != nil {
						t.Errorf("Subscribe(%q) with prefix %q: %v", key, prefix, err)
						return
					}
					defer stop()
					cycle(t, store, key)
					mustSignal(t, signals)
				})
			}
			wg.Wait()
		}
	})

	t.Run("one connection for a master", func(t *testing.T) {
		store := newStore(t, client, redisstore.Options{})
		used := map[string]bool{}
		for _, key := range keys {
			subscribe(t, store, key)
			master, err := client.MasterForKey(t.Context(), redisstore.DefaultPrefix+key)
			must(t, err)
			used[master.Options().Addr] = true
		}
		for _, master := range masters {
			want := 0
			if used[master.Addr] {
				want = 1
			}
			if n := listeners(t, connect(t, master.Addr, nil)); n != want {
				t.Errorf("%d subscription connections to %s, want %d", n, master.Addr, want)
			}
		}
		must(t, store.Close())
	})

	t.Run("leases of all masters", func(t *testing.T) { testLeases(t, client) })

	t.Run("a type that embeds the client", func(t *testing.T) {
		type traced struct{ redis.UniversalClient }
		wrapped := &traced{traced{client}}
		testLeases(t, wrapped)
		store := newStore(t, wrapped, redisstore.Options{})
		for _, key := range keys[:6] {
			signals, _ := subscribe(t, store, key)
			cycle(t, store, key)
			mustSignal(t, signals)
		}
	})

	// It knows one master of three. Its answers are right, or errors.
	t.Run("a client of one master", func(t *testing.T) {
		store := newStore(t, connect(t, masters[0].Addr, nil), redisstore.Options{Logger: quiet})
		for _, err := range store.Leases(t.Context(), core.LeaseQuery{}) {
			if err == nil || !strings.Contains(err.Error(), "ClusterClient") {
				t.Fatalf("listing a third of the leases: error %v, want one that names ClusterClient", err)
			}
		}
		refused := 0
		for _, key := range keys {
			_, stop, err := store.Subscribe(t.Context(), key)
			switch {
			case err == nil:
				stop()
			case redis.HasErrorPrefix(err, "MOVED"):
				refused++
			default:
				t.Errorf("Subscribe(%q): %v", key, err)
			}
		}
		if refused == 0 {
			t.Error("no subscription was refused, want those to keys of other masters")
		}
	})

	t.Run("slot moves", func(t *testing.T) {
		store := newStore(t, client, redisstore.Options{Logger: quiet})
		var key string
		var slot, from int
		for { // a slot that holds nothing can be given away at once
			key = random("")
			slot = int(client.ClusterKeySlot(t.Context(), redisstore.DefaultPrefix+key).Val())
			from = slot * 3 / slots
			if n, err := connect(t, masters[from].Addr, nil).ClusterCountKeysInSlot(t.Context(), slot).Result(); err == nil && n == 0 {
				break
			}
		}
		signals, _ := subscribe(t, store, key)
		to := (from + 1) % 3
		target, err := connect(t, masters[to].Addr, nil).Do(t.Context(), "CLUSTER", "MYID").Text()
		must(t, err)
		// Its claim must win against what the others still say of the slot.
		must(t, connect(t, masters[to].Addr, nil).Do(t.Context(), "CLUSTER", "BUMPEPOCH").Err())
		// The new owner first, as redis-cli does.
		for _, i := range []int{to, from, (from + 2) % 3} {
			must(t, connect(t, masters[i].Addr, nil).Do(t.Context(), "CLUSTER", "SETSLOT", slot, "NODE", target).Err())
		}
		// The old master drops the subscription; it is made anew, on the new one.
		mustSignal(t, signals)
		if n := subscribers(t, connect(t, masters[to].Addr, nil), key); n != 1 {
			t.Errorf("%d subscribers on the new master, want 1", n)
		}
		cycle(t, store, key)
		mustSignal(t, signals)
		_, stop := subscribe(t, store, key)
		stop()
	})

	t.Run("master down", func(t *testing.T) {
		store := newStore(t, client, redisstore.Options{Logger: quiet})
		for i, key := range keys[:6] {
			signals, _ := subscribe(t, store, key)
			if i > 0 {
				continue
			}
			slot := int(client.ClusterKeySlot(t.Context(), redisstore.DefaultPrefix+key).Val())
			master := masters[slot*3/slots]
			master.Kill(t)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			_, err := store.Acquire(ctx, key, "me", time.Minute)
			cancel()
			if err == nil {
				t.Error("Acquire from a master that is down: no error")
			}
			master.Start(t)
			mustSignal(t, signals)
			eventually(t, "up", func() bool { return store.Release(t.Context(), key, "me") == nil })
			cycle(t, store, key)
			mustSignal(t, signals)
		}
	})
}

// startSentinel starts a Sentinel that watches master under the name "main".
func startSentinel(t *testing.T, master *testserver.Server) (addr string) {
	t.Helper()
	program := ""
	for _, name := range []string{"redis-server", "valkey-server"} {
		if path, err := exec.LookPath(name); err == nil {
			program = path
			break
		}
	}
	if program == "" {
		t.Skip("needs redis-server or valkey-server on PATH, to run as a Sentinel")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	addr = listener.Addr().String()
	must(t, listener.Close())
	_, port, _ := net.SplitHostPort(addr)
	host, masterPort, err := net.SplitHostPort(master.Addr)
	must(t, err)
	conf := filepath.Join(t.TempDir(), "sentinel.conf")
	must(t, os.WriteFile(conf, fmt.Appendf(nil,
		"port %s\nbind 127.0.0.1\nsentinel monitor main %s %s 1\nsentinel down-after-milliseconds main 2000\nsentinel failover-timeout main 5000\n",
		port, host, masterPort), 0o600))
	cmd := exec.Command(program, conf, "--sentinel")
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	sentinel := connect(t, addr, nil)
	eventually(t, "watching", func() bool { return sentinel.Ping(t.Context()).Err() == nil })
	return addr
}

// The master dies, and a Sentinel promotes the replica: the store follows, tokens
// grow, and waiters are woken.
func TestFailover(t *testing.T) {
	master := testserver.StartRedis(t, "--repl-diskless-sync-delay", "0")
	replica := testserver.StartRedis(t)
	host, port, err := net.SplitHostPort(master.Addr)
	must(t, err)
	onReplica := connect(t, replica.Addr, nil)
	must(t, onReplica.Do(t.Context(), "REPLICAOF", host, port).Err())
	eventually(t, "replicating", func() bool {
		return strings.Contains(onReplica.Info(t.Context(), "replication").Val(), "master_link_status:up")
	})
	sentinelAddr := startSentinel(t, master)
	sentinel := redis.NewSentinelClient(&redis.Options{Addr: sentinelAddr})
	defer sentinel.Close()
	eventually(t, "aware of the replica", func() bool {
		replicas, err := sentinel.Replicas(t.Context(), "main").Result()
		return err == nil && len(replicas) == 1 && replicas[0]["master-link-status"] == "ok"
	})

	o := &redis.FailoverOptions{MasterName: "main", SentinelAddrs: []string{sentinelAddr}}
	type client struct {
		name    string
		store   *redisstore.Store
		signals <-chan struct{}
		before  core.Grant
	}
	single, cluster := redis.NewFailoverClient(o), redis.NewFailoverClusterClient(o)
	t.Cleanup(func() { _, _ = single.Close(), cluster.Close() })
	clients := []*client{
		{name: "NewFailoverClient", store: newStore(t, single, redisstore.Options{Logger: quiet})},
		{name: "NewFailoverClusterClient", store: newStore(t, cluster, redisstore.Options{Logger: quiet})},
	}
	for _, c := range clients {
		c.signals, _ = subscribe(t, c.store, c.name)
		c.before, err = c.store.Acquire(t.Context(), c.name, "me", time.Hour)
		must(t, err)
		must(t, c.store.Release(t.Context(), c.name, "me"))
		mustSignal(t, c.signals)
	}
	master.Kill(t)
	for _, c := range clients {
		owner := random("")
		var after core.Grant
		eventually(t, "acquired", func() bool {
			after, err = c.store.Acquire(t.Context(), c.name, owner, time.Hour)
			return err == nil
		})
		t.Logf("%s: tokens %d and, after the failover, %d", c.name, c.before.Token, after.Token)
		if !after.Acquired || after.Token <= c.before.Token {
			t.Errorf("%s: %+v after token %d", c.name, after, c.before.Token)
		}
		mustSignal(t, c.signals) // subscribed again
		must(t, c.store.Release(t.Context(), c.name, owner))
		mustSignal(t, c.signals)
	}
}
