package conformance

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/leasekit/leasekit/core"
)

func validationRules() []Rule {
	return group("Validation", Rule{
		Name:     "InvalidArguments",
		Sentence: "A key is 1 to 512 bytes of UTF-8 with no NUL; an owner likewise; ttl >= 1 ms. Anything else is an error matching core.ErrInvalid, the same on every store. No error contains an owner.",
		Check:    checkInvalidArguments,
	}, Rule{
		Name:     "OddKeys",
		Sentence: "Inside those limits every key works and keys that differ in a byte are different keys: spaces, /, :, {}, %, quotes, newline, emoji, NFC and NFD.",
		Busy:     true,
		Check:    checkOddKeys,
	}, Rule{
		Name:     "OddOwners",
		Sentence: "An owner is 1 to 512 bytes of UTF-8 with no NUL, and inside those limits every owner works.",
		Busy:     true,
		Check:    checkOddOwners,
	}, Rule{
		Name:     "OddTTLs",
		Sentence: "Every ttl from 1 ms to the longest time.Duration works, and one finer than the backend can keep is rounded up, without overflow.",
		Check:    checkOddTTLs,
	})
}

func checkInvalidArguments(t *T) {
	store := t.Open()
	const text = "\xff not UTF-8"
	bad := map[string]string{
		"empty":            "",
		"of 513 bytes":     strings.Repeat("k", core.MaxKeyLen+1),
		"with a NUL":       "a\x00b",
		"that is no UTF-8": text,
	}
	check := func(err error, call string, secret string) {
		if !errors.Is(err, core.ErrInvalid) {
			t.Broken(fmt.Sprintf("%s returned the error %v", call, err), "an error that matches core.ErrInvalid")
		}
		if secret != "" && strings.Contains(err.Error(), secret) {
			t.Broken(fmt.Sprintf("the error of %s contains the owner: %q", call, err), "an owner is a secret")
		}
	}
	try := func(what, key, owner string, ttl time.Duration, secret string) {
		grant, err := store.Acquire(t.Context(), key, owner, ttl)
		check(err, "Acquire with "+what, secret)
		if grant.Acquired {
			t.Broken("acquired with "+what, "not acquired")
		}
		renewed, err := store.Renew(t.Context(), key, owner, ttl)
		check(err, "Renew with "+what, secret)
		if renewed {
			t.Broken("renewed with "+what, "not renewed")
		}
	}
	for what, s := range bad {
		owner := t.Owner()
		try("a key "+what, s, owner, t.TTL(), owner)
		check(store.Release(t.Context(), s, owner), "Release with a key "+what, owner)
		try("an owner "+what, t.Key(), s, t.TTL(), s)
		check(store.Release(t.Context(), t.Key(), s), "Release with an owner "+what, s)
	}
	// A live lease is not touched by what is refused.
	lease := t.Acquire(store, t.Key(), t.Long())
	for _, ttl := range []time.Duration{0, 1, core.MinTTL - 1, -1, -time.Second, math.MinInt64} {
		try(fmt.Sprintf("a ttl of %v", ttl), t.Key(), t.Owner(), ttl, "")
		if _, err := store.Renew(t.Context(), lease.Key, lease.Owner, ttl); !errors.Is(err, core.ErrInvalid) {
			t.Broken(fmt.Sprintf("Renew of a live lease with a ttl of %v returned the error %v", ttl, err), "an error that matches core.ErrInvalid")
		}
	}
	lease.MustBeHeld(store)
	lease.MustRelease()
}

