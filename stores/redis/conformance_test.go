package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// addrEnv names the server in the processes that the suite starts.
const addrEnv = "REDISSTORE_TEST_ADDR"

// TestConformance runs the suite on a server of its own, which it restarts,
// pauses, flushes and makes refuse; or, if $LEASEKIT_TEST_REDIS names one, on
// that, and then leaves out the rules that would disturb others.
func TestConformance(t *testing.T) {
	addr := os.Getenv(addrEnv)
	var server *testserver.Server
	switch {
	case addr != "": // a process that the suite has started
	case os.Getenv("LEASEKIT_TEST_REDIS") != "":
		addr = testserver.Redis(t).Addr
	default:
		// Every write is on disk before it is answered, so that a server that is
		// killed comes back with what it had acknowledged.
		server = testserver.StartRedis(t, "--appendonly", "yes", "--appendfsync", "always")
		addr = server.Addr
	}
	config := conformance.Config{
		Open: func(t testing.TB) core.LockStore { return newStore(t, connect(t, addr, nil), redisstore.Options{}) },
		Env:  func(testing.TB) []string { return []string{addrEnv + "=" + addr} },
		OpenRetention: func(t testing.TB, retention time.Duration) (core.LockStore, func() int) {
			client := connect(t, addr, nil)
			prefix := random("retention-") + ":"
			return newStore(t, client, redisstore.Options{Prefix: prefix, Retention: retention}),
				func() int { return count(t, client, prefix) }
		},
		OpenOneConnection: func(t testing.TB) core.LockStore {
			client := connect(t, addr, func(o *redis.Options) { o.PoolSize = 1 })
			return newStore(t, client, redisstore.Options{})
		},
		OpenResending: func(t testing.TB) core.LockStore {
			client := connect(t, addr, nil)
			client.AddHook(sendTwice{})
			return newStore(t, client, redisstore.Options{})
		},
		Foreign: func(t testing.TB, key string) func() bool {
			client := connect(t, addr, nil)
			name := redisstore.DefaultPrefix + key
			must(t, client.Set(t.Context(), name, "nobody's", 0).Err())
			t.Cleanup(func() { client.Del(context.Background(), name) })
			return func() bool {
				return client.Get(context.Background(), name).Val() == "nobody's" &&
					client.PTTL(context.Background(), name).Val() == -1
			}
		},
		Faults: conformance.Faults{Addr: addr, Open: func(t testing.TB, addr string) core.LockStore {
			return newStore(t, connect(t, addr, nil), redisstore.Options{Logger: quiet})
		}},
		NotSupported: map[string]string{
			"ClientClockDoesNotMatter": "the store never reads a clock of its own machine, so there is none to set wrong",
		},
	}
	if server != nil {
		config.Restart = func(t testing.TB) {
			server.Kill(t)
			server.Start(t)
		}
		config.Pause = func(t testing.TB) func() {
			server.Pause(t)
			return func() { server.Resume(t) }
		}
		config.Flush = func(t testing.TB) {
			must(t, connect(t, addr, nil).FlushAll(context.Background()).Err())
		}
		// Every change of the data counts, whether it is on disk already or not.
		config.Writes = func(t testing.TB) int64 {
			return info(t, connect(t, addr, nil), "persistence", "rdb_changes_since_last_save")
		}
		config.Refusals = refusals(server)
	}
	conformance.Run(t, config)
}

func BenchmarkConformance(b *testing.B) {
	conformance.Benchmark(b, conformance.Config{Open: open})
}

