package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

func TestNew(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer cluster.Close()
	failover := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "m", SentinelAddrs: []string{"127.0.0.1:1"}})
	defer failover.Close()
	var none *redis.Client

	for _, test := range []struct {
		name   string
		client redis.UniversalClient
		o      redisstore.Options
		want   string // part of the error, "" for none
	}{
		{"client", client, redisstore.Options{}, ""},
		{"cluster", cluster, redisstore.Options{Prefix: "{locks}:", Retention: time.Minute}, ""},
		{"failover", failover, redisstore.Options{}, ""},
		{"short retention", client, redisstore.Options{Retention: 1}, ""},
		{"nil", nil, redisstore.Options{}, "no client"},
		{"typed nil", none, redisstore.Options{}, "no client"},
		{"ring", ring, redisstore.Options{}, "both grant"},
		{"wrapped ring", struct{ *redis.Ring }{ring}, redisstore.Options{}, "both grant"},
		{"ring in an interface", &struct{ redis.UniversalClient }{struct{ redis.UniversalClient }{ring}}, redisstore.Options{}, "both grant"},
		{"nothing in an interface", struct{ redis.UniversalClient }{}, redisstore.Options{Retention: -1}, "retention"},
		{"negative retention", client, redisstore.Options{Retention: -1}, "retention -1ns"},
	} {
		t.Run(test.name, func(t *testing.T) {
			store, err := redisstore.New(test.client, test.o)
			if test.want == "" {
				if err != nil || store == nil {
					t.Fatalf("New: %v, %v, want a store", store, err)
				}
				if err := store.Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
				return
			}
			if !errors.Is(err, core.ErrInvalid) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("New: error %v, want one that matches core.ErrInvalid and contains %q", err, test.want)
			}
			if store != nil {
				t.Errorf("New: %v beside an error", store)
			}
		})
	}
}

// record reads what the server keeps for a key.
func record(t *testing.T, client *redis.Client, name string) map[string]string {
	t.Helper()
	fields, err := client.HGetAll(t.Context(), name).Result()
	must(t, err)
	return fields
}

func number(t *testing.T, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	must(t, err)
	return n
}

// keptFor returns how long the record outlives a moment of the server's clock.
func keptFor(t *testing.T, client *redis.Client, name string, since int64) time.Duration {
	t.Helper()
	at, err := client.Do(t.Context(), "PEXPIRETIME", name).Int64()
	must(t, err)
	if at <= 0 {
		t.Fatalf("PEXPIRETIME %s: %d, want a time", name, at)
	}
	return time.Duration(at)*time.Millisecond - time.Duration(since)*time.Microsecond
}

