package core_test

import (
	"context"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

func TestEveryTryHasAFreshOwner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		s := newStrategy(t, store, core.Options{Label: "host-7/4711", Wait: 10 * time.Second})
		free := occupy(t, store.real, "key", time.Hour)
		if err := s.Do(t.Context(), "key", mustNotRun(t)); !core.IsRejection(err) {
			t.Fatalf("got %v, want a rejection", err)
		}
		free()
		for range 3 {
			if err := s.Do(t.Context(), "key", nothing); err != nil {
				t.Fatal(err)
			}
		}
		form := regexp.MustCompile(`^host-7/4711/[0-9a-f]{32}$`)
		seen := map[string]bool{}
		for _, c := range store.seen("acquire") {
			if seen[c.owner] {
				t.Errorf("%v used an owner again", c)
			}
			seen[c.owner] = true
			if !form.MatchString(c.owner) {
				t.Errorf("%v has an owner that is not label, slash, 128 bits in hex", c)
			}
		}
		if len(seen) < 10 {
			t.Errorf("only %d tries", len(seen))
		}
	})
}

// 128 bits are random: each of the 32 digits differs from owner to owner.
func TestOwnersAreRandom(t *testing.T) {
	t.Parallel()
	store := newScriptedStore(t)
	s := newStrategy(t, store, core.Options{})
	var seen [32]map[byte]bool
	for range 200 {
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range store.seen("acquire") {
		for i := range seen {
			if seen[i] == nil {
				seen[i] = map[byte]bool{}
			}
			seen[i][c.owner[i]] = true
		}
	}
	for i, digits := range seen {
		if len(digits) < 8 { // of 16, in 200 tries
			t.Errorf("digit %d of the owners takes only %d values", i, len(digits))
		}
	}
}

// A retry that used the owner of the try before it would lose its lease when
// that one's release arrives at last.
func TestLateReleaseOfOneTrySparesTheNext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		store.acquire = func(ctx context.Context, r request) (core.Grant, error) {
			if r.n == 1 {
				return core.Grant{}, errServer
			}
			return store.real.Acquire(ctx, r.key, r.owner, r.ttl)
		}
		store.release = func(_ context.Context, r request) error {
			if r.n == 1 {
				deaf(10 * time.Second)
			}
			return store.real.Release(context.Background(), r.key, r.owner)
		}
		s := newStrategy(t, store, core.Options{})
		if err := s.Do(t.Context(), "key", mustNotRun(t)); err == nil {
			t.Fatal("the first try did not fail")
		}
		if err := s.Do(t.Context(), "key", func(ctx context.Context) error {
			time.Sleep(time.Minute) // the first try's release arrives
			wantHeld(t, store.real, "key")
			return ctx.Err()
		}); err != nil {
			t.Error(err)
		}
	})
}

func TestOwnerLabel(t *testing.T) {
	t.Parallel()
	id := "0123456789abcdef0123456789abcdef"
	for _, tt := range []struct{ name, owner, want string }{
		{"label", "host/" + id, "host"},
		{"label with slashes", "a/b//c/" + id, "a/b//c"},
		{"label that looks like an owner", id + "/" + id, id},
		{"no label", id, ""},
		{"empty label", "/" + id, ""},
		{"empty", "", ""},
		{"no id", "host/", ""},
		{"other separator", "host:" + id, ""},
		{"short id", "host/" + id[1:], ""},
		{"upper case id", "host/" + strings.ToUpper(id), ""},
		{"secret with the right length", "secret/" + id[:31] + "g", ""},
		{"somebody's own owner", "my-secret-owner", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := core.OwnerLabel(tt.owner); got != tt.want {
				t.Errorf("OwnerLabel is %q, want %q", got, tt.want)
			}
		})
	}
}

// FuzzOwnerLabel makes owners with a strategy and reads their labels back; and
// no text shows more than what stands in front of 32 bytes and a slash.
func FuzzOwnerLabel(f *testing.F) {
	for _, label := range []string{"", "host", "a/b", "/", "//", "0123456789abcdef0123456789abcdef", "é/", strings.Repeat("x", core.MaxLabelLen)} {
		f.Add(label)
	}
	f.Fuzz(func(t *testing.T, label string) {
		if got := core.OwnerLabel(label); got != "" && (len(got) != len(label)-33 || !strings.HasPrefix(label, got)) {
			t.Errorf("OwnerLabel(%q) is %q", label, got)
		}
		store := newScriptedStore(t)
		s, err := core.NewStrategy(store, core.Options{Label: label})
		if err != nil {
			return // not a label
		}
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
		owner := store.seen("acquire")[0].owner
		if err := core.CheckOwner(owner); err != nil {
			t.Errorf("label %q makes a bad owner: %v", label, err)
		}
		if got := core.OwnerLabel(owner); got != label {
			t.Errorf("label %q was read back as %q", label, got)
		}
	})
}
