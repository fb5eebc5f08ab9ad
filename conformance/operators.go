package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/leasekit/leasekit/core"
)

func inspectorRules() []Rule {
	return withCapability[core.Inspector]("Inspector", group("Inspector", Rule{
		Name:     "ShowsLiveLease",
		Sentence: "Leases shows a live lease with key, token, the holder's label, and the time that it has left.",
		Check:    checkShowsLiveLease,
	}, Rule{
		Name:     "ShowsNoDeadLease",
		Sentence: "Leases shows live leases only: none that was released, and none that has expired.",
		Check:    checkShowsNoDeadLease,
	}, Rule{
		Name:     "HidesOwner",
		Sentence: "An owner is a secret, for whoever knows it can end the lease: only its label is shown.",
		Check:    checkHidesOwner,
	}, Rule{
		Name:     "ShowsKeyAlone",
		Sentence: "A query for a key shows the lease on this key alone, however much other keys are like it.",
		Check:    checkShowsKeyAlone,
	}, Rule{
		Name:     "ShowsPrefix",
		Sentence: "A query for a prefix shows the leases of all keys that begin with these bytes, each once, and no others.",
		Check:    checkShowsPrefix,
	}, Rule{
		Name:     "ShowsMany",
		Sentence: "The sequence reads on from the store as it is consumed; a lease that lives the whole time is seen exactly once, however many there are, and one may stop early.",
		Check:    checkShowsMany,
	}, Rule{
		Name:     "LookingChangesNothing",
		Sentence: "Reading changes nothing: not the leases, not their tokens.",
		Check:    checkLookingChangesNothing,
	}, Rule{
		Name:     "LeasesContext",
		Sentence: "An error ends the sequence: that of a context that has ended, or of a query that makes no sense.",
		Check:    checkLeasesContext,
	}))
}

func breakerRules() []Rule {
	return withCapability[core.Breaker]("Breaker", group("Breaker", Rule{
		Name:     "BreakFreesKey",
		Sentence: "Break ends the live lease whoever holds it, and the next try is acquired.",
		Check:    checkBreakFreesKey,
	}, Rule{
		Name:     "BreakTellsWhatWas",
		Sentence: "Break returns what the lease was, and broken is false if there was none.",
		Check:    checkBreakTellsWhatWas,
	}, Rule{
		Name:     "BrokenCannotRenew",
		Sentence: "The holder of a broken lease learns of it at its next renewal, which is refused; its release is no error and never touches a successor.",
		Check:    checkBrokenCannotRenew,
	}, Rule{
		Name:     "TokenGrowsAfterBreak",
		Sentence: "After Break the token goes on growing.",
		Check:    checkTokenGrowsAfterBreak,
	}, Rule{
		Name:     "BreakSparesOtherKeys",
		Sentence: "Break ends the lease on its key and on no other.",
		Check:    checkBreakSparesOtherKeys,
	}, Rule{
		Name:     "BreakSignalsWaiters",
		Sentence: "Waiters are signalled by Break as by a release.",
		Needs:    needsCapability[core.Notifier]("Notifier"),
		Check:    checkBreakSignalsWaiters,
	}, Rule{
		Name:     "BreakContext",
		Sentence: "Break refuses an invalid key and a context that has ended, and does nothing.",
		Check:    checkBreakContext,
	}))
}

// withCapability makes rules need the capability C beside what they need
// themselves.
func withCapability[C any](name string, rules []Rule) []Rule {
	has := needsCapability[C](name)
	for i := range rules {
		own := rules[i].Needs
		rules[i].Needs = func(c *Config) string {
			if why := has(c); why != "" || own == nil {
				return why
			}
			return own(c)
		}
	}
	return rules
}

// leases returns what q shows.
func (t *T) leases(store core.LockStore, q core.LeaseQuery) []core.LeaseInfo {
	var found []core.LeaseInfo
	for info, err := range capability[core.Inspector](t, store).Leases(t.Context(), q) {
		if err != nil {
			t.Broken(fmt.Sprintf("Leases returned the error %q", err), "the live leases")
		}
		found = append(found, info)
	}
	return found
}