// refusals are ways to make server refuse, which TestRefusals uses as well.
func refusals(server *testserver.Server) []conformance.Refusal {
	addr := server.Addr
	begin := func(name string, begin func(ctx context.Context, admin *redis.Client) (undo func() error, err error), change func(*redis.Options)) conformance.Refusal {
		return conformance.Refusal{Name: name, Begin: func(t testing.TB) (core.LockStore, func()) {
			ctx := context.Background()
			// One connection, made before the server refuses to make any.
			admin := connect(t, addr, func(o *redis.Options) { o.PoolSize = 1 })
			must(t, admin.Ping(ctx).Err())
			// The scripts are known, as after a while in production.
			newWarmStore(t, addr)
			undo, err := begin(ctx, admin)
			must(t, err)
			// Without the client's own retries, which take a second.
			client := connect(t, addr, func(o *redis.Options) {
				o.MaxRetries = -1
				if change != nil {
					change(o)
				}
			})
			return newStore(t, client, redisstore.Options{}), func() { must(t, undo()) }
		}}
	}
	set := func(name, value, undone string) func(ctx context.Context, admin *redis.Client) (func() error, error) {
		return func(ctx context.Context, admin *redis.Client) (func() error, error) {
			return func() error { return admin.ConfigSet(ctx, name, undone).Err() },
				admin.ConfigSet(ctx, name, value).Err()
		}
	}
	return []conformance.Refusal{
		begin("DemotedMaster", func(ctx context.Context, admin *redis.Client) (func() error, error) {
			// Of a master that does not answer, so that the data stays.
			return func() error { return admin.Do(ctx, "REPLICAOF", "NO", "ONE").Err() },
				admin.Do(ctx, "REPLICAOF", "127.0.0.1", "1").Err()
		}, nil),
		begin("OutOfMemory", set("maxmemory", "1", "0"), nil),
		begin("FullDisk", func(ctx context.Context, admin *redis.Client) (func() error, error) {
			return fullDisk(ctx, admin, server.Dir)
		}, nil),
		begin("TooFewReplicas", set("min-replicas-to-write", "1", "0"), nil),
		begin("NoPermission", func(ctx context.Context, admin *redis.Client) (func() error, error) {
			return func() error { return admin.Do(ctx, "ACL", "DELUSER", "nobody").Err() },
				admin.Do(ctx, "ACL", "SETUSER", "nobody", "on", ">secret", "+@connection").Err()
		}, func(o *redis.Options) { o.Username, o.Password = "nobody", "secret" }),
		begin("NoPassword", func(ctx context.Context, admin *redis.Client) (func() error, error) {
			return func() error { return admin.ConfigSet(ctx, "requirepass", "").Err() },
				admin.ConfigSet(ctx, "requirepass", "secret").Err()
		}, nil),
	}
}

// fullDisk makes snapshots of the server whose folder is dir fail, after which it
// refuses writes: where the snapshot is to go there is a folder in the way.
func fullDisk(ctx context.Context, admin *redis.Client, dir string) (undo func() error, err error) {
	obstacle := filepath.Join(dir, "dump.rdb")
	if err := os.MkdirAll(filepath.Join(obstacle, "full"), 0o777); err != nil {
		return nil, err
	}
	undo = func() error {
		return errors.Join(os.RemoveAll(obstacle), admin.ConfigSet(ctx, "save", "").Err())
	}
	if err := admin.ConfigSet(ctx, "save", "3600 1000000").Err(); err != nil {
		return undo, err
	}
	if err := admin.BgSave(ctx).Err(); err != nil {
		return undo, err
	}
	for {
		switch text, err := admin.Info(ctx, "persistence").Result(); {
		case err != nil:
			return undo, err
		case strings.Contains(text, "rdb_last_bgsave_status:err"):
			return undo, nil
		}
		time.Sleep(time.Millisecond)
	}
}

// newWarmStore has the server at addr run every script once.
func newWarmStore(t testing.TB, addr string) *redisstore.Store {
	t.Helper()
	store := newStore(t, connect(t, addr, nil), redisstore.Options{})
	key, owner := random("warm-"), random("")
	grant, err := store.Acquire(context.Background(), key, owner, time.Minute)
	must(t, err)
	renewed, err := store.Renew(context.Background(), key, owner, time.Minute)
	must(t, err)
	must(t, store.Release(context.Background(), key, owner))
	if !grant.Acquired || !renewed {
		t.Fatalf("acquired %v, renewed %v, want both", grant.Acquired, renewed)
	}
	return store
}

// sendTwice delivers every command twice, with between, if set, in between, and
// returns the second answer.
type sendTwice struct{ between func() }

func (sendTwice) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h sendTwice) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		_ = next(ctx, cmd)
		cmd.SetErr(nil)
		if h.between != nil {
			h.between()
		}
		return next(ctx, cmd)
	}
}

func (sendTwice) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// count returns how many keys begin with prefix.
func count(t testing.TB, client *redis.Client, prefix string) int {
	t.Helper()
	n := 0
	for iter := client.Scan(context.Background(), 0, prefix+"*", 1000).Iterator(); ; n++ {
		if !iter.Next(context.Background()) {
			must(t, iter.Err())
			return n
		}
	}
}

// info reads a number from a section of INFO.
func info(t testing.TB, client *redis.Client, section, name string) int64 {
	t.Helper()
	text, err := client.Info(context.Background(), section).Result()
	must(t, err)
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+":"); ok {
			n, err := strconv.ParseInt(value, 10, 64)
			must(t, err)
			return n
		}
	}
	must(t, fmt.Errorf("no %s in INFO %s", name, section))
	return 0
}

// commandCalls returns how often the server was given a command.
func commandCalls(t testing.TB, client *redis.Client, command string) int64 {
	t.Helper()
	text, err := client.Info(context.Background(), "commandstats").Result()
	must(t, err)
	_, after, found := strings.Cut(text, "cmdstat_"+command+":calls=")
	if !found {
		return 0
	}
	count, _, _ := strings.Cut(after, ",")
	n, err := strconv.ParseInt(count, 10, 64)
	must(t, err)
	return n
}
