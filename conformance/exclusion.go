package conformance

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/leasekit/leasekit/core"
)

func exclusionRules() []Rule {
	return group("Exclusion", Rule{
		Name:     "OneWinner",
		Sentence: "No live lease: store the lease, return a new token. Any live lease: not acquired, which is an answer and not an error.",
		Check:    checkOneWinner,
	}, Rule{
		Name:     "NotReentrant",
		Sentence: "Any live lease, also the caller's own: not acquired.",
		Check:    checkNotReentrant,
	}, Rule{
		Name:     "OneWinnerAmongMany",
		Sentence: "64 contenders on a fresh key: one wins, 63 are told no, nobody gets an error.",
		Busy:     true,
		Check:    checkOneWinnerAmongMany,
	}, Rule{
		Name:     "OneWinnerOnUsedKey",
		Sentence: "Each method is one try, atomic for its key against every other client of the backend, also when the key has just been released or its lease has just ended.",
		Busy:     true,
		Check:    checkOneWinnerOnUsedKey,
	}, Rule{
		Name:     "HeldTryChangesNothing",
		Sentence: "A try that is not acquired changes nothing: not the owner of the live lease, not its end.",
		Check:    checkHeldTryChangesNothing,
	}, Rule{
		Name:     "KeysAreIndependent",
		Sentence: "Keys are independent.",
		Busy:     true,
		Check:    checkKeysAreIndependent,
	}, Rule{
		Name:     "ClientClockDoesNotMatter",
		Sentence: "The server's clock decides, never a client's: a client whose clock is wrong by hours neither ends a lease early nor makes it longer.",
		Needs:    needs("OpenSkewed", func(c *Config) bool { return c.OpenSkewed != nil }),
		Check:    checkClientClockDoesNotMatter,
	}, Rule{
		Name:     "LeaseSurvivesRestart",
		Sentence: "A server that keeps its data keeps its leases: after a restart a live lease still excludes others, and is its owner's to renew and to release.",
		Needs:    needs("Restart", func(c *Config) bool { return c.Restart != nil }),
		Alone:    true,
		Last:     true,
		Check:    checkLeaseSurvivesRestart,
	}, Rule{
		Name:     "MutualExclusion",
		Sentence: "While one caller runs under the lock of a key, no other does: a counter that is read, and written a moment later, loses no increment.",
		Busy:     true,
		Check:    checkMutualExclusion,
	}, Rule{
		Name:     "MutualExclusionOfProcesses",
		Sentence: "While one process runs under the lock of a key, no other process does: a counter in a file that is read, and written a moment later, loses no increment.",
		Needs:    needs("Env", func(c *Config) bool { return c.Env != nil }),
		Process:  true,
		Busy:     true,
		Check:    checkMutualExclusionOfProcesses,
	})
}

func checkOneWinner(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.TTL())
	for _, store := range []core.LockStore{a, b} {
		try := t.Try(store, lease.Key, t.Owner(), t.TTL())
		if try.Acquired && lease.Live(try.Answered) {
			t.Broken(fmt.Sprintf("a second owner acquired the key, tokens %d and %d", lease.Token, try.Token), "not acquired")
		}
		if try.Acquired {
			t.Retry("the lease was over before the second try was answered")
		}
		if try.Token != 0 {
			t.Broken(fmt.Sprintf("Token %d of a try that was not acquired", try.Token), "Token 0")
		}
		if longest := lease.TTL + t.Slack(); try.Left < 0 || try.Left > longest {
			t.Broken(fmt.Sprintf("Left %v of a lease of %v", try.Left, lease.TTL),
				fmt.Sprintf("0, or what is left of the lease, at most %v", longest))
		}
	}
}

func checkNotReentrant(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.TTL())
	for _, store := range []core.LockStore{a, b} {
		try := t.Try(store, lease.Key, lease.Owner, t.TTL())
		if try.Acquired && lease.Live(try.Answered) {
			t.Broken("the owner of a live lease acquired the key once more", "not acquired")
		}
		if try.Acquired {
			t.Retry("the lease was over before the second try was answered")
		}
	}
}

