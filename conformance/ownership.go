package conformance

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/leasekit/leasekit/core"
)

func ownershipRules() []Rule {
	return group("Ownership", Rule{
		Name:     "StrangerCannotRenew",
		Sentence: "A stranger's Renew is false and changes nothing: not the expiry, not the token.",
		Check:    checkStrangerCannotRenew,
	}, Rule{
		Name:     "StrangerCannotRelease",
		Sentence: "A stranger's Release is a nil error and changes nothing.",
		Check:    checkStrangerCannotRelease,
	}, Rule{
		Name:     "ReleaseFreesKey",
		Sentence: "Release ends the owner's live lease: the next try, of any client, is acquired.",
		Check:    checkReleaseFreesKey,
	}, Rule{
		Name:     "ReleaseIsIdempotent",
		Sentence: "Releasing twice, or after expiry, or a key never locked, is nil.",
		Check:    checkReleaseIsIdempotent,
	}, Rule{
		Name:     "LateReleaseSparesSuccessor",
		Sentence: "A Release that comes late never touches a successor: neither its lease nor when that ends.",
		Check:    checkLateReleaseSparesSuccessor,
	}, Rule{
		Name:     "LateRenewSparesSuccessor",
		Sentence: "A Renew that comes late is false and never touches a successor: neither its lease nor when that ends.",
		Check:    checkLateRenewSparesSuccessor,
	}, Rule{
		Name:     "OwnersAreComparedWhole",
		Sentence: "Renew and Release act only on a live lease of owner, every byte of which counts.",
		Busy:     true,
		Check:    checkOwnersAreComparedWhole,
	}, Rule{
		Name:     "OwnerIsNotTheClient",
		Sentence: "Renew and Release act on a live lease of owner, whichever client sends them.",
		Check:    checkOwnerIsNotTheClient,
	}, Rule{
		Name:     "ReleasedCannotRenew",
		Sentence: "Only a live lease renews: after its release Renew is false, and the key stays free.",
		Check:    checkReleasedCannotRenew,
	}, Rule{
		Name:     "RenewRacesRelease",
		Sentence: "Renew and Release act on a live lease only, in one atomic step: a renewal in flight does not revive a lease that is being released.",
		Busy:     true,
		Check:    checkRenewRacesRelease,
	})
}

func checkStrangerCannotRenew(t *T) {
	a, b := t.Open(), t.Open()
	shorter := t.Acquire(a, t.Key(), t.TTL())
	longer := t.Acquire(a, t.Key(), t.TTL())
	t.MustNotRenew(b, shorter.Key, t.Owner(), core.MinTTL, "a stranger")
	t.MustNotRenew(b, longer.Key, t.Owner(), t.Long(), "a stranger")
	t.Go(2, func(i int) {
		lease := []*Lease{shorter, longer}[i]
		next := t.Successor(lease, b)
		if next.Token <= lease.Token {
			t.Broken(fmt.Sprintf("token %d, after %d and a stranger's Renew", next.Token, lease.Token), "a greater one")
		}
	})
}

func checkStrangerCannotRelease(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.TTL())
	t.MustRelease(b, lease.Key, t.Owner())
	t.MustRelease(a, lease.Key, t.Owner())
	lease.MustBeHeld(b)
	lease.MustRenew(t.TTL())
	t.MustRelease(b, lease.Key, t.Owner())
	t.Successor(lease, b)
}

func checkReleaseFreesKey(t *T) {
	a, b := t.Open(), t.Open()
	key := t.Key()
	for range 5 {
		t.Acquire(a, key, t.Long()).MustRelease()
		t.Acquire(b, key, t.Long()).MustRelease()
	}
	lease := t.Acquire(a, key, t.Long())
	lease.MustRenew(t.Long())
	lease.MustRelease()
	t.Acquire(b, key, t.Long()).MustRelease()
}

func checkReleaseIsIdempotent(t *T) {
	a, b := t.Open(), t.Open()
	never, released, expired := t.Key(), t.Acquire(a, t.Key(), t.Long()), t.Acquire(a, t.Key(), t.TTL())
	for range 2 {
		t.MustRelease(a, never, t.Owner())
		released.MustRelease()
	}
	t.Acquire(b, never, t.Long()).MustRelease()
	t.Acquire(b, released.Key, t.Long()).MustRelease()
	t.SleepUntil(expired.NotAfter())
	for range 2 {
		expired.MustRelease()
	}
	t.Acquire(b, expired.Key, t.Long()).MustRelease()
}

func checkLateReleaseSparesSuccessor(t *T) {
	a, b := t.Open(), t.Open()
	late := t.Acquire(a, t.Key(), t.TTL())
	next := t.successor(late, b, 0)
	late.MustRelease()
	late.MustRelease()
	next.MustBeHeld(a)
	t.Successor(next, a)

	released := t.Acquire(a, t.Key(), t.Long())
	released.MustRelease()
	next = t.Acquire(b, released.Key, t.TTL())
	released.MustRelease()
	next.MustBeHeld(a)
	next.MustRenew(t.TTL())
}