// mustShow fails unless info is what an operator may see of the lease, looked at
// after it was granted and before now.
func (l *Lease) mustShow(info core.LeaseInfo) {
	t := l.t
	if want := (core.LeaseInfo{Key: l.Key, Label: core.OwnerLabel(l.Owner), Token: l.Token, Left: info.Left}); info != want {
		t.Broken(fmt.Sprintf("%+v", info), fmt.Sprintf("%+v", want))
	}
	// A hint, but not a wild one.
	if most := l.TTL + t.Slack(); info.Left <= 0 || info.Left > most {
		t.Broken(fmt.Sprintf("Left %v of a lease of %v", info.Left, l.TTL), fmt.Sprintf("more than 0, at most %v", most))
	}
}

// labelled returns an owner as the strategy makes them.
func (t *T) labelled(label string) string {
	return label + "/" + strings.Repeat("0123456789abcdef", 2)[:32]
}

func checkShowsLiveLease(t *T) {
	a, b := t.Open(), t.Open()
	for _, owner := range []string{t.labelled("host:42"), t.labelled("a/b c'\"{}é"), t.Owner()} {
		lease := t.AcquireAs(a, t.Key(), owner, t.Long())
		found := t.leases(b, core.LeaseQuery{Key: lease.Key})
		if len(found) != 1 {
			t.Broken(fmt.Sprintf("%d leases are shown for a key that is held", len(found)), "one")
		}
		lease.mustShow(found[0])
		lease.MustRelease()
	}
}

func checkShowsNoDeadLease(t *T) {
	a, b := t.Open(), t.Open()
	key := t.Key()
	if found := t.leases(b, core.LeaseQuery{Key: key}); len(found) != 0 {
		t.Broken(fmt.Sprintf("%+v for a key that was never locked", found), "nothing")
	}
	t.Acquire(a, key, t.Long()).MustRelease()
	if found := t.leases(b, core.LeaseQuery{Key: key}); len(found) != 0 {
		t.Broken(fmt.Sprintf("%+v for a key that was released", found), "nothing")
	}
	lease := t.Acquire(a, key, t.TTL())
	t.SleepUntil(lease.NotAfter())
	if found := t.leases(b, core.LeaseQuery{Key: key}); len(found) != 0 {
		t.Broken(fmt.Sprintf("%+v for a lease that has expired", found), "nothing")
	}
}

func checkHidesOwner(t *T) {
	store := t.Open()
	for _, owner := range []string{t.labelled("host"), t.Owner()} {
		lease := t.AcquireAs(store, t.Key(), owner, t.Long())
		for _, info := range t.leases(store, core.LeaseQuery{Key: lease.Key}) {
			if text := fmt.Sprintf("%+v", info); strings.Contains(text, owner) {
				t.Broken(text, "no owner in it")
			}
		}
		lease.MustRelease()
	}
}

func checkShowsKeyAlone(t *T) {
	store := t.Open()
	key := t.Key()
	wanted := t.Acquire(store, key, t.Long())
	// Longer, shorter, other case, and what patterns of several servers would
	// take for it.
	others := []string{key + "x", key[:len(key)-1], strings.ToLower(key), key + "*", key[:len(key)-1] + "?", key[:len(key)-1] + "_", key[:len(key)-1] + "%"}
	for _, other := range others {
		t.Acquire(store, other, t.Long())
	}
	for _, lease := range []*Lease{wanted, t.Acquire(store, key+`[a]\*`, t.Long())} {
		found := t.leases(store, core.LeaseQuery{Key: lease.Key})
		if len(found) != 1 {
			t.Broken(fmt.Sprintf("%d leases are shown for one key: %+v", len(found), found), "one")
		}
		lease.mustShow(found[0])
	}
	wanted.MustRelease()
	if found := t.leases(store, core.LeaseQuery{Key: key}); len(found) != 0 {
		t.Broken(fmt.Sprintf("%+v, the leases of other keys", found), "nothing: the key is free")
	}
}

