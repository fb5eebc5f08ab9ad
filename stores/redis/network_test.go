package redisstore_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// quiet is a logger for strategies whose troubles a test makes itself.
var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// calls are the methods that talk to the server.
var calls = []struct {
	name string
	call func(ctx context.Context, store *redisstore.Store, key string) error
}{
	{"Acquire", func(ctx context.Context, store *redisstore.Store, key string) error {
		_, err := store.Acquire(ctx, key, "me", time.Minute)
		return err
	}},
	{"Renew", func(ctx context.Context, store *redisstore.Store, key string) error {
		_, err := store.Renew(ctx, key, "me", time.Minute)
		return err
	}},
	{"Release", func(ctx context.Context, store *redisstore.Store, key string) error {
		return store.Release(ctx, key, "me")
	}},
	{"Leases", func(ctx context.Context, store *redisstore.Store, _ string) error {
		for _, err := range store.Leases(ctx, core.LeaseQuery{}) {
			if err != nil {
				return err
			}
		}
		return nil
	}},
	{"Break", func(ctx context.Context, store *redisstore.Store, key string) error {
		_, _, err := store.Break(ctx, key)
		return err
	}},
	{"Subscribe", func(ctx context.Context, store *redisstore.Store, key string) error {
		_, stop, err := store.Subscribe(ctx, key)
		if err == nil {
			stop()
		}
		return err
	}},
}

// go-redis comes back 3 to 5 s after its context has ended, while the server is
// silent; the store at once, whatever the client's options are.
func TestReturnsWhenContextEnds(t *testing.T) {
	t.Parallel()
	server := testserver.Redis(t)
	for _, client := range []struct {
		name   string
		change func(*redis.Options)
	}{
		{"default options", nil},
		{"ContextTimeoutEnabled", func(o *redis.Options) { o.ContextTimeoutEnabled = true }},
		{"one connection", func(o *redis.Options) { o.PoolSize = 1 }},
		{"no retries", func(o *redis.Options) { o.MaxRetries = -1 }},
	} {
		for _, warm := range []string{"warm", "cold"} {
			t.Run(client.name+"/"+warm, func(t *testing.T) {
				t.Parallel()
				p := newProxy(t, server.Addr)
				store := newStore(t, connect(t, p.addr, client.change), redisstore.Options{Logger: quiet})
				key := random("silence-")
				if warm == "warm" {
					_, err := store.Acquire(t.Context(), key, "me", time.Minute)
					must(t, err)
				}
				p.set(pass, hold)
				defer func() { // so that nobody waits for what was given up
					p.set(cut, cut)
					p.breakAll()
				}()
				for _, c := range calls {
					var late []time.Duration
					for i := range 5 {
						ctx, cancel := context.WithCancel(t.Context())
						if i%2 == 1 {
							cancel()
							ctx, cancel = context.WithTimeout(t.Context(), 30*time.Millisecond)
						}
						var ended atomic.Int64
						context.AfterFunc(ctx, func() { ended.Store(time.Now().UnixNano()) })
						time.AfterFunc(30*time.Millisecond, cancel)
						err := c.call(ctx, store, key)
						returned := time.Now()
						if ctx.Err() == nil || !errors.Is(err, ctx.Err()) {
							t.Errorf("%s: error %v when the context says %v, want one that matches", c.name, err, ctx.Err())
						}
						for ended.Load() == 0 {
							time.Sleep(time.Millisecond)
						}
						late = append(late, time.Duration(returned.UnixNano()-ended.Load()))
						cancel()
					}
					slices.Sort(late)
					// The quickest: others share this machine.
					if late[0] > 50*time.Millisecond || late[len(late)-1] > 2*time.Second {
						t.Errorf("%s returned %v after its context had ended, want at most 50 ms", c.name, late)
					}
				}
			})
		}
	}
}

