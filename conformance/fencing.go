package conformance

import (
	"fmt"
	"sync"
	"time"

	"github.com/leasekit/leasekit/core"
)

const growing = "Tokens of one key strictly increase while its record lives: across release, expiry, successors, restarts of clients and of a server that keeps its data."

func fencingRules() []Rule {
	return group("Fencing", Rule{
		Name:     "TokenGrowsAfterRelease",
		Sentence: growing,
		Busy:     true,
		Check:    checkTokenGrowsAfterRelease,
	}, Rule{
		Name:     "TokenGrowsAfterExpiry",
		Sentence: growing,
		Check:    checkTokenGrowsAfterExpiry,
	}, Rule{
		Name:     "TokenGrowsAfterRenewal",
		Sentence: "Renewal keeps the token, and the next acquisition's is greater.",
		Check:    checkTokenGrowsAfterRenewal,
	}, Rule{
		Name:     "RenewKeepsToken",
		Sentence: "Renewal keeps the token, and a stranger's Renew, a refused try or Release do not change it either.",
		Needs:    needsCapability[core.Inspector]("Inspector"),
		Check:    checkRenewKeepsToken,
	}, Rule{
		Name:     "TokensGrowUnderContention",
		Sentence: growing + " The token is drawn when the lease is granted, not before.",
		Busy:     true,
		Check:    checkTokensGrowUnderContention,
	}, Rule{
		Name:     "TokenSurvivesReopen",
		Sentence: growing,
		Check:    checkTokenSurvivesReopen,
	}, Rule{
		Name:     "TokenSurvivesRestart",
		Sentence: growing,
		Needs:    needs("Restart", func(c *Config) bool { return c.Restart != nil }),
		Alone:    true,
		Last:     true,
		Check:    checkTokenSurvivesRestart,
	}, Rule{
		Name:     "TokenSurvivesDataLoss",
		Sentence: "Once the record is gone (purged, or lost by the server) tokens go on growing as long as the clock that grants is past the time of the last grant.",
		Needs:    needs("Flush", func(c *Config) bool { return c.Flush != nil }),
		Alone:    true,
		Last:     true,
		Check:    checkTokenSurvivesDataLoss,
	}, Rule{
		Name:     "TokenSurvivesPurge",
		Sentence: "Once the record is gone (purged, or lost by the server) tokens go on growing as long as the clock that grants is past the time of the last grant.",
		Needs:    needs("OpenRetention", func(c *Config) bool { return c.OpenRetention != nil }),
		Check:    checkTokenSurvivesPurge,
	}, Rule{
		Name:     "TokenFitsJSON",
		Sentence: "Tokens are > 0 and < 2^53.",
		Check:    checkTokenFitsJSON,
	})
}

// tokens checks that the tokens of one key grow.
type tokens struct {
	t    *T
	last int64
}

func (s *tokens) next(token int64, after string) {
	if token <= s.last {
		s.t.Broken(fmt.Sprintf("token %d after %d, %s", token, s.last, after), "a greater one")
	}
	s.last = token
}

func checkTokenGrowsAfterRelease(t *T) {
	clients := openSome(t, 3)
	key, tokens := t.Key(), tokens{t: t}
	for i := range 30 {
		lease := t.Acquire(clients[i%3], key, t.Long())
		tokens.next(lease.Token, "when the lease before had been released")
		lease.MustRelease()
	}
}

func checkTokenGrowsAfterExpiry(t *T) {
	clients := openSome(t, 3)
	lease, tokens := t.Acquire(clients[0], t.Key(), t.TTL()), tokens{t: t}
	tokens.next(lease.Token, "of a new key")
	for i := range 2 {
		lease = t.successor(lease, clients[i+1], 0)
		tokens.next(lease.Token, "when the lease before had ended by itself")
	}
	lease.MustRelease()
	tokens.next(t.Acquire(clients[0], lease.Key, t.TTL()).Token, "when one lease had ended by itself and the next had been released")
}

func checkTokenGrowsAfterRenewal(t *T) {
	a, b := t.Open(), t.Open()
	key, tokens := t.Key(), tokens{t: t}
	for range 5 {
		lease := t.Acquire(a, key, t.Long())
		tokens.next(lease.Token, "when the lease before had been renewed and released")
		for range 3 {
			lease.MustRenew(t.Long())
		}
		lease.MustRelease()
		lease = t.Acquire(b, key, t.Long())
		tokens.next(lease.Token, "when the lease before had been renewed and released")
		lease.MustRelease()
	}
}