func checkShowsPrefix(t *T) {
	store := t.Open()
	for _, special := range []string{"/", "*", "?", "[a]", "%", "_", `\`, "{}", "é", "$^."} {
		prefix := t.Key() + special
		inside := map[string]*Lease{}
		for _, key := range []string{prefix, prefix + "a", prefix + "a/b", prefix + special, prefix + "\xf4\x8f\xbf\xbf"} {
			inside[key] = t.Acquire(store, key, t.Long())
		}
		// The same but for what is special: a pattern would match it.
		without := strings.TrimSuffix(prefix, special)
		for _, key := range []string{without + "z", without, strings.ToLower(prefix) + "a"} {
			t.Acquire(store, key, t.Long())
		}
		t.mustShowAll(t.leases(store, core.LeaseQuery{Prefix: prefix}), inside)
	}
}

// mustShowAll fails unless found are the leases of want, each once.
func (t *T) mustShowAll(found []core.LeaseInfo, want map[string]*Lease) {
	seen := map[string]bool{}
	for _, info := range found {
		lease := want[info.Key]
		switch {
		case lease == nil:
			t.Broken(fmt.Sprintf("the lease on %q, which was not asked for", info.Key), "those that were")
		case seen[info.Key]:
			t.Broken(fmt.Sprintf("the lease on %q twice", info.Key), "once")
		}
		lease.mustShow(info)
		seen[info.Key] = true
	}
	for key := range want {
		if !seen[key] {
			t.Broken(fmt.Sprintf("%d leases, without that on %q", len(found), key), fmt.Sprintf("all %d", len(want)))
		}
	}
}

func checkShowsMany(t *T) {
	const n = 600 // more than a page of our stores
	store := t.Open()
	prefix := t.Key() + "/"
	leases := make([]*Lease, n)
	t.Go(16, func(worker int) {
		for i := worker; i < n; i += 16 {
			leases[i] = t.Acquire(store, fmt.Sprintf("%s%d", prefix, i), t.Long())
		}
	})
	want := map[string]*Lease{}
	for _, lease := range leases {
		want[lease.Key] = lease
	}
	t.mustShowAll(t.leases(store, core.LeaseQuery{Prefix: prefix}), want)

	// The same while other keys come and go.
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			key, owner := fmt.Sprintf("%s%d", prefix[:len(prefix)-1], i), t.Owner()
			if g, err := store.Acquire(t.Context(), key, owner, t.Long()); err == nil && g.Acquired {
				_ = store.Release(t.Context(), key, owner)
			}
		}
	}()
	found := t.leases(store, core.LeaseQuery{Prefix: prefix})
	close(stop)
	<-done
	t.mustShowAll(found, want)

	seen := 0
	for _, err := range capability[core.Inspector](t, store).Leases(t.Context(), core.LeaseQuery{Prefix: prefix}) {
		if err != nil {
			t.Broken(fmt.Sprintf("Leases returned the error %q", err), "the live leases")
		}
		if seen++; seen == 3 {
			break
		}
	}
	if seen != 3 {
		t.Broken(fmt.Sprintf("%d leases", seen), "3, where the loop ended")
	}
	t.Go(16, func(worker int) {
		for i := worker; i < n; i += 16 {
			leases[i].MustRelease()
		}
	})
}

func checkLookingChangesNothing(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.TTL())
	for !t.late(lease) {
		if found := t.leases(b, core.LeaseQuery{Key: lease.Key}); len(found) == 1 {
			lease.mustShow(found[0])
		}
		t.Sleep(lease.TTL / 10)
	}
	t.SleepUntil(lease.NotAfter())
	next := t.Acquire(b, lease.Key, t.TTL())
	if next.Token <= lease.Token {
		t.Broken(fmt.Sprintf("token %d after %d", next.Token, lease.Token), "a greater one")
	}
}

// late tells whether the lease may be over.
func (t *T) late(l *Lease) bool { return !l.Live(time.Now()) }

func checkLeasesContext(t *T) {
	store := t.Open()
	inspector := capability[core.Inspector](t, store)
	lease := t.Acquire(store, t.Key(), t.Long())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, test := range []struct {
		name string
		ctx  context.Context
		q    core.LeaseQuery
		want error
	}{
		{"a context that has ended", ended, core.LeaseQuery{Key: lease.Key}, context.Canceled},
		{"a context that has ended", ended, core.LeaseQuery{Prefix: lease.Key}, context.Canceled},
		{"a key with a NUL", t.Context(), core.LeaseQuery{Key: "a\x00"}, core.ErrInvalid},
		{"a prefix that is no UTF-8", t.Context(), core.LeaseQuery{Prefix: "\xff"}, core.ErrInvalid},
		{"both key and prefix", t.Context(), core.LeaseQuery{Key: "a", Prefix: "a"}, core.ErrInvalid},
	} {
		steps := 0
		var got error
		for _, err := range inspector.Leases(test.ctx, test.q) {
			steps++
			got = err
		}
		if steps != 1 || !errors.Is(got, test.want) {
			t.Broken(fmt.Sprintf("%d steps, error %v, for %s", steps, got, test.name), fmt.Sprintf("one step with an error that matches %q", test.want))
		}
	}
}

// breakLease breaks the lease on key.
func (t *T) breakLease(store core.LockStore, key string) (was core.LeaseInfo, broken bool) {
	was, broken, err := capability[core.Breaker](t, store).Break(t.Context(), key)
	if err != nil {
		t.Broken(fmt.Sprintf("Break returned the error %q", err), "nil")
	}
	return was, broken
}

func (l *Lease) mustBreak(store core.LockStore) {
	was, broken := l.t.breakLease(store, l.Key)
	if !broken {
		l.t.Broken("Break found no lease", "the one that is held")
	}
	l.mustShow(was)
}

func checkBreakFreesKey(t *T) {
	a, b := t.Open(), t.Open()
	for _, store := range []core.LockStore{a, b} {
		lease := t.Acquire(a, t.Key(), t.Long())
		lease.mustBreak(store)
		t.Acquire(b, lease.Key, t.Long()).MustRelease()
	}
}

func checkBreakTellsWhatWas(t *T) {
	a, b := t.Open(), t.Open()
	key := t.Key()
	nothing := func(when string) {
		if was, broken := t.breakLease(b, key); broken || was != (core.LeaseInfo{}) {
			t.Broken(fmt.Sprintf("%+v, broken %v, %s", was, broken, when), "nothing, false")
		}
	}
	nothing("for a key that was never locked")
	t.AcquireAs(a, key, t.labelled("host:7"), t.Long()).mustBreak(b)
	nothing("for a lease that was broken before")
	t.Acquire(a, key, t.Long()).MustRelease()
	nothing("for a lease that was released")
	lease := t.Acquire(a, key, t.TTL())
	t.SleepUntil(lease.NotAfter())
	nothing("for a lease that has expired")
}

func checkBrokenCannotRenew(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	lease.mustBreak(b)
	t.MustNotRenew(a, lease.Key, lease.Owner, t.Long(), "the holder of a broken lease")
	lease.MustRelease()
	next := t.Acquire(b, lease.Key, t.Long())
	t.MustNotRenew(a, lease.Key, lease.Owner, t.Long(), "the holder of a broken lease")
	lease.MustRelease()
	next.MustBeHeld(a)
	next.MustRenew(t.Long())
	next.MustRelease()
}

func checkTokenGrowsAfterBreak(t *T) {
	a, b := t.Open(), t.Open()
	key, tokens := t.Key(), tokens{t: t}
	for range 5 {
		lease := t.Acquire(a, key, t.Long())
		tokens.next(lease.Token, "after a broken lease")
		lease.mustBreak(b)
	}
}

func checkBreakSparesOtherKeys(t *T) {
	store := t.Open()
	key := t.Key()
	broken := t.Acquire(store, key, t.Long())
	var others []*Lease
	for _, other := range []string{key + "x", key[:len(key)-1], strings.ToLower(key)} {
		others = append(others, t.Acquire(store, other, t.Long()))
	}
	broken.mustBreak(store)
	for _, lease := range others {
		lease.MustBeHeld(store)
		lease.MustRenew(t.Long())
		lease.MustRelease()
	}
}

func checkBreakSignalsWaiters(t *T) {
	a, b := t.Open(), t.Open()
	lease := t.Acquire(a, t.Key(), t.Long())
	signals, _ := t.subscribe(b, lease.Key)
	drain(signals)
	lease.mustBreak(a)
	t.mustSignal(signals, "after Break")
}

func checkBreakContext(t *T) {
	store := t.Open()
	breaker := capability[core.Breaker](t, store)
	lease := t.Acquire(store, t.Key(), t.Long())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, broken, err := breaker.Break(ended, lease.Key); broken || !errors.Is(err, context.Canceled) {
		t.Broken(fmt.Sprintf("broken %v, error %v, with a context that has ended", broken, err), "false, an error that matches it")
	}
	for _, key := range []string{"", "a\x00", "\xff", strings.Repeat("k", core.MaxKeyLen+1)} {
		if _, broken, err := breaker.Break(t.Context(), key); broken || !errors.Is(err, core.ErrInvalid) {
			t.Broken(fmt.Sprintf("broken %v, error %v, for the key %.20q", broken, err, key), "false, an error that matches core.ErrInvalid")
		}
	}
	lease.MustBeHeld(store)
	lease.MustRenew(t.Long())
	lease.MustRelease()
}