// A context that has ended never reaches the server.
func TestEndedContextDoesNoIO(t *testing.T) {
	t.Parallel()
	p := newProxy(t, testserver.Redis(t).Addr)
	store := newStore(t, connect(t, p.addr, nil), redisstore.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range calls {
		if err := c.call(ctx, store, "k"); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: error %v, want context.Canceled", c.name, err)
		}
	}
	if n := p.dialled(); n != 0 {
		t.Errorf("%d connections, want none", n)
	}
}

// The reply is lost, go-redis sends the call again: the second delivery gets the
// answer of the first.
func TestResentCallGetsFirstAnswer(t *testing.T) {
	server := testserver.StartRedis(t)
	direct := connect(t, server.Addr, nil)
	newWarmStore(t, server.Addr)
	p := newProxy(t, server.Addr)
	store := newStore(t, connect(t, p.addr, nil), redisstore.Options{})
	must(t, store.Release(t.Context(), "k", "nobody")) // connected
	name := redisstore.DefaultPrefix + "k"
	calls := func() int64 { return evals(t, direct) }

	before := calls()
	p.set(pass, cutOnce)
	grant, err := store.Acquire(t.Context(), "k", "me", time.Hour)
	if err != nil || !grant.Acquired {
		t.Fatalf("Acquire whose reply was lost: %+v, %v, want acquired", grant, err)
	}
	if n := calls() - before; n != 2 {
		t.Fatalf("the server executed %d calls, want 2: this test has tested nothing", n)
	}
	if token := number(t, record(t, direct, name)["token"]); token != grant.Token {
		t.Errorf("token %d, the record says %d", grant.Token, token)
	}

	p.set(pass, cutOnce)
	if renewed, err := store.Renew(t.Context(), "k", "me", 2*time.Hour); err != nil || !renewed {
		t.Errorf("Renew whose reply was lost: %v, %v, want true", renewed, err)
	}
	p.set(pass, cutOnce)
	if err := store.Release(t.Context(), "k", "me"); err != nil {
		t.Errorf("Release whose reply was lost: %v", err)
	}
	if until := record(t, direct, name)["until"]; until != "0" {
		t.Errorf("until %s after Release, want 0", until)
	}
}

// evals counts the scripts that the server has been asked to run.
func evals(t testing.TB, client *redis.Client) int64 {
	t.Helper()
	var n int64
	for _, cmd := range []string{"evalsha", "eval"} {
		n += commandCalls(t, client, cmd)
	}
	return n
}

// One delivery of an Acquire may stand still somewhere and reach the server after
// the lease that another won was released. It must not leave a lease that nobody
// knows of.
func TestLateSecondDeliveryWinsNothing(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	tape := &recording{}
	client.AddHook(tape)
	store := newStore(t, client, redisstore.Options{})
	for _, end := range []string{"released", "expired"} {
		key := random(end + "-")
		ttl := time.Hour
		if end == "expired" {
			ttl = time.Millisecond
		}
		grant, err := store.Acquire(t.Context(), key, "me", ttl)
		must(t, err)
		if !grant.Acquired {
			t.Fatal("not acquired")
		}
		delivery := tape.last()
		if end == "expired" {
			time.Sleep(2 * ttl)
		} else {
			must(t, store.Release(t.Context(), key, "me"))
		}
		// Neither "acquired" nor "held" would be true.
		if n, err := client.Do(t.Context(), delivery...).Int64(); !redis.HasErrorPrefix(err, "LATE") {
			t.Errorf("%s: the late delivery got %d, %v, want the error LATE", end, n, err)
		}
		next, err := store.Acquire(t.Context(), key, "next", time.Hour)
		if err != nil || !next.Acquired {
			t.Errorf("%s: after the late delivery the key is not free: %+v, %v", end, next, err)
		}
		if next.Token <= grant.Token {
			t.Errorf("%s: token %d after %d", end, next.Token, grant.Token)
		}
		// Nor does it touch a successor.
		n, err := client.Do(t.Context(), delivery...).Int64()
		if err != nil || n >= 0 {
			t.Errorf("%s: beside a successor the late delivery got %d, %v, want the time left, negative", end, n, err)
		}
		must(t, store.Release(t.Context(), key, "next"))
	}
}