// contend lets 64 contenders try key at the same moment, spread over clients,
// and returns the one lease that was won.
func contend(t *T, clients []core.LockStore, key string) *Lease {
	const contenders = 64
	tries := make([]Try, contenders)
	start := make(chan struct{})
	var ready atomic.Int32
	t.Go(contenders, func(i int) {
		owner := t.Owner()
		if ready.Add(1) == contenders {
			close(start)
		}
		<-start
		tries[i] = t.Try(clients[i%len(clients)], key, owner, t.Long())
	})
	var won *Lease
	for i, try := range tries {
		if !try.Acquired {
			continue
		}
		if won != nil {
			t.Broken(fmt.Sprintf("two of %d contenders acquired the key, tokens %d and %d", contenders, won.Token, try.Token), "one")
		}
		won = &Lease{t: t, Store: clients[i%len(clients)], Try: try}
	}
	if won == nil {
		t.Broken(fmt.Sprintf("none of %d contenders acquired a free key", contenders), "one")
	}
	return won
}

func openSome(t *T, n int) []core.LockStore {
	clients := make([]core.LockStore, n)
	for i := range clients {
		clients[i] = t.Open()
	}
	return clients
}

func checkOneWinnerAmongMany(t *T) {
	clients := openSome(t, 4)
	for range 5 {
		contend(t, clients, t.Key()).MustRelease()
	}
}

func checkOneWinnerOnUsedKey(t *T) {
	clients := openSome(t, 4)
	key := t.Key()
	for range 4 {
		contend(t, clients, key).MustRelease()
	}
	// Leases that end without a release leave another kind of record.
	expired := make([]*Lease, 4)
	for i := range expired {
		expired[i] = t.Acquire(clients[i], t.Key(), t.TTL())
	}
	t.SleepUntil(expired[len(expired)-1].NotAfter())
	for _, lease := range expired {
		contend(t, clients, lease.Key).MustRelease()
	}
}

func checkHeldTryChangesNothing(t *T) {
	a, b := t.Open(), t.Open()
	// A short lease asked for must not shorten the live one, a long one not
	// make it longer.
	for _, ttl := range []time.Duration{core.MinTTL, t.Long()} {
		for _, owner := range []string{t.Owner(), ""} {
			lease := t.Acquire(a, t.Key(), t.TTL())
			if owner == "" {
				owner = lease.Owner // NotReentrant: the owner's own try is refused as well
			}
			try := t.Try(b, lease.Key, owner, ttl)
			if try.Acquired {
				if !lease.Live(try.Answered) {
					t.Retry("the lease was over before the second try was answered")
				}
				t.Broken("a try on a held key was acquired", "not acquired")
			}
			lease.MustRenew(t.TTL())
			if t.Try(b, lease.Key, owner, ttl).Acquired {
				t.Retry("the lease was over before the third try was answered")
			}
			t.Successor(lease, b).MustRelease()
		}
	}
}

func checkKeysAreIndependent(t *T) {
	a, b := t.Open(), t.Open()
	owner := t.Owner() // the same for all: a key's lease is found by the key
	leases := make([]*Lease, 20)
	for i := range leases {
		leases[i] = t.AcquireAs(a, t.Key(), owner, t.Long())
	}
	for i, lease := range leases {
		if i%2 == 0 {
			lease.MustRelease()
		}
	}
	for i, lease := range leases {
		if i%2 == 0 {
			t.Acquire(b, lease.Key, t.Long()).MustRelease()
			continue
		}
		lease.MustBeHeld(b)
		lease.MustRenew(t.Long())
		lease.MustRelease()
	}
}

func checkClientClockDoesNotMatter(t *T) {
	a := t.Open()
	for _, skew := range []time.Duration{-3 * time.Hour, 3 * time.Hour} {
		wrong := t.Config.OpenSkewed(t.rec, skew)
		// A lease of a client whose clock is right, seen by one whose clock is
		// wrong, and the other way round.
		t.Successor(t.Acquire(a, t.Key(), t.TTL()), wrong).MustRelease()
		lease := t.Acquire(wrong, t.Key(), t.TTL())
		lease.MustRenewAt(a, t.TTL())
		lease.MustRenewAt(wrong, t.TTL())
		t.Successor(lease, a).MustRelease()
	}
}

func checkLeaseSurvivesRestart(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	t.Config.Restart(t.rec)
	t.reconnect(a)
	t.reconnect(b)
	lease.MustBeHeld(b)
	lease.MustBeHeld(t.Open())
	lease.MustRenew(t.Long())
	lease.MustRelease()
	t.Acquire(b, lease.Key, t.Long()).MustRelease()
}

// reconnect waits until store answers again, after its server was restarted.
func (t *T) reconnect(store core.LockStore) {
	deadline := time.Now().Add(30 * time.Second)
	for {
		// A release of nothing asks the server and changes nothing.
		err := store.Release(t.Context(), t.Key(), t.Owner())
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Broken(fmt.Sprintf("30 s after its server was restarted the client still says %q", err), "an answer")
		}
		t.Sleep(20 * time.Millisecond)
	}
}