// The layout is API: processes of two versions exclude each other by it.
func TestRecord(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	const retention = 10 * time.Minute
	for _, prefix := range []string{"", "app:", "{app}:", "a b\n{"} {
		for _, key := range []string{"plain", "{tag}", "a{b}c", "}{", "{}", "é/%:\"'\n", strings.Repeat("k", core.MaxKeyLen)} {
			key += random("")[:4]
			key = key[max(0, len(key)-core.MaxKeyLen):]
			store := newStore(t, client, redisstore.Options{Prefix: prefix, Retention: retention})
			if prefix == "" {
				prefix = redisstore.DefaultPrefix
			}
			name := prefix + key
			grant, err := store.Acquire(t.Context(), key, "me", 1500*time.Microsecond+time.Hour)
			must(t, err)

			got := record(t, client, name)
			if fields := slices.Sorted(maps.Keys(got)); !slices.Equal(fields, []string{"nonce", "owner", "token", "until"}) {
				t.Fatalf("%q has the fields %q", name, fields)
			}
			if got["owner"] != "me" || number(t, got["token"]) != grant.Token {
				t.Errorf("%q has owner %q and token %s, want me and %d", name, got["owner"], got["token"], grant.Token)
			}
			until := number(t, got["until"])
			if lease := until - grant.Token; lease != 3_600_001_500 {
				t.Errorf("%q ends %d µs after its token, want the ttl", name, lease)
			}
			if kept := keptFor(t, client, name, until); kept < retention || kept > retention+time.Millisecond {
				t.Errorf("%q is kept for %v after the lease, want %v", name, kept, retention)
			}

			if renewed, err := store.Renew(t.Context(), key, "me", 2*time.Hour); err != nil || !renewed {
				t.Fatalf("Renew: %v, %v", renewed, err)
			}
			got = record(t, client, name)
			if number(t, got["until"]) <= until || number(t, got["token"]) != grant.Token {
				t.Errorf("%q after Renew: %v", name, got)
			}
			if kept := keptFor(t, client, name, number(t, got["until"])); kept < retention || kept > retention+time.Millisecond {
				t.Errorf("%q is kept for %v after the renewed lease, want %v", name, kept, retention)
			}

			must(t, store.Release(t.Context(), key, "me"))
			got = record(t, client, name)
			if got["until"] != "0" || number(t, got["token"]) != grant.Token {
				t.Errorf("%q after Release: %v, want until 0 and the token", name, got)
			}
			if kept := client.PTTL(t.Context(), name).Val(); kept <= retention-time.Minute || kept > retention+time.Millisecond {
				t.Errorf("%q is kept for %v after Release, want %v", name, kept, retention)
			}
		}
	}
}

// A release much earlier than the lease's end must not keep the record for the
// time of the lease; one that saves little is not worth a call.
func TestReleaseShortensRetention(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	for _, test := range []struct {
		ttl, retention, most time.Duration
	}{
		{30 * time.Second, time.Hour, time.Hour + 30*time.Second},
		{time.Hour, time.Hour, time.Hour},
		{time.Hour, time.Second, time.Second},
		{time.Second, time.Millisecond, time.Millisecond},
	} {
		store := newStore(t, client, redisstore.Options{Retention: test.retention})
		key := random("retention-")
		_, err := store.Acquire(t.Context(), key, "me", test.ttl)
		must(t, err)
		must(t, store.Release(t.Context(), key, "me"))
		if kept := client.PTTL(t.Context(), redisstore.DefaultPrefix+key).Val(); kept > test.most+time.Millisecond {
			t.Errorf("ttl %v, retention %v: kept for %v, want at most %v", test.ttl, test.retention, kept, test.most)
		}
	}
}

// After the clock was set back a token is ahead of it. The record must then stay
// until the clock has caught up, whatever Retention says: without it the next
// token would be smaller.
func TestRecordStaysUntilClockPassesToken(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	store := newStore(t, client, redisstore.Options{Retention: time.Millisecond})
	key := random("ahead-")
	name := redisstore.DefaultPrefix + key
	now, err := client.Time(t.Context()).Result()
	must(t, err)
	ahead := now.Add(2 * time.Hour).UnixMicro()
	must(t, client.HSet(t.Context(), name, "owner", "x", "nonce", "x", "token", ahead, "until", 0).Err())

	check := func(after string) {
		t.Helper()
		if kept := keptFor(t, client, name, ahead); kept <= 0 {
			t.Errorf("after %s the record goes %v before the clock reaches its token", after, -kept)
		}
	}
	for i, ttl := range []time.Duration{time.Second, 3 * time.Hour} {
		grant, err := store.Acquire(t.Context(), key, "me", ttl)
		must(t, err)
		if want := ahead + int64(i) + 1; grant.Token != want {
			t.Errorf("token %d, want %d: the last one and 1", grant.Token, want)
		}
		check("Acquire")
		if renewed, err := store.Renew(t.Context(), key, "me", ttl); err != nil || !renewed {
			t.Fatalf("Renew: %v, %v", renewed, err)
		}
		check("Renew")
		must(t, store.Release(t.Context(), key, "me"))
		check("Release")
	}
}

