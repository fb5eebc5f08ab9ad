package core_test

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/leasekit/leasekit/core"
)

func TestCheckKeyAndOwner(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, text string
		ok         bool
	}{
		{"one byte", "k", true},
		{"512 bytes", strings.Repeat("k", 512), true},
		{"odd characters", " /:{}%'\"\n\t\\😀", true},
		{"composed and decomposed", "\u00e9e\u0301", true},
		{"empty", "", false},
		{"513 bytes", strings.Repeat("k", 513), false},
		{"257 runes of two bytes", strings.Repeat("ü", 257), false},
		{"NUL", "a\x00b", false},
		{"no UTF-8", "a\xff", false},
		{"surrogate", "\xed\xa0\x80", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for what, err := range map[string]error{
				"CheckKey":           core.CheckKey(tt.text),
				"CheckOwner":         core.CheckOwner(tt.text),
				"CheckAll, key":      core.CheckAll(tt.text, "owner", time.Second),
				"CheckAll, owner":    core.CheckAll("key", tt.text, time.Second),
				"LeaseQuery, key":    core.LeaseQuery{Key: tt.text}.Check(),
				"LeaseQuery, prefix": core.LeaseQuery{Prefix: tt.text}.Check(),
			} {
				ok := tt.ok || tt.text == "" && strings.HasPrefix(what, "LeaseQuery") // all leases
				if ok && err != nil || !ok && !errors.Is(err, core.ErrInvalid) {
					t.Errorf("%s: %v, want accepted: %v", what, err, ok)
				}
				if err != nil && strings.Contains(what, "wner") && len(tt.text) > 3 && strings.Contains(err.Error(), tt.text[:3]) {
					t.Errorf("%s shows the owner: %v", what, err)
				}
			}
		})
	}
}

func TestCheckTTL(t *testing.T) {
	t.Parallel()
	for ttl, ok := range map[time.Duration]bool{
		time.Millisecond: true, time.Hour: true, time.Millisecond + 1: true,
		0: false, -time.Second: false, time.Millisecond - 1: false,
	} {
		for what, err := range map[string]error{"CheckTTL": core.CheckTTL(ttl), "CheckAll": core.CheckAll("key", "owner", ttl)} {
			if ok && err != nil || !ok && !errors.Is(err, core.ErrInvalid) {
				t.Errorf("%s(%v): %v, want accepted: %v", what, ttl, err, ok)
			}
		}
	}
}

func TestLeaseQueryIsAboutOneThing(t *testing.T) {
	t.Parallel()
	if err := (core.LeaseQuery{Key: "key", Prefix: "k"}).Check(); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("both key and prefix: %v, want ErrInvalid", err)
	}
}

func FuzzCheckKey(f *testing.F) {
	for _, key := range []string{"", "key", "\x00", "\xff", "\xed\xa0\x80", strings.Repeat("k", 513), "😀"} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		want := len(key) >= 1 && len(key) <= 512 && utf8.ValidString(key) && !strings.Contains(key, "\x00")
		err := core.CheckKey(key)
		if (err == nil) != want {
			t.Fatalf("CheckKey(%q) = %v, want accepted: %v", key, err, want)
		}
		if err != nil && !errors.Is(err, core.ErrInvalid) {
			t.Errorf("CheckKey(%q) = %v, want ErrInvalid", key, err)
		}
		// What it accepts, the strategy and a store do too; what not, neither.
		s := newStrategy(t, newMemory(t), core.Options{})
		if err := s.Do(t.Context(), key, nothing); (err == nil) != want {
			t.Errorf("Do(%q) = %v, want accepted: %v", key, err, want)
		}
	})
}

// wrapper passes keys on unchanged, secret does not.
type (
	wrapper struct{ core.LockStore }
	secret  struct{ core.LockStore }
)

func (w wrapper) Unwrap() core.LockStore { return w.LockStore }

func TestCapabilityLooksThroughWrappers(t *testing.T) {
	t.Parallel()
	mem := newMemory(t)
	for _, tt := range []struct {
		name  string
		store core.LockStore
		want  bool
	}{
		{"store", mem, true},
		{"wrapper", wrapper{mem}, true},
		{"wrapper in wrapper", &wrapper{wrapper{mem}}, true},
		{"wrapper that changes keys", secret{mem}, false},
		{"a secret in a wrapper", wrapper{secret{mem}}, false},
		{"store without it", newScriptedStore(t), false},
		{"wrapper of nothing", wrapper{}, false},
		{"nil", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n, ok := core.Capability[core.Notifier](tt.store)
			if ok != tt.want || (n != nil) != tt.want {
				t.Errorf("Capability[Notifier]: %v, %v, want found: %v", n, ok, tt.want)
			}
			if tt.want && n != core.Notifier(mem) {
				t.Errorf("found %v, want the memory store itself", n)
			}
		})
	}
}
