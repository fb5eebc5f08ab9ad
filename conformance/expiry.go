package conformance

import (
	"fmt"
	"sync"
	"time"

	"github.com/leasekit/leasekit/core"
)

func expiryRules() []Rule {
	return group("Expiry", Rule{
		Name:     "NotBeforeTTL",
		Sentence: "A lease lives at least ttl from the moment the request was sent.",
		Check:    checkNotBeforeTTL,
	}, Rule{
		Name:     "ExpiresOnTime",
		Sentence: "A lease ends at most ttl + Slack after the answer.",
		Check:    checkExpiresOnTime,
	}, Rule{
		Name:     "ExpiredCannotRenew",
		Sentence: "An expired lease that nobody took cannot be renewed.",
		Check:    checkExpiredCannotRenew,
	}, Rule{
		Name:     "AcquireRightAfterExpiry",
		Sentence: "The instant after expiry the key can be acquired, with no cleaner in between.",
		Check:    checkAcquireRightAfterExpiry,
	}, Rule{
		Name:     "OldExpirySparesSuccessor",
		Sentence: "A lease lives at least ttl from the moment the request was sent, whatever was planned for the end of an earlier lease of the key.",
		Check:    checkOldExpirySparesSuccessor,
	}, Rule{
		Name:     "UsedKeyExpires",
		Sentence: "A lease ends at most ttl + Slack after the answer, also on a key that was locked and released before.",
		Check:    checkUsedKeyExpires,
	})
}

func renewalRules() []Rule {
	return group("Renewal", Rule{
		Name:     "RenewPushesExpiry",
		Sentence: "Renewal pushes the expiry to now + ttl.",
		Check:    checkRenewPushesExpiry,
	}, Rule{
		Name:     "RenewIsAbsolute",
		Sentence: "Renewal pushes the expiry to now + ttl, an absolute push: what was left before is not added.",
		Check:    checkRenewIsAbsolute,
	}, Rule{
		Name:     "RenewWithOtherTTL",
		Sentence: "Renewal pushes the expiry to now + ttl, with the ttl given, longer or shorter than the first.",
		Check:    checkRenewWithOtherTTL,
	}, Rule{
		Name:     "RenewExcludesSuccessor",
		Sentence: "Each method is atomic for its key: of a Renew and another owner's Acquire that meet at the end of a lease, one at most is answered yes.",
		Check:    checkRenewExcludesSuccessor,
	})
}

func checkNotBeforeTTL(t *T) {
	a, b := t.Open(), t.Open()
	next := t.successor(t.Acquire(a, t.Key(), t.TTL()), b, tooEarly)
	next.MustRelease()
	// The same on a key that has a past.
	t.successor(t.Acquire(b, next.Key, t.TTL()), a, tooEarly).MustRelease()
}

func checkExpiresOnTime(t *T) {
	a, b := t.Open(), t.Open()
	t.Go(4, func(i int) {
		// Different ends within a second, for backends that check now and then.
		ttl := t.TTL() + time.Duration(i)*t.TTL()/4
		t.successor(t.Acquire(a, t.Key(), ttl), b, tooLate).MustRelease()
	})
}

func checkExpiredCannotRenew(t *T) {
	a, b := t.Open(), t.Open()
	untouched, tried := t.Acquire(a, t.Key(), t.TTL()), t.Acquire(a, t.Key(), t.TTL())
	if t.Try(b, tried.Key, t.Owner(), t.TTL()).Acquired {
		t.Retry("the lease was over before a try could find it alive")
	}
	t.SleepUntil(tried.NotAfter())
	for _, lease := range []*Lease{untouched, tried} {
		t.MustNotRenew(a, lease.Key, lease.Owner, t.Long(), "the owner of an expired lease")
		t.MustNotRenew(b, lease.Key, lease.Owner, t.Long(), "the owner of an expired lease")
		t.Acquire(b, lease.Key, t.Long()).MustRelease()
	}
}