// The clock of the server decides, not the expiry of its key, which an operator
// may remove, nor the one of this machine.
func TestExpiryIsNotTheKeys(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	store := newStore(t, client, redisstore.Options{})
	key := random("persist-")
	name := redisstore.DefaultPrefix + key
	const ttl = 50 * time.Millisecond
	first, err := store.Acquire(t.Context(), key, "a", ttl)
	must(t, err)
	must(t, client.Persist(t.Context(), name).Err())
	for {
		grant, err := store.Acquire(t.Context(), key, "b", time.Minute)
		must(t, err)
		if grant.Acquired {
			if lived := time.Duration(grant.Token-first.Token) * time.Microsecond; lived < ttl {
				t.Errorf("the lease of %v was taken after %v", ttl, lived)
			}
			break
		}
		if grant.Left <= 0 || grant.Left > ttl {
			t.Fatalf("Left %v, want more than 0 and at most %v", grant.Left, ttl)
		}
		time.Sleep(grant.Left)
	}
	if renewed, err := store.Renew(t.Context(), key, "a", time.Minute); err != nil || renewed {
		t.Errorf("Renew of the lease that ended: %v, %v, want false", renewed, err)
	}
	if left := client.PTTL(t.Context(), name).Val(); left < time.Hour {
		t.Errorf("the record is kept for %v, want the lease and an hour", left)
	}
}

// foreign values of every type that Redis has, and hashes that look like ours.
var foreign = []struct {
	name, kind string
	put        func(ctx context.Context, c *redis.Client, name string) error
}{
	{"string", "string", func(ctx context.Context, c *redis.Client, name string) error {
		return c.Set(ctx, name, "nobody's", 0).Err()
	}},
	{"list", "list", func(ctx context.Context, c *redis.Client, name string) error {
		return c.RPush(ctx, name, "a", "b").Err()
	}},
	{"set", "set", func(ctx context.Context, c *redis.Client, name string) error {
		return c.SAdd(ctx, name, "owner", "token").Err()
	}},
	{"sorted set", "zset", func(ctx context.Context, c *redis.Client, name string) error {
		return c.ZAdd(ctx, name, redis.Z{Score: 1, Member: "owner"}).Err()
	}},
	{"stream", "stream", func(ctx context.Context, c *redis.Client, name string) error {
		return c.XAdd(ctx, &redis.XAddArgs{Stream: name, Values: []string{"owner", "x"}}).Err()
	}},
	{"hyperloglog", "string", func(ctx context.Context, c *redis.Client, name string) error {
		return c.PFAdd(ctx, name, "a").Err()
	}},
	{"other hash", "hash", hash("user", "7")},
	{"hash with an owner", "hash", hash("owner", "me")},
	{"hash with a token", "hash", hash("token", "17")},
	{"hash without an end", "hash", hash("owner", "me", "nonce", "n", "token", "17")},
	{"hash without an owner", "hash", hash("nonce", "n", "token", "17", "until", "0")},
	{"session token", "hash", hash("owner", "me", "nonce", "n", "token", "eyJhbGciOi", "until", "0")},
	{"token 0", "hash", hash("owner", "me", "nonce", "n", "token", "0", "until", "0")},
	{"negative token", "hash", hash("owner", "me", "nonce", "n", "token", "-5", "until", "0")},
	{"fraction", "hash", hash("owner", "me", "nonce", "n", "token", "1.5", "until", "0")},
	{"token of 2^53", "hash", hash("owner", "me", "nonce", "n", "token", "9007199254740992", "until", "0")},
	{"token not a number", "hash", hash("owner", "me", "nonce", "n", "token", "nan", "until", "0")},
	{"end not a number", "hash", hash("owner", "me", "nonce", "n", "token", "17", "until", "tomorrow")},
	{"end nan", "hash", hash("owner", "me", "nonce", "n", "token", "17", "until", "nan")},
	{"end inf", "hash", hash("owner", "me", "nonce", "n", "token", "17", "until", "inf")},
	{"negative end", "hash", hash("owner", "me", "nonce", "n", "token", "17", "until", "-1")},
}

