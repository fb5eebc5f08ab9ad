package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// leases reads a whole sequence, in the order of keys.
func leases(t testing.TB, store *redisstore.Store, q core.LeaseQuery) []core.LeaseInfo {
	t.Helper()
	var all []core.LeaseInfo
	for lease, err := range store.Leases(t.Context(), q) {
		must(t, err)
		all = append(all, lease)
	}
	slices.SortFunc(all, func(a, b core.LeaseInfo) int { return strings.Compare(a.Key, b.Key) })
	return all
}

func keysOf(all []core.LeaseInfo) []string {
	var keys []string
	for _, lease := range all {
		keys = append(keys, lease.Key)
	}
	return keys
}

func testLeases(t *testing.T, client redis.UniversalClient) {
	prefix := random("in[s]p*e?c\\t-") + ":"
	store := newStore(t, client, redisstore.Options{Prefix: prefix})
	// Neighbours that a careless pattern would find.
	for _, other := range []string{"", strings.ReplaceAll(prefix, "*", "xx"), strings.ReplaceAll(prefix, "?", "y"), strings.ReplaceAll(prefix, "[s]", "s")} {
		if other != prefix {
			neighbour := newStore(t, client, redisstore.Options{Prefix: other})
			_, err := neighbour.Acquire(t.Context(), random("a/"), "me", time.Minute)
			must(t, err)
		}
	}
	tokens := map[string]int64{}
	for i := range 1500 { // several pages
		key := fmt.Sprintf("a/%d", i)
		if i%3 == 0 {
			key = fmt.Sprintf("b*[%d]{é}", i)
		}
		grant, err := store.Acquire(t.Context(), key, "host:17/"+strings.Repeat("0f", 16), time.Hour)
		must(t, err)
		tokens[key] = grant.Token
	}
	for _, key := range []string{"a/released", "a/expired"} {
		_, err := store.Acquire(t.Context(), key, "me", time.Millisecond)
		must(t, err)
	}
	must(t, store.Release(t.Context(), "a/released", "me"))
	must(t, client.Set(t.Context(), prefix+"a/foreign", "x", 0).Err())
	must(t, client.HSet(t.Context(), prefix+"a/foreign hash", "token", "x").Err())
	must(t, client.HSet(t.Context(), prefix+"\xff", "owner", "x", "nonce", "x", "token", 1, "until", "9999999999999999").Err())
	time.Sleep(2 * time.Millisecond)

	all := leases(t, store, core.LeaseQuery{})
	if got, want := keysOf(all), slices.Sorted(maps.Keys(tokens)); !slices.Equal(got, want) {
		t.Fatalf("%d leases, want %d: %.300q", len(got), len(want), got)
	}
	for _, lease := range all {
		if lease.Token != tokens[lease.Key] || lease.Label != "host:17" || lease.Left <= 0 || lease.Left > time.Hour {
			t.Fatalf("%+v, want token %d, label host:17 and at most an hour", lease, tokens[lease.Key])
		}
	}
	for _, part := range []string{"a/", "b*[", "b*[0]{é}", "b", "c"} {
		var want []string
		for key := range tokens {
			if strings.HasPrefix(key, part) {
				want = append(want, key)
			}
		}
		slices.Sort(want)
		if got := keysOf(leases(t, store, core.LeaseQuery{Prefix: part})); !slices.Equal(got, want) {
			t.Errorf("prefix %q: %d leases, want %d", part, len(got), len(want))
		}
	}
	if got := leases(t, store, core.LeaseQuery{Key: "a/1"}); len(got) != 1 || got[0].Token != tokens["a/1"] {
		t.Errorf("key a/1: %+v, want its lease", got)
	}
	for _, key := range []string{"a/released", "a/expired", "never"} {
		if got := leases(t, store, core.LeaseQuery{Key: key}); len(got) != 0 {
			t.Errorf("key %s: %+v, want nothing", key, got)
		}
	}
	for _, err := range store.Leases(t.Context(), core.LeaseQuery{Key: "a/foreign"}) {
		if err == nil || !strings.Contains(err.Error(), "a string") {
			t.Errorf("a foreign value: error %v, want one that names its type", err)
		}
	}
	n := 0
	for range store.Leases(t.Context(), core.LeaseQuery{}) {
		if n++; n == 3 {
			break
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, q := range []core.LeaseQuery{{}, {Key: "a/1"}} {
		for _, err := range store.Leases(ended, q) {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%+v with a context that has ended: %v", q, err)
			}
		}
	}
	for _, err := range store.Leases(t.Context(), core.LeaseQuery{Key: "a", Prefix: "b"}) {
		if !errors.Is(err, core.ErrInvalid) {
			t.Errorf("key and prefix: error %v, want core.ErrInvalid", err)
		}
	}
}

func TestLeases(t *testing.T) {
	t.Parallel()
	testLeases(t, connect(t, testserver.Redis(t).Addr, nil))
}

// go-redis sends a Break again whose reply was lost. Somebody has the key by then.
func TestBreakDeliveredTwiceSparesTheNextLease(t *testing.T) {
	addr := testserver.Redis(t).Addr
	other, key := newStore(t, connect(t, addr, nil), redisstore.Options{}), random("break-")
	first, err := other.Acquire(t.Context(), key, "label/\n 1", time.Minute)
	must(t, err)
	client := connect(t, addr, nil)
	store := newStore(t, client, redisstore.Options{})
	acquired := false
	client.AddHook(sendTwice{between: func() { // not yet after the connection's greetings
		g, err := other.Acquire(t.Context(), key, "next", time.Minute)
		must(t, err)
		acquired = acquired || g.Acquired
	}})
	was, broken, err := store.Break(t.Context(), key)
	if err != nil || !broken || !acquired || was.Token != first.Token || was.Left <= 0 {
		t.Errorf("Break = %+v, %t, %v; want the lease with token %d; acquired in between: %t", was, broken, err, first.Token, acquired)
	}
	if renewed, err := other.Renew(t.Context(), key, "next", time.Minute); !renewed || err != nil {
		t.Errorf("Renew of the next lease = %t, %v: one Break has ended two", renewed, err)
	}
}

func TestBreak(t *testing.T) {
	t.Parallel()
	client := connect(t, testserver.Redis(t).Addr, nil)
	store := newStore(t, client, redisstore.Options{})
	key := random("break-")
	signals, _ := subscribe(t, store, key)

	if was, broken, err := store.Break(t.Context(), key); err != nil || broken {
		t.Errorf("a key never locked: %+v, %v, %v, want nothing", was, broken, err)
	}
	owner := "host:17/" + strings.Repeat("0f", 16)
	grant, err := store.Acquire(t.Context(), key, owner, time.Hour)
	must(t, err)
	was, broken, err := store.Break(t.Context(), key)
	if err != nil || !broken || was.Key != key || was.Token != grant.Token || was.Label != "host:17" || was.Left <= 0 {
		t.Errorf("Break: %+v, %v, %v", was, broken, err)
	}
	mustSignal(t, signals)
	if renewed, err := store.Renew(t.Context(), key, owner, time.Hour); err != nil || renewed {
		t.Errorf("Renew of a broken lease: %v, %v, want false", renewed, err)
	}
	must(t, store.Release(t.Context(), key, owner))
	if _, broken, err := store.Break(t.Context(), key); err != nil || broken {
		t.Errorf("a second time: %v, %v, want nothing", broken, err)
	}
	next, err := store.Acquire(t.Context(), key, "next", time.Millisecond)
	must(t, err)
	if next.Token <= grant.Token {
		t.Errorf("token %d after %d", next.Token, grant.Token)
	}
	time.Sleep(2 * time.Millisecond)
	if _, broken, err := store.Break(t.Context(), key); err != nil || broken {
		t.Errorf("an expired lease: %v, %v, want nothing", broken, err)
	}
	must(t, client.Set(t.Context(), redisstore.DefaultPrefix+key, "x", 0).Err())
	if _, broken, err := store.Break(t.Context(), key); err == nil || broken {
		t.Errorf("a foreign value: %v, %v, want an error", broken, err)
	}
	if _, _, err := store.Break(t.Context(), ""); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("no key: error %v, want core.ErrInvalid", err)
	}
}