func checkAcquireRightAfterExpiry(t *T) {
	a, b := t.Open(), t.Open()
	// Nothing is called while they wait, which could clean up.
	t.Go(4, func(i int) {
		ttl := t.TTL() + time.Duration(i)*t.TTL()/8
		lease := t.Acquire(a, t.Key(), ttl)
		t.SleepUntil(lease.NotAfter())
		try := t.Try([]core.LockStore{a, b, t.Open(), a}[i], lease.Key, t.Owner(), t.Long())
		if !try.Acquired {
			t.Broken(fmt.Sprintf("the first try %v after the answer to the owner of a lease of %v was not acquired (Left %v)",
				try.Sent.Sub(lease.Answered).Round(time.Millisecond), ttl, try.Left), "acquired")
		}
		t.MustRelease(b, lease.Key, try.Owner)
	})
}

func checkOldExpirySparesSuccessor(t *T) {
	a, b := t.Open(), t.Open()
	// The owner of the first lease is gone, by a release, or because the
	// successor came as soon as it had expired; in the third case it is the
	// same owner and the same lease, renewed.
	t.Go(2, func(i int) {
		first := t.Acquire(a, t.Key(), t.TTL())
		t.Sleep(t.TTL() / 2)
		var second *Lease
		if i == 0 {
			first.MustRelease()
			second = t.AcquireAs(b, first.Key, first.Owner, t.TTL())
		} else {
			first.MustRenew(t.TTL())
			second = first
		}
		t.successor(second, a, tooEarly).MustRelease()
	})
}

func checkUsedKeyExpires(t *T) {
	a, b := t.Open(), t.Open()
	t.Go(2, func(i int) {
		key := t.Key()
		first := t.Acquire(a, key, t.Long())
		if i == 0 {
			first.MustRenew(t.Long()) // what was planned for the first must not last
		}
		first.MustRelease()
		t.successor(t.Acquire(b, key, t.TTL()), a, tooLate).MustRelease()
	})
}

func checkRenewPushesExpiry(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.TTL())
	for range 2 {
		t.SleepUntil(lease.Sent.Add(t.TTL() / 2))
		lease.MustRenew(t.TTL())
	}
	t.Successor(lease, b).MustRelease()
}

func checkRenewIsAbsolute(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.TTL())
	for range 5 {
		lease.MustRenew(t.TTL())
	}
	t.successor(lease, b, tooLate).MustRelease()
}

func checkRenewWithOtherTTL(t *T) {
	a, b := t.Open(), t.Open()
	t.Go(2, func(i int) {
		lease := t.Acquire(a, t.Key(), []time.Duration{t.TTL(), t.Long()}[i])
		lease.MustRenew([]time.Duration{2 * t.TTL(), t.TTL()}[i])
		t.Successor(lease, b).MustRelease()
	})
}

func checkRenewExcludesSuccessor(t *T) {
	a, b := t.Open(), t.Open()
	const keys = 32
	t.Go(keys, func(i int) {
		lease := t.Acquire(a, t.Key(), t.TTL())
		// Around the end, as far as it is known: a little sooner and later.
		t.SleepUntil(lease.Answered.Add(t.TTL() + t.TTL()*time.Duration(i-keys/2)/(25*keys)))
		var wg sync.WaitGroup
		var renewed bool
		var try Try
		var renewErr, acquireErr error
		sent := time.Now()
		wg.Go(func() { renewed, renewErr = a.Renew(t.Context(), lease.Key, lease.Owner, t.TTL()) })
		wg.Go(func() { try, acquireErr = t.tryContext(t.Context(), b, lease.Key, t.Owner(), t.TTL()) })
		wg.Wait()
		if renewErr != nil || acquireErr != nil {
			t.stopIfLate()
			t.Broken(fmt.Sprintf("errors %v and %v from Renew and Acquire at the same time", renewErr, acquireErr), "answers")
		}
		// Either the renewal was first, and its lease lived until then, or it
		// was second and came from a stranger.
		if renewed && try.Acquired && try.Answered.Before(sent.Add(t.TTL()-t.TTL()/100)) {
			t.Broken("at the end of a lease its owner's Renew was true and another owner's Acquire acquired", "one of the two at most")
		}
	})
}