func hash(fields ...string) func(ctx context.Context, c *redis.Client, name string) error {
	return func(ctx context.Context, c *redis.Client, name string) error { return c.HSet(ctx, name, fields).Err() }
}

func TestForeignValues(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	store := newStore(t, client, redisstore.Options{})
	for _, test := range foreign {
		t.Run(test.name, func(t *testing.T) {
			key := random("foreign-")
			name := redisstore.DefaultPrefix + key
			must(t, test.put(t.Context(), client, name))
			before := client.Dump(t.Context(), name).Val()

			_, acquireErr := store.Acquire(t.Context(), key, "me", time.Minute)
			_, renewErr := store.Renew(t.Context(), key, "me", time.Minute)
			for call, err := range map[string]error{
				"Acquire": acquireErr,
				"Renew":   renewErr,
				"Release": store.Release(t.Context(), key, "me"),
			} {
				if err == nil || !strings.Contains(err.Error(), strconv.Quote(name)) || !strings.Contains(err.Error(), " a "+test.kind+" ") {
					t.Errorf("%s: error %v, want one that names %q and its type, %s", call, err, name, test.kind)
				}
			}
			if after := client.Dump(t.Context(), name).Val(); after != before {
				t.Errorf("the value was changed from %q to %q", before, after)
			}
			if left := client.PTTL(t.Context(), name).Val(); left != -1 {
				t.Errorf("the value expires in %v, it did not before", left)
			}
		})
	}
}

// Whatever makes the server refuse, each method returns what it said, and
// changes nothing.
func TestRefusals(t *testing.T) {
	server := testserver.StartRedis(t)
	want := map[string]string{
		"DemotedMaster":  "READONLY",
		"OutOfMemory":    "OOM",
		"TooFewReplicas": "NOREPLICAS",
		"NoPermission":   "NOPERM",
		"NoPassword":     "NOAUTH",
		"FullDisk":       "MISCONF",
	}
	for _, refusal := range refusals(server) {
		t.Run(refusal.Name, func(t *testing.T) {
			well := newWarmStore(t, server.Addr)
			held, free := random("held-"), random("free-")
			grant, err := well.Acquire(t.Context(), held, "me", time.Hour)
			must(t, err)

			store, end := refusal.Begin(t)
			ended := false
			finish := func() {
				if !ended {
					ended = true
					end()
				}
			}
			defer finish()
			errs := map[string]error{}
			_, errs["Acquire"] = store.Acquire(t.Context(), free, "me", time.Hour)
			_, errs["Acquire of a held key"] = store.Acquire(t.Context(), held, "other", time.Hour)
			renewed, err := store.Renew(t.Context(), held, "me", time.Hour)
			errs["Renew"] = err
			_, errs["Renew of a stranger"] = store.Renew(t.Context(), held, "other", time.Hour)
			errs["Release of a stranger"] = store.Release(t.Context(), held, "other")
			errs["Release of a free key"] = store.Release(t.Context(), free, "other")
			errs["Release"] = store.Release(t.Context(), held, "me")
			finish()

			full := refusal.Name == "OutOfMemory"
			for call, err := range errs {
				if full && !strings.HasPrefix(call, "Acquire") {
					// Neither adds anything, and a holder must not lose its
					// lease because others filled the server.
					if err != nil {
						t.Errorf("%s with a full memory: %v", call, err)
					}
					continue
				}
				var reply redis.Error
				if err == nil || !errors.As(err, &reply) || !strings.Contains(err.Error(), want[refusal.Name]) {
					t.Errorf("%s: error %v, want the server's %s", call, err, want[refusal.Name])
				}
			}
			if full != renewed {
				t.Errorf("Renew: %v, want %v", renewed, full)
			}
			got := record(t, connect(t, server.Addr, nil), redisstore.DefaultPrefix+held)
			if released := got["until"] == "0"; released != full || number(t, got["token"]) != grant.Token {
				t.Errorf("record %v, want released %v and token %d", got, full, grant.Token)
			}
		})
	}
}