func checkRenewKeepsToken(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"the acquisition", func() {}},
		{"a renewal", func() { lease.MustRenew(t.Long()) }},
		{"a stranger's renewal", func() { t.MustNotRenew(b, lease.Key, t.Owner(), t.Long(), "a stranger") }},
		{"a refused try", func() { lease.MustBeHeld(b) }},
		{"a stranger's release", func() { t.MustRelease(b, lease.Key, t.Owner()) }},
	} {
		step.do()
		if token := t.tokenOf(b, lease.Key); token != lease.Token {
			t.Broken(fmt.Sprintf("token %d after %s, %d was granted", token, step.name, lease.Token), "the same")
		}
	}
	lease.MustRelease()
}

// tokenOf returns the token of the live lease on key, as an operator sees it.
func (t *T) tokenOf(store core.LockStore, key string) int64 {
	for info, err := range capability[core.Inspector](t, store).Leases(t.Context(), core.LeaseQuery{Key: key}) {
		if err != nil {
			t.Broken(fmt.Sprintf("Leases returned the error %q", err), "the lease")
		}
		return info.Token
	}
	t.Broken("Leases shows no lease", "the one that is held")
	return 0
}

func checkTokensGrowUnderContention(t *T) {
	clients := openSome(t, 4)
	key, tokens := t.Key(), tokens{t: t}
	var mu sync.Mutex
	acquired := 0
	enough := t.Deadline(30 * time.Second)
	t.Go(8, func(i int) {
		store := clients[i%len(clients)]
		for try := range 2000 {
			grant := t.Try(store, key, t.Owner(), t.Long())
			done := func() bool {
				mu.Lock()
				defer mu.Unlock()
				if grant.Acquired {
					// Nobody else is between Acquire and Release: the order
					// here is the order of the grants.
					acquired++
					tokens.next(grant.Token, "with 8 contenders, each of which holds the key for a moment")
				}
				return acquired >= 200 || enough()
			}()
			if grant.Acquired {
				t.MustRelease(store, key, grant.Owner)
			}
			if done {
				return
			}
			if !grant.Acquired && try%8 == 7 {
				t.Sleep(time.Millisecond) // let the holder have the core
			}
		}
	})
	if acquired == 0 {
		t.Broken("8 contenders never acquired the key", "one after the other")
	}
}

func checkTokenSurvivesReopen(t *T) {
	key, tokens := t.Key(), tokens{t: t}
	for range 4 {
		store, closeStore := t.OpenClosable()
		lease := t.Acquire(store, key, t.Long())
		tokens.next(lease.Token, "when the client had been closed and opened again")
		lease.MustRelease()
		closeStore()
	}
}

func checkTokenSurvivesRestart(t *T) {
	a, b := t.Open(), t.Open()
	key, tokens := t.Key(), tokens{t: t}
	for range 2 {
		lease := t.Acquire(a, key, t.Long())
		tokens.next(lease.Token, "when the server had been restarted")
		lease.MustRelease()
		t.Config.Restart(t.rec)
		for _, store := range []core.LockStore{a, b} {
			t.reconnect(store)
		}
		lease = t.Acquire(b, key, t.Long())
		tokens.next(lease.Token, "when the server had been restarted")
		lease.MustRelease()
	}
}

func checkTokenSurvivesDataLoss(t *T) {
	a, b := t.Open(), t.Open()
	key, tokens := t.Key(), tokens{t: t}
	for range 3 {
		for _, store := range []core.LockStore{a, b} {
			lease := t.Acquire(store, key, t.Long())
			tokens.next(lease.Token, "when the server had lost its data")
			lease.MustRelease()
		}
		t.Config.Flush(t.rec)
		t.reconnect(a)
		t.reconnect(b)
	}
	t.Acquire(t.Open(), key, t.Long()).MustRelease()
}

func checkTokenSurvivesPurge(t *T) {
	const retention = 10 * time.Millisecond
	store, records := t.Config.OpenRetention(t.rec, retention)
	key, tokens := t.Key(), tokens{t: t}
	for round := range 3 {
		// Many acquisitions in a row would drive a token that is last + 1
		// away from a clock, or a counter past it.
		for range 20 {
			lease := t.Acquire(store, key, t.TTL())
			tokens.next(lease.Token, fmt.Sprintf("when the record may have been purged %d times", round))
			lease.MustRelease()
		}
		if !purge(t, store, records, retention, 1) {
			t.Fatal("the record was not purged, see StateIsBounded")
		}
	}
}

func checkTokenFitsJSON(t *T) {
	store, key := t.Open(), t.Key()
	for range 10 {
		lease := t.Acquire(store, key, t.Long())
		if lease.Token <= 0 || lease.Token >= 1<<53 {
			t.Broken(fmt.Sprintf("token %d", lease.Token), "more than 0 and less than 2^53")
		}
		lease.MustRelease()
	}
}