// odd returns texts inside the limits, no two of them equal, that one backend
// or another mixes up or chokes on.
func odd(salt string) []string {
	odd := []string{
		"", "/", "//", "/a", "a/", "a/b", "a", "A", "a ", " a", "a\t", "a\n", "\n", "a\r\n",
		":", "a:b", "{}", "{a}", "{a}b", "a}b{", "}", "%", "%s", "%00", "a%20b", "a b", "a+b",
		"'", `"`, "`", `\`, `\n`, "'; DROP TABLE leases; --", "$1", "?", "#", "&", "a*", "a_", "[a]", "a?",
		"<script>", "..", "../a", ".", "$where", "a.b", "$a", "null", "NULL", "0", "-1", "1e3", "true",
		"é", "e\u0301", "É", "ß", "ss", "ﬀ", "ff", "İ", "i", "I", "ı", "Ａ", "\u200b", "\ufeff", "\u202e",
		"日本", "🔒", "🔒🔒", "👩‍👩‍👧", "\U0010ffff", "\x01", "\x7f", "\u0080",
		"ascii" + strings.Repeat("x", 400), "ascii" + strings.Repeat("x", 400) + "y",
	}
	for i := range odd {
		odd[i] = salt + odd[i]
	}
	fill := func(s string) string { return s + strings.Repeat("z", core.MaxKeyLen-len(s)) }
	// The salt at the end too: what is cut off, or trimmed, is told from what
	// is not.
	return append(odd, " "+salt, salt[:len(salt)-1], "x"+salt, strings.ToLower(salt),
		fill(salt), fill(salt)[1:], "x"+fill(salt)[1:], fill(salt)[:core.MaxKeyLen-2]+"é", "\n"+salt+"\n")
}

func checkOddKeys(t *T) {
	a, b := t.Open(), t.Open()
	keys := odd(t.Key())
	leases := make([]*Lease, 0, len(keys))
	// All are held at once, so that two keys that are taken for one show.
	for _, key := range keys {
		try := t.Try(a, key, t.Owner(), t.Long())
		if !try.Acquired {
			t.Broken(fmt.Sprintf("the key %q was not acquired while %d other keys were held", key, len(leases)), "acquired: a different key")
		}
		leases = append(leases, &Lease{t: t, Store: a, Try: try})
	}
	for i, lease := range leases {
		lease.MustBeHeld(b)
		lease.MustRenew(t.Long())
		lease.MustRelease()
		if try := t.Try(b, lease.Key, t.Owner(), t.Long()); !try.Acquired {
			t.Broken(fmt.Sprintf("the key %q is held after its release", lease.Key), "free")
		} else {
			t.MustRelease(b, lease.Key, try.Owner)
		}
		if i+1 < len(leases) {
			leases[i+1].MustBeHeld(b)
		}
	}
}

func checkOddOwners(t *T) {
	a, b := t.Open(), t.Open()
	key := t.Key()
	for _, owner := range odd(t.Owner()) {
		lease := t.AcquireAs(a, key, owner, t.Long())
		lease.MustRenew(t.Long())
		lease.MustRelease()
		if try := t.Try(b, key, t.Owner(), t.Long()); !try.Acquired {
			t.Broken(fmt.Sprintf("the key is held after the release by %q", owner), "free")
		} else {
			t.MustRelease(b, key, try.Owner)
		}
	}
}

func checkOddTTLs(t *T) {
	a, b := t.Open(), t.Open()
	ttl := t.TTL()
	t.Go(9, func(i int) {
		switch i {
		case 0, 1, 2, 3:
			// Odd fractions: half a second more or less must not be cut off.
			odd := []time.Duration{1, time.Millisecond - 1, ttl/2 + 1, ttl/3 + 333*time.Microsecond}[i]
			lease := t.Acquire(a, t.Key(), ttl+odd)
			t.successor(lease, b, tooEarly|tooLate).MustRelease()
		case 4, 5:
			// The shortest: it must be granted, and it must end.
			shortest := []time.Duration{core.MinTTL, core.MinTTL + 1}[i-4]
			lease := t.Acquire(a, t.Key(), shortest)
			lease.TTL = t.TTL() // backends may round up
			t.successor(lease, b, tooLate).MustRelease()
		default:
			// The last is the greatest there is: rounding it must not overflow.
			longest := []time.Duration{365 * 24 * time.Hour, 100 * 365 * 24 * time.Hour, math.MaxInt64}[i-6]
			lease := t.Acquire(a, t.Key(), longest)
			lease.MustBeHeld(b)
			lease.MustRenew(longest)
			lease.MustBeHeld(b)
			lease.MustRelease()
			t.Acquire(b, lease.Key, longest).MustRelease()
		}
	})
}