// SCRIPT FLUSH, FLUSHALL and a restart in the middle of a hold and between
// acquisitions: no call fails for it, and tokens grow all the same.
func TestTokensSurvive(t *testing.T) {
	server := testserver.StartRedis(t) // without persistence
	client := connect(t, server.Addr, nil)
	store := newStore(t, client, redisstore.Options{})
	ctx := t.Context()

	accidents := []struct {
		name string
		// lost tells that the lease is gone: then it may be granted again, and
		// the token alone protects.
		lost   bool
		happen func()
	}{
		{"nothing", false, func() {}},
		{"SCRIPT FLUSH", false, func() { must(t, client.ScriptFlush(ctx).Err()) }},
		{"FLUSHALL", true, func() { must(t, client.FlushAll(ctx).Err()) }},
		{"restart without persistence", true, func() { server.Kill(t); server.Start(t) }},
		{"FUNCTION FLUSH", false, func() { must(t, client.FunctionFlush(ctx).Err()) }},
		{"eviction", true, func() { must(t, client.Del(ctx, redisstore.DefaultPrefix+"k").Err()) }},
	}
	for _, accident := range accidents {
		before, err := store.Acquire(ctx, "k", "before", time.Minute)
		must(t, err)
		must(t, store.Release(ctx, "k", "before"))
		accident.happen()
		middle, err := store.Acquire(ctx, "k", "middle", time.Minute)
		must(t, err)
		accident.happen()
		renewed, err := store.Renew(ctx, "k", "middle", time.Minute)
		must(t, err)
		if renewed == accident.lost {
			t.Errorf("%s: Renew is %v in the middle of a hold", accident.name, renewed)
		}
		accident.happen()
		must(t, store.Release(ctx, "k", "middle"))
		after, err := store.Acquire(ctx, "k", "after", time.Minute)
		must(t, err)
		must(t, store.Release(ctx, "k", "after"))
		t.Logf("%s: tokens %d, %d, %d", accident.name, before.Token, middle.Token, after.Token)
		if before.Token <= 0 || middle.Token <= before.Token || after.Token <= middle.Token {
			t.Errorf("%s: tokens %d, %d, %d, want them to grow", accident.name, before.Token, middle.Token, after.Token)
		}
	}
}

// A server that has never seen the scripts gets them from each method.
func TestScriptsAreSentWhenUnknown(t *testing.T) {
	server := testserver.StartRedis(t)
	client := connect(t, server.Addr, nil)
	store := newStore(t, client, redisstore.Options{})
	forget := func() { must(t, client.ScriptFlush(t.Context()).Err()) }

	forget()
	if grant, err := store.Acquire(t.Context(), "k", "me", time.Minute); err != nil || !grant.Acquired {
		t.Fatalf("Acquire: %+v, %v", grant, err)
	}
	forget()
	if renewed, err := store.Renew(t.Context(), "k", "me", time.Minute); err != nil || !renewed {
		t.Errorf("Renew: %v, %v", renewed, err)
	}
	forget()
	must(t, store.Release(t.Context(), "k", "me"))
	if n := info(t, client, "memory", "number_of_cached_scripts"); n != 1 {
		t.Errorf("%d scripts cached, want Release's: EVAL caches too", n)
	}
	// From then on one command a call.
	calls := func() int64 { return info(t, client, "stats", "total_commands_processed") }
	must(t, store.Release(t.Context(), "k", "me"))
	before := calls()
	must(t, store.Release(t.Context(), "k", "me"))
	if n := calls() - before; n > 12 { // EVALSHA, what it calls, INFO
		t.Errorf("%d commands for a release", n)
	}
}

