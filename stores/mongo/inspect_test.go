package mongostore_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/leasekit/leasekit/core"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

func list(t testing.TB, s *mongostore.Store, q core.LeaseQuery) []core.LeaseInfo {
	t.Helper()
	var all []core.LeaseInfo
	for info, err := range s.Leases(t.Context(), q) {
		if err != nil {
			t.Fatalf("Leases(%+v): %v", q, err)
		}
		all = append(all, info)
	}
	return all
}

func keys(all []core.LeaseInfo) (keys []string) {
	for _, info := range all {
		keys = append(keys, info.Key)
	}
	return keys
}

func TestLeases(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{Prefix: "p/"})
	other := newStore(t, coll, mongostore.Options{Prefix: "q/"})
	owner := "host:1/" + strings.Repeat("0a", 16)
	// Around the ends of ranges: the last rune before the surrogates, the last
	// of all, capitals, and one key that is the prefix of another.
	all := []string{"A", "a", "a/1", "a/2", "a0", "b", "x\ud7ff", "x\ud7ff!", "x\ue000", "y\U0010ffff", "y\U0010ffff\U0010ffff", "z", "\U0010ffff"}
	tokens := map[string]int64{}
	for _, key := range all {
		tokens[key] = mustAcquire(t, s, key, owner, time.Minute).Token
	}
	mustAcquire(t, s, "released", owner, time.Minute)
	mustRelease(t, s, "released", owner)
	mustAcquire(t, s, "a/expired", owner, time.Millisecond)
	mustAcquire(t, other, "a/elsewhere", owner, time.Minute)
	if _, err := coll.InsertMany(t.Context(), []any{bson.M{"_id": "p/foreign"}, bson.M{"_id": "p/a/foreign", "owner": owner}, bson.M{"_id": 7}}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(5 * time.Millisecond)

	slices.Sort(all)
	for _, q := range []core.LeaseQuery{
		{}, {Prefix: "a"}, {Prefix: "a/"}, {Prefix: "A"}, {Prefix: "x"}, {Prefix: "x\ud7ff"}, {Prefix: "y\U0010ffff"}, {Prefix: "\U0010ffff"}, {Prefix: "none"},
	} {
		want := slices.DeleteFunc(slices.Clone(all), func(key string) bool { return !strings.HasPrefix(key, q.Prefix) })
		if got := keys(list(t, s, q)); !slices.Equal(got, want) {
			t.Errorf("Leases(%+v) returned %q, want %q", q, got, want)
		}
	}
	for key, token := range tokens {
		got := list(t, s, core.LeaseQuery{Key: key})
		if len(got) != 1 || got[0].Key != key || got[0].Token != token || got[0].Label != "host:1" || got[0].Left <= 0 || got[0].Left > time.Minute+time.Millisecond {
			t.Errorf("Leases of key %q returned %+v, want token %d, label host:1 and up to a minute", key, got, token)
		}
	}
	for _, key := range []string{"released", "a/expired", "foreign", "never"} {
		if got := list(t, s, core.LeaseQuery{Key: key}); len(got) != 0 {
			t.Errorf("Leases of key %q returned %+v, want none", key, got)
		}
	}
	for _, err := range s.Leases(t.Context(), core.LeaseQuery{Key: "a", Prefix: "a"}) {
		if err == nil {
			t.Error("a query for both a key and a prefix returned no error")
		}
	}
	// With no prefix at all the whole collection is shown.
	if got := list(t, newStore(t, coll, mongostore.Options{}), core.LeaseQuery{}); len(got) != len(all)+1 {
		t.Errorf("%d leases in the collection, want %d", len(got), len(all)+1)
	}
}

func TestLeasesInPages(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{})
	const n = 1024 // a whole number of pages
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for j := range n / 16 {
				mustAcquire(t, s, fmt.Sprintf("%04d", i*n/16+j), "me", time.Hour)
			}
		})
	}
	wg.Wait()
	got := keys(list(t, s, core.LeaseQuery{}))
	if len(got) != n || !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != n {
		t.Errorf("%d leases, want each of %d once, in order", len(got), n)
	}
	seen := 0
	for _, err := range s.Leases(t.Context(), core.LeaseQuery{}) {
		if err != nil {
			t.Fatal(err)
		}
		if seen++; seen == 300 {
			break
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var last error
	for _, err := range s.Leases(ctx, core.LeaseQuery{}) {
		last = err
	}
	if last == nil {
		t.Error("Leases with a ctx that has ended gave no error")
	}
}

func TestBreak(t *testing.T) {
	coll := newCollection(t)
	s, other := newStore(t, coll, mongostore.Options{}), newStore(t, coll, mongostore.Options{})
	for _, key := range []string{"never", "released", "expired"} {
		switch key {
		case "released":
			mustAcquire(t, s, key, "me", time.Minute)
			mustRelease(t, s, key, "me")
		case "expired":
			mustAcquire(t, s, key, "me", time.Millisecond)
			time.Sleep(5 * time.Millisecond)
		}
		if was, broken, err := s.Break(t.Context(), key); broken || err != nil || was != (core.LeaseInfo{}) {
			t.Errorf("Break of a key that is %s returned %+v, %v, %v, want nothing", key, was, broken, err)
		}
	}
	owner := "host/" + strings.Repeat("ab", 16)
	g := mustAcquire(t, s, "k", owner, time.Minute)
	mustBeHeld(t, other, "k")
	signals, _ := subscribe(t, other, "k")
	was, broken, err := s.Break(t.Context(), "k")
	if !broken || err != nil || was.Key != "k" || was.Token != g.Token || was.Label != "host" || was.Left <= 0 {
		t.Errorf("Break returned %+v, %v, %v, want the lease with token %d", was, broken, err, g.Token)
	}
	mustSignal(t, signals, "broken")
	if ok, err := s.Renew(t.Context(), "k", owner, time.Minute); ok || err != nil {
		t.Errorf("Renew of a broken lease returned %v, %v, want false, nil", ok, err)
	}
	if next := mustAcquire(t, other, "k", "you", time.Minute); next.Token <= g.Token {
		t.Errorf("token %d after %d, want a greater one", next.Token, g.Token)
	}
	mustRelease(t, s, "k", owner)
	mustBeHeld(t, s, "k")
	if _, err := coll.InsertOne(t.Context(), bson.M{"_id": "foreign", "x": 1}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Break(t.Context(), "foreign"); err == nil {
		t.Error("Break of a foreign document returned no error")
	}
}