// recording keeps the last command.
type recording struct {
	sendTwice
	mu  sync.Mutex
	cmd []any
}

func (r *recording) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.cmd = slices.Clone(cmd.Args())
		return err
	}
}

func (r *recording) last() []any {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.cmd)
}

// endsWhen returns a context that ends when seen is true, or after 10 s.
func endsWhen(t *testing.T, seen func(ctx context.Context) bool) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	go func() {
		for ctx.Err() == nil && !seen(ctx) {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	return ctx, cancel
}

// An acquire whose reply was lost has taken the lease. Its owner's Release frees
// the key at once, not after the ttl.
func TestReleaseUndoesAcquireWithoutReply(t *testing.T) {
	t.Parallel()
	server := testserver.Redis(t)
	direct := newStore(t, connect(t, server.Addr, nil), redisstore.Options{})
	for _, fault := range []struct {
		name string
		mode mode
	}{{"reset", cutOnce}, {"silence", hold}} {
		p := newProxy(t, server.Addr)
		store := newStore(t, connect(t, p.addr, func(o *redis.Options) { o.MaxRetries = -1 }), redisstore.Options{})
		key := random("lost-")
		must(t, store.Release(t.Context(), key, "me")) // connected, and knows the script
		newWarmStore(t, server.Addr)

		p.set(pass, fault.mode)
		client := connect(t, server.Addr, nil)
		ctx, cancel := endsWhen(t, func(ctx context.Context) bool { // the server has executed it
			return client.HGet(ctx, redisstore.DefaultPrefix+key, "owner").Val() == "me"
		})
		grant, err := store.Acquire(ctx, key, "me", time.Hour)
		cancel()
		if err == nil {
			t.Fatalf("%s: Acquire: %+v, want an error", fault.name, grant)
		}
		held, err := direct.Acquire(t.Context(), key, "other", time.Hour)
		must(t, err)
		if held.Acquired {
			t.Fatalf("%s: the server has not executed the acquire: this test has tested nothing", fault.name)
		}
		p.set(pass, pass)
		must(t, store.Release(t.Context(), key, "me"))
		held, err = direct.Acquire(t.Context(), key, "other", time.Hour)
		if err != nil || !held.Acquired {
			t.Errorf("%s: after the Release: %+v, %v, want acquired", fault.name, held, err)
		}
	}
}

// An acquire that the server executes after its caller gave up and released
// leaves a ghost, which ends by itself.
func TestLateAcquireEndsByItself(t *testing.T) {
	t.Parallel()
	server := testserver.Redis(t)
	newWarmStore(t, server.Addr)
	direct := newStore(t, connect(t, server.Addr, nil), redisstore.Options{})
	p := newProxy(t, server.Addr)
	store := newStore(t, connect(t, p.addr, nil), redisstore.Options{})
	key := random("late-")
	must(t, store.Release(t.Context(), key, "me"))

	const ttl = 300 * time.Millisecond
	p.set(hold, pass)
	ctx, cancel := endsWhen(t, func(context.Context) bool { return p.holding() })
	defer cancel()
	if grant, err := store.Acquire(ctx, key, "me", ttl); err == nil {
		t.Fatalf("Acquire: %+v, want an error", grant)
	}
	must(t, direct.Release(t.Context(), key, "me"))
	p.set(pass, pass)

	client := connect(t, server.Addr, nil)
	var ghost int64 // its token
	for began := time.Now(); ghost == 0; time.Sleep(time.Millisecond) {
		if got := record(t, client, redisstore.DefaultPrefix+key); got["owner"] == "me" {
			ghost = number(t, got["token"])
		}
		if time.Since(began) > 10*time.Second {
			t.Fatal("the server has not executed the acquire: this test has tested nothing")
		}
	}
	for {
		grant, err := direct.Acquire(t.Context(), key, "other", time.Minute)
		must(t, err)
		if grant.Acquired {
			if lived := time.Duration(grant.Token-ghost) * time.Microsecond; lived < ttl {
				t.Errorf("the ghost of %v was taken after %v", ttl, lived)
			}
			return
		}
		if grant.Left <= 0 || grant.Left > ttl {
			t.Fatalf("the ghost has %v left, want at most the ttl of %v", grant.Left, ttl)
		}
		time.Sleep(grant.Left)
	}
}

// A callback notices by acquire + ttl that the network has gone, and not at all
// that it had gone for half a ttl.
func TestStrategyOverBadNetwork(t *testing.T) {
	t.Parallel()
	server := testserver.Redis(t)
	const ttl = 8 * time.Second // for the reason that TestManyHolds has
	run := func(t *testing.T, ttl time.Duration, silence func(p *proxy), fn func(ctx context.Context) error) error {
		p := newProxy(t, server.Addr)
		store := newStore(t, connect(t, p.addr, nil), redisstore.Options{Logger: quiet})
		strategy, err := core.NewStrategy(store, core.Options{TTL: ttl, Logger: quiet})
		must(t, err)
		return strategy.Do(t.Context(), random("network-"), func(ctx context.Context) error {
			silence(p)
			return fn(ctx)
		})
	}
	t.Run("silent for good", func(t *testing.T) {
		t.Parallel()
		var took time.Duration
		err := run(t, ttl, func(p *proxy) { p.set(hold, hold) }, func(ctx context.Context) error {
			began := time.Now()
			<-ctx.Done()
			took = time.Since(began)
			return context.Cause(ctx)
		})
		if _, lost := errors.AsType[*core.LostError](err); !lost {
			t.Errorf("error %v, want a LostError", err)
		}
		t.Logf("loss seen %v after the acquire, ttl %v", took.Round(time.Millisecond), ttl)
		// ttl at the latest; what is more is this machine's.
		if took > ttl+30*time.Second || took < ttl/2 {
			t.Errorf("loss seen after %v, want by %v", took, ttl)
		}
	})
	t.Run("silent for half a ttl", func(t *testing.T) {
		t.Parallel()
		const ttl = 24 * time.Second // a quarter of it is for a machine that stands still
		err := run(t, ttl, func(p *proxy) {
			time.AfterFunc(ttl/4, func() { p.set(hold, hold) })
			time.AfterFunc(ttl*3/4, func() { p.set(pass, pass) })
		}, func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(ttl + ttl/4): // past the end of a lease that was not renewed
				return nil
			}
		})
		if err != nil {
			t.Errorf("error %v, want none: half a ttl is no loss", err)
		}
	})
	t.Run("reset again and again", func(t *testing.T) {
		t.Parallel()
		err := run(t, ttl, func(p *proxy) {
			go func() {
				for range 20 {
					time.Sleep(ttl / 10)
					p.breakAll()
				}
			}()
		}, func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(2 * ttl):
				return nil
			}
		})
		if err != nil {
			t.Errorf("error %v, want none: connections that break are made again", err)
		}
	})
}

// A hook of the client that ends its goroutine must not hang the caller.
func TestHookThatEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	client.AddHook(exits{})
	store := newStore(t, client, redisstore.Options{})
	if _, err := store.Acquire(t.Context(), random(""), "me", time.Minute); err == nil {
		t.Error("no error from a call that had no result")
	}
}

type exits struct{ sendTwice }

func (exits) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error {
		runtime.Goexit()
		return nil
	}
}

// A hook of the client that panics is for its caller to recover: on a goroutine of
// the store's it would end the process.
func TestHookThatPanics(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	client.AddHook(panics{})
	store := newStore(t, client, redisstore.Options{})
	defer func() {
		if err, ok := recover().(error); !ok || !errors.Is(err, errHook) {
			t.Errorf("recovered %v, want %v", err, errHook)
		}
	}()
	grant, err := store.Acquire(t.Context(), random(""), "me", time.Minute)
	t.Errorf("got %+v, %v, want a panic", grant, err)
}

var errHook = errors.New("this hook panics")

type panics struct{ sendTwice }

func (panics) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(context.Context, redis.Cmder) error { panic(errHook) }
}