func checkLateRenewSparesSuccessor(t *T) {
	a, b := t.Open(), t.Open()
	late := t.Acquire(a, t.Key(), t.TTL())
	next := t.successor(late, b, 0)
	t.MustNotRenew(a, late.Key, late.Owner, t.Long(), "the owner before")
	t.MustNotRenew(b, late.Key, late.Owner, t.Long(), "the owner before")
	next.MustBeHeld(a)
	t.Successor(next, a)
}

// similar are owners that are not equal, but were taken for it by one store or
// another: a comparison of prefixes, patterns, numbers, folded or trimmed text.
func similar(owner string) [][2]string {
	e := "e\u0301" // an e and an accent, which is not the one code point é
	return [][2]string{
		{owner, owner[:len(owner)-1]},
		{owner, owner[:1]},
		{owner, owner[1:]},
		{owner, owner + "0"},
		{owner, strings.ToLower(owner)},
		{owner, owner + " "},
		{owner, " " + owner},
		{owner, owner + "\n"},
		{owner, "*"},
		{owner, "%"},
		{owner, strings.Repeat("_", len(owner))},
		{owner, "'" + owner + "'"},
		{"é" + owner, e + owner},
		{"100", "1e2"},
		{"7", "007"},
		{"ß" + owner, "ss" + owner},
	}
}

func checkOwnersAreComparedWhole(t *T) {
	a, b := t.Open(), t.Open()
	for _, pair := range similar(t.Owner()) {
		for i, owner := range pair {
			stranger := pair[1-i]
			lease := t.AcquireAs(a, t.Key(), owner, t.Long())
			t.MustNotRenew(b, lease.Key, stranger, t.Long(), fmt.Sprintf("a stranger called %q instead of %q", stranger, owner))
			t.MustRelease(b, lease.Key, stranger)
			if try := t.Try(b, lease.Key, t.Owner(), t.TTL()); try.Acquired && lease.Live(try.Answered) {
				t.Broken(fmt.Sprintf("a stranger called %q released the lease of %q", stranger, owner), "still held")
			}
			lease.MustRelease()
		}
	}
}

func checkOwnerIsNotTheClient(t *T) {
	a, closeA := t.OpenClosable()
	b, c := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	lease.MustRenewAt(b, t.Long())
	lease.MustRenewAt(a, t.Long())
	t.MustRelease(b, lease.Key, lease.Owner)
	t.Acquire(c, lease.Key, t.Long()).MustRelease()

	// A lease is not a connection: it outlives the client that took it.
	lease = t.Acquire(a, lease.Key, t.Long())
	closeA()
	lease.MustBeHeld(c)
	lease.MustRenewAt(c, t.Long())
	t.MustRelease(c, lease.Key, lease.Owner)
	t.Acquire(b, lease.Key, t.Long()).MustRelease()
}

func checkReleasedCannotRenew(t *T) {
	a, b := t.Open(), t.Open()
	for range 5 {
		lease := t.Acquire(a, t.Key(), t.Long())
		lease.MustRelease()
		t.MustNotRenew(a, lease.Key, lease.Owner, t.Long(), "an owner that has released")
		t.MustNotRenew(b, lease.Key, lease.Owner, t.Long(), "an owner that has released")
		t.Acquire(b, lease.Key, t.Long()).MustRelease()
	}
}

func checkRenewRacesRelease(t *T) {
	a, b := t.Open(), t.Open()
	const workers, rounds = 8, 125 // 1,000 races
	enough := t.Deadline(30 * time.Second)
	t.Go(workers, func(int) {
		key := t.Key()
		for i := range rounds {
			if enough() {
				t.Logf("%d of %d rounds", i, rounds)
				return
			}
			lease := t.Acquire(a, key, t.Long())
			var wg sync.WaitGroup
			var renewErr, releaseErr error
			wg.Go(func() { _, renewErr = b.Renew(t.Context(), key, lease.Owner, t.Long()) })
			wg.Go(func() { releaseErr = a.Release(t.Context(), key, lease.Owner) })
			wg.Wait()
			if renewErr != nil || releaseErr != nil {
				t.stopIfLate()
				t.Broken(fmt.Sprintf("errors %v and %v from Renew and Release at the same time", renewErr, releaseErr), "nil")
			}
			if try := t.Try(a, key, t.Owner(), core.MinTTL); !try.Acquired {
				t.Broken("after a Renew and a Release of the same lease had both returned, the key was held", "free")
			} else {
				t.MustRelease(a, key, try.Owner)
			}
		}
	})
}