// Redis 6 takes the first line of the scripts for bad Lua.
func TestServerTooOld(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	client.AddHook(asRedis6{})
	store := newStore(t, client, redisstore.Options{})
	_, err := store.Acquire(t.Context(), random(""), "me", time.Minute)
	if err == nil || !strings.Contains(err.Error(), "Redis 7.0") {
		t.Errorf("error %v, want one that names the oldest server that will do", err)
	}
}

// asRedis6 lets the server see "#!lua" on the second line, where it means as
// little as it does to Redis 6: the error is the same.
type asRedis6 struct{ sendTwice }

func (asRedis6) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		switch args := cmd.Args(); cmd.Name() {
		case "evalsha":
			args[1] = strings.Repeat("0", 40)
		case "eval":
			args[1] = "\n" + fmt.Sprint(args[1])
		}
		return next(ctx, cmd)
	}
}

// The rights that docs/stores.md names are enough, and none is too many.
func TestLeastRights(t *testing.T) {
	server := testserver.StartRedis(t)
	admin := connect(t, server.Addr, nil)
	rights := map[string][]any{
		"lock": {"~leasekit:*", "+evalsha", "+eval", "+hmget", "+hset", "+exists", "+type", "+time", "+pexpireat"},
		"wait": {"&leasekit:*", "+spublish", "+ssubscribe", "+sunsubscribe", "+ping"},
		"list": {"+scan", "+script|load"},
	}
	as := func(user string, rules ...[]any) *redisstore.Store {
		args := []any{"ACL", "SETUSER", user, "on", ">secret", "resetchannels"}
		must(t, admin.Do(t.Context(), append(args, slices.Concat(rules...)...)...).Err())
		client := connect(t, server.Addr, func(o *redis.Options) { o.Username, o.Password = user, "secret" })
		return newStore(t, client, redisstore.Options{Logger: quiet})
	}
	lock := func(store *redisstore.Store) error {
		if _, err := store.Acquire(t.Context(), "k", "me", time.Minute); err != nil {
			return err
		}
		if _, err := store.Renew(t.Context(), "k", "me", time.Minute); err != nil {
			return err
		}
		return store.Release(t.Context(), "k", "me")
	}
	all := as("all", rights["lock"], rights["wait"], rights["list"])
	signals, _ := subscribe(t, all, "k")
	must(t, lock(all))
	mustSignal(t, signals)
	if _, err := all.Acquire(t.Context(), "k", "me", time.Minute); err != nil {
		t.Error(err)
	}
	must(t, admin.ScriptFlush(t.Context()).Err())
	if got := leases(t, all, core.LeaseQuery{}); len(got) != 1 {
		t.Errorf("%d leases listed, want 1", len(got))
	}
	if _, broken, err := all.Break(t.Context(), "k"); err != nil || !broken {
		t.Errorf("Break: %v, %v", broken, err)
	}
	must(t, lock(as("locks", rights["lock"])))
	must(t, admin.Set(t.Context(), "leasekit:foreign", "x", 0).Err())
	if err := as("locks", rights["lock"]).Release(t.Context(), "foreign", "me"); err == nil || !strings.Contains(err.Error(), "a string") {
		t.Errorf("a foreign value: error %v, want one that names its type", err)
	}

	// Each is needed by something of this; EXISTS by the first Acquire of a key.
	for i, right := range rights["lock"] {
		if right == "+type" {
			continue // for the error about a foreign value only
		}
		must(t, admin.FlushAll(t.Context()).Err())
		must(t, admin.ScriptFlush(t.Context()).Err())
		user := fmt.Sprint("without-", i)
		if err := lock(as(user, slices.DeleteFunc(slices.Clone(rights["lock"]), func(r any) bool { return r == right }))); err == nil {
			t.Errorf("without %v: no error", right)
		}
	}
}
