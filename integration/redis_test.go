package integration

import (
	"context"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/conformance/faults"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// current is the address that clients connect to at present: what a Sentinel, a
// DNS name or a proxy is in production.
type current struct{ addr atomic.Value }

func (c *current) set(addr string) { c.addr.Store(addr) }
func (c *current) get() string     { return c.addr.Load().(string) }

func redisClient(t testing.TB, at *current) *redis.Client {
	client := redis.NewClient(&redis.Options{
		Addr: at.get(),
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, at.get())
		},
	})
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func redisAt(t testing.TB, addr string) (*redis.Client, *current) {
	at := new(current)
	at.set(addr)
	return redisClient(t, at), at
}

func redisStore(t testing.TB, client *redis.Client) *redisstore.Store {
	t.Helper()
	store, err := redisstore.New(client, redisstore.Options{})
	check(t, err)
	t.Cleanup(func() { _ = store.Close() })
	return store
}

// redisPair starts a master, and a replica, with a client, that reaches it
// through network.
func redisPair(t testing.TB) (master, replica *testserver.Server, onReplica *redis.Client, network *faults.Proxy) {
	t.Helper()
	master = testserver.StartRedis(t, "--repl-diskless-sync-delay", "0")
	replica = testserver.StartRedis(t)
	network = faults.NewProxy(t, master.Addr)
	onReplica, _ = redisAt(t, replica.Addr)
	host, port, err := net.SplitHostPort(network.Addr())
	check(t, err)
	check(t, onReplica.Do(t.Context(), "REPLICAOF", host, port).Err())
	eventually(t, "replicating", func() bool {
		return strings.Contains(onReplica.Info(t.Context(), "replication").Val(), "master_link_status:up")
	})
	return master, replica, onReplica, network
}

// A master with a replica, which replication reaches through a network that can
// be cut. The master dies and the replica takes its place, with the clients.
func TestRedisAsyncFailover(t *testing.T) {
	const topology = "Redis, master and replica"
	for _, test := range []struct {
		name, fault string
		behind      bool
	}{
		{"replica behind", "master killed -9 before it replicated the grant, replica promoted", true},
		{"replica up to date", "master killed -9 after it replicated the grant, replica promoted", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			master, replica, onReplica, network := redisPair(t)

			at := new(current)
			at.set(master.Addr)
			story := hold{
				topology: topology, fault: test.fault,
				holder: redisStore(t, redisClient(t, at)), rival: redisStore(t, redisClient(t, at)),
				ttl: 9 * time.Second,
				strike: func(key string, token int64) {
					if !test.behind {
						eventually(t, "replicated", func() bool {
							got, _ := onReplica.HGet(t.Context(), redisstore.DefaultPrefix+key, "token").Result()
							return got == strconv.FormatInt(token, 10)
						})
					}
					master.Kill(t)
					check(t, onReplica.Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
					at.set(replica.Addr)
				},
			}
			if !test.behind {
				story.kept(t)
				return
			}
			network.Set(faults.Blackhole())
			story.lost(t)
		})
	}
}

// The master is not dead but cut off, and its clients with it: both sides grant.
func TestRedisSplitBrain(t *testing.T) {
	master, replica, onReplica, network := redisPair(t)
	onMaster, at := redisAt(t, master.Addr)
	network.Set(faults.Blackhole())
	hold{
		topology: "Redis, master and replica",
		fault:    "master cut off with its clients, replica promoted, clients move over later",
		holder:   redisStore(t, onMaster), rival: redisStore(t, onReplica),
		ttl: 9 * time.Second,
		strike: func(string, int64) {
			check(t, onReplica.Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
		},
		// The old master has answered its clients all the time; what it granted
		// is forgotten with it.
		settle: func() {
			at.set(replica.Addr)
			master.Kill(t)
		},
	}.lost(t)
}

// One server, killed -9 and started again on the same port.
func TestRedisKilled(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		keep bool
	}{
		{"no persistence", nil, false},
		{"appendfsync always", []string{"--appendonly", "yes", "--appendfsync", "always"}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := testserver.StartRedis(t, test.args...)
			holder, _ := redisAt(t, server.Addr)
			rival, _ := redisAt(t, server.Addr)
			story := hold{
				topology: "Redis, one server, " + test.name, fault: "killed -9 and restarted",
				holder: redisStore(t, holder), rival: redisStore(t, rival),
				ttl: 9 * time.Second,
				strike: func(string, int64) {
					server.Kill(t)
					server.Start(t)
				},
			}
			if test.keep {
				story.kept(t)
			} else {
				story.lost(t)
			}
		})
	}
}
