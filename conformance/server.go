package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/leasekit/leasekit/core"
)

func retryRules() []Rule {
	return group("Retries", Rule{
		Name:     "DriverRetry",
		Sentence: "If the client library may send a request twice, then while the lease won by a call is live, another delivery of that call returns its token, without breaking NotReentrant.",
		Needs:    needs("OpenResending", func(c *Config) bool { return c.OpenResending != nil }),
		Check:    checkDriverRetry,
	})
}

func refusalRules() []Rule {
	return group("Refusals", Rule{
		Name:     "RefusalsAreErrors",
		Sentence: "A demoted master, a read-only replica, a full disk or memory: an error that says what is wrong, never a quiet \"not yours\" or \"released\".",
		Needs:    needs("Refusals", func(c *Config) bool { return len(c.Refusals) > 0 }),
		Alone:    true,
		Check:    checkRefusalsAreErrors,
	}, Rule{
		Name:     "ForeignValueIsAnError",
		Sentence: "A foreign value under our key: an error that says what is wrong, never a quiet \"not yours\" or \"released\", and nothing is overwritten.",
		Needs:    needs("Foreign", func(c *Config) bool { return c.Foreign != nil }),
		Check:    checkForeignValueIsAnError,
	})
}

func checkDriverRetry(t *T) {
	twice, once := t.Config.OpenResending(t.rec), t.Open()
	key := t.Key()
	var last int64
	for range 3 {
		try := t.Try(twice, key, t.Owner(), t.Long())
		if !try.Acquired {
			t.Broken("the second delivery of an Acquire was told that the key is held, by the first", "acquired, the first delivery's answer")
		}
		if try.Token <= last {
			t.Broken(fmt.Sprintf("token %d after %d", try.Token, last), "a greater one")
		}
		last = try.Token
		lease := &Lease{t: t, Store: twice, Try: try}
		// Another call of the same owner is no second delivery.
		for _, store := range []core.LockStore{twice, once} {
			if t.Try(store, key, lease.Owner, t.Long()).Acquired {
				t.Broken("the owner of a live lease acquired the key once more", "not acquired: this was another call")
			}
			lease.MustBeHeld(store)
		}
		lease.MustRenew(t.Long())
		lease.MustRelease()
		next := t.Acquire(once, key, t.Long())
		if next.Token <= last {
			t.Broken(fmt.Sprintf("token %d after %d", next.Token, last), "a greater one")
		}
		last = next.Token
		t.MustRelease(twice, key, lease.Owner)
		t.MustNotRenew(twice, key, lease.Owner, t.Long(), "a stranger")
		next.MustBeHeld(once)
		next.MustRelease()
	}
}

func checkRefusalsAreErrors(t *T) {
	for _, refusal := range t.Config.Refusals {
		checkRefusal(t, refusal)
	}
}

func checkRefusal(t *T, refusal Refusal) {
	well := t.Open()
	renew, release, free := t.Acquire(well, t.Key(), t.Long()), t.Acquire(well, t.Key(), t.Long()), t.Key()
	store, end := refusal.Begin(t.rec)
	ended := false
	finish := func() {
		if !ended {
			ended = true
			end()
		}
	}
	defer finish()

	// A refused call must be an error. One that the server let pass after all
	// (memory is full, and a release needs none) must have been done.
	owner := t.Owner()
	grant, acquireErr := store.Acquire(t.Context(), free, owner, t.Long())
	renewed, renewErr := store.Renew(t.Context(), renew.Key, renew.Owner, t.Long())
	releaseErr := store.Release(t.Context(), release.Key, release.Owner)
	finish()
	t.reconnect(well)

	for call, err := range map[string]error{"Acquire": acquireErr, "Renew": renewErr, "Release": releaseErr} {
		if errors.Is(err, core.ErrInvalid) || errors.Is(err, context.DeadlineExceeded) {
			t.Broken(fmt.Sprintf("%s: %s returned the error %q", refusal.Name, call, err), "an error that says what the server said")
		}
	}
	if acquireErr == nil && renewErr == nil && releaseErr == nil && grant.Acquired && renewed {
		t.Fatalf("%s: the server refused nothing", refusal.Name)
	}
	switch {
	case acquireErr == nil && !grant.Acquired:
		t.Broken(refusal.Name+": Acquire of a free key said that it is held, and no error", "an error")
	case acquireErr == nil && t.Try(well, free, t.Owner(), t.TTL()).Acquired:
		t.Broken(refusal.Name+": Acquire was acquired, and the key is free", "an error")
	case renewErr == nil && !renewed:
		t.Broken(refusal.Name+": Renew of a live lease was false, and no error", "an error")
	case releaseErr == nil && !t.Try(well, release.Key, t.Owner(), t.TTL()).Acquired:
		t.Broken(refusal.Name+": Release returned nil, and the key is held", "an error")
	}
	t.MustRelease(well, free, owner)
	renew.MustRelease()
	release.MustRelease()
}

func checkForeignValueIsAnError(t *T) {
	store, key := t.Open(), t.Key()
	intact := t.Config.Foreign(t.rec, key)
	check := func(call string, err error) {
		if err == nil || errors.Is(err, core.ErrInvalid) {
			t.Broken(fmt.Sprintf("%s of a key with a foreign value returned the error %v", call, err), "an error that says so")
		}
		if !intact() {
			t.Broken(call+" changed a value that is not the store's", "untouched")
		}
	}
	for range 2 {
		owner := t.Owner()
		grant, err := store.Acquire(t.Context(), key, owner, t.TTL())
		check("Acquire", err)
		if grant.Acquired {
			t.Broken("acquired", "an error")
		}
		_, err = store.Renew(t.Context(), key, owner, t.TTL())
		check("Renew", err)
		check("Release", store.Release(t.Context(), key, owner))
		time.Sleep(time.Millisecond)
	}
}
