package conformance

import (
	"fmt"
	"time"

	"github.com/leasekit/leasekit/core"
)

func stateRules() []Rule {
	retention := needs("OpenRetention", func(c *Config) bool { return c.OpenRetention != nil })
	return group("State", Rule{
		Name:     "StateIsBounded",
		Sentence: "No store keeps anything per key for ever: records of keys that nobody locks any more are gone after the retention and the acquisitions that follow.",
		Needs:    retention,
		Busy:     true,
		Check:    checkStateIsBounded,
	}, Rule{
		Name:     "PurgeSparesLiveLeases",
		Sentence: "Records of keys that nobody locks any more are purged, and no others: a live lease stays, however old.",
		Needs:    retention,
		Check:    checkPurgeSparesLiveLeases,
	}, Rule{
		Name:     "PurgeHidesNoKey",
		Sentence: "No live lease: store the lease, also while the record that the last one left is being purged.",
		Needs:    retention,
		Busy:     true,
		Check:    checkPurgeHidesNoKey,
	}, Rule{
		Name:     "HeldTryIsARead",
		Sentence: "A repeated try on a held key costs the server no durable write.",
		Needs:    needs("Writes", func(c *Config) bool { return c.Writes != nil }),
		Alone:    true,
		Check:    checkHeldTryIsARead,
	})
}

// purge makes acquisitions on one key until the server keeps no more than want
// records, which may take a server with a purge of its own some seconds.
func purge(t *T, store core.LockStore, records func() int, retention time.Duration, want int) bool {
	t.Sleep(retention + t.Slack())
	key := t.Key()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); t.Sleep(20 * time.Millisecond) {
		for range 20 {
			t.Acquire(store, key, t.Long()).MustRelease()
		}
		if records() <= want {
			return true
		}
	}
	return false
}

func checkStateIsBounded(t *T) {
	retention := t.TTL() / 4
	store, records := t.Config.OpenRetention(t.rec, retention)
	const keys = 200
	var last *Lease
	for i := range keys {
		lease := t.Acquire(store, t.Key(), t.TTL())
		if i%2 == 0 {
			lease.MustRelease()
		} else {
			lease.MustRenew(t.TTL())
			last = lease // nobody releases it
		}
		t.MustRelease(store, t.Key(), t.Owner()) // of keys that were never locked
		t.MustNotRenew(store, t.Key(), t.Owner(), t.TTL(), "the owner of nothing")
	}
	t.SleepUntil(last.NotAfter())
	// One is the key of the acquisitions that purge.
	if !purge(t, store, records, retention, 1) {
		t.Broken(fmt.Sprintf("%d records %v after the last of %d leases ended, and after hundreds of acquisitions of one key",
			records(), time.Since(last.NotAfter()).Round(time.Second), keys), "the record of that one key")
	}
}

func checkPurgeSparesLiveLeases(t *T) {
	const retention = 10 * time.Millisecond
	store, records := t.Config.OpenRetention(t.rec, retention)
	held := t.Acquire(store, t.Key(), t.Long())
	renewed := t.Acquire(store, t.Key(), t.TTL())
	renewed.MustRenew(t.Long())
	for range 20 {
		t.Acquire(store, t.Key(), t.Long()).MustRelease()
	}
	if !purge(t, store, records, retention, 3) {
		t.Fatal("the records were not purged, see StateIsBounded")
	}
	t.SleepUntil(renewed.Answered.Add(t.TTL() + t.Slack())) // past its first end
	purge(t, store, records, retention, 3)
	for _, lease := range []*Lease{held, renewed} {
		lease.MustBeHeld(store)
		lease.MustRenew(t.Long())
		lease.MustRelease()
	}
}

func checkPurgeHidesNoKey(t *T) {
	const retention = time.Millisecond
	store, _ := t.Config.OpenRetention(t.rec, retention)
	t.Go(8, func(int) {
		key := t.Key()
		for range 50 {
			// By now the record of the round before may be purged by any of
			// the others' acquisitions.
			t.Acquire(store, key, t.Long()).MustRelease()
			t.Sleep(retention)
		}
	})
}

func checkHeldTryIsARead(t *T) {
	a, b := t.Open(), t.Open()
	const tries = 300
	lease := t.Acquire(a, t.Key(), t.Long())
	// A server writes now and then for reasons of its own, and a table's page
	// that was just written is put in order once: the quietest of several
	// series counts.
	least := int64(-1)
	for range 4 {
		before := t.Config.Writes(t.rec)
		for range tries {
			lease.MustBeHeld(b)
		}
		if n := t.Config.Writes(t.rec) - before; least < 0 || n < least {
			least = n
		}
	}
	if least >= tries/2 {
		t.Broken(fmt.Sprintf("%d durable writes for %d tries on a held key", least, tries), "none")
	}
	lease.MustRelease()
}
