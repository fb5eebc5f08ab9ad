package core_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testlog"
	"github.com/leasekit/leasekit/stores/memory"
)

func TestNewStrategyRefusesBadOptions(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", core.MaxLabelLen)
	tests := []struct {
		name string
		o    core.Options
		want string // a part of the message; "": accepted
	}{
		{"zero value", core.Options{}, ""},
		{"shortest ttl", core.Options{TTL: time.Millisecond}, ""},
		{"longest ttl", core.Options{TTL: math.MaxInt64}, ""},
		{"wait for ever", core.Options{Wait: core.WaitForever}, ""},
		{"longest label", core.Options{Label: long}, ""},
		{"MaxHold as short as MinHold", core.Options{MinHold: time.Second, MaxHold: time.Second}, ""},
		{"MinHold without a bound", core.Options{MinHold: time.Hour}, ""},

		{"ttl under 1 ms", core.Options{TTL: time.Millisecond - 1}, "Options.TTL"},
		{"negative ttl", core.Options{TTL: -time.Second}, "Options.TTL"},
		{"negative wait", core.Options{Wait: -2}, "Options.Wait"},
		{"wait of minus one second", core.Options{Wait: -time.Second}, "Options.Wait"},
		{"negative MinHold", core.Options{MinHold: -1}, "Options.MinHold"},
		{"negative MaxHold", core.Options{MaxHold: -1}, "Options.MaxHold"},
		{"MaxHold shorter than MinHold", core.Options{MinHold: 2, MaxHold: 1}, "Options.MaxHold"},
		{"label too long for an owner", core.Options{Label: long + "x"}, "Options.Label"},
		{"label with NUL", core.Options{Label: "a\x00b"}, "Options.Label"},
		{"label that is no UTF-8", core.Options{Label: "a\xffb"}, "Options.Label"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s, err := core.NewStrategy(newMemory(t), tt.o)
			if tt.want == "" {
				if err != nil || s == nil {
					t.Errorf("got %v, %v, want a strategy", s, err)
				}
				return
			}
			if s != nil || !errors.Is(err, core.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, %v, want no strategy and ErrInvalid about %s", s, err, tt.want)
			}
		})
	}
}

// Stores of odd kinds: the first two can be nil, and cannot be compared.
type (
	mapStore   map[string]string
	funcStore  func()
	valueStore struct{ core.LockStore }
)

func (mapStore) Acquire(context.Context, string, string, time.Duration) (core.Grant, error) {
	return core.Grant{}, errServer
}
func (mapStore) Renew(context.Context, string, string, time.Duration) (bool, error) {
	return false, errServer
}
func (mapStore) Release(context.Context, string, string) error { return errServer }

func (funcStore) Acquire(context.Context, string, string, time.Duration) (core.Grant, error) {
	return core.Grant{}, errServer
}
func (funcStore) Renew(context.Context, string, string, time.Duration) (bool, error) {
	return false, errServer
}
func (funcStore) Release(context.Context, string, string) error { return errServer }

func TestNewStrategyRefusesTypedNilStores(t *testing.T) {
	t.Parallel()
	for name, store := range map[string]core.LockStore{
		"pointer": (*memory.Store)(nil), "map": mapStore(nil), "func": funcStore(nil),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := core.NewStrategy(store, core.Options{})
			if s != nil || !errors.Is(err, core.ErrInvalid) {
				t.Errorf("got %v, %v, want ErrInvalid", s, err)
			}
		})
	}
}

// A store may be of any kind, also one whose values cannot be compared.
func TestNewStrategyTakesStoresOfAnyKind(t *testing.T) {
	t.Parallel()
	for name, store := range map[string]core.LockStore{
		"struct": valueStore{newMemory(t)}, "map": mapStore{}, "func": funcStore(func() {}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStrategy(t, store, core.Options{})
			outer := newStrategy(t, newMemory(t), core.Options{})
			err := outer.Do(t.Context(), "key", func(ctx context.Context) error {
				err := s.Do(ctx, "key", nothing)
				if want := name == "struct"; want != (err == nil) || !want && !errors.Is(err, errServer) {
					t.Errorf("got %v", err)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestOptionsDefaults(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store, rec, log := newScriptedStore(t), newRecorder(), &testlog.Book{}
		store.release = func(context.Context, request) error { return errServer }
		s := newStrategy(t, store, core.Options{Hooks: rec.hooks(nil), Logger: log.Logger()})
		if err := s.Do(t.Context(), "key", nothing); err != nil {
			t.Fatal(err)
		}
		if got, want := store.seen("acquire")[0].ttl, 30*time.Second; got != want {
			t.Errorf("default TTL is %v, want %v", got, want)
		}
		if got := rec.one(t, "Acquired").Name; got != "Lock" {
			t.Errorf("default Name in hooks is %q, want Lock", got)
		}
		if got := log.String(); !strings.Contains(got, "lock=Lock") {
			t.Errorf("default Name is not in the log: %s", got)
		}
		if owner := store.seen("acquire")[0].owner; len(owner) != 32 {
			t.Errorf("owner without a label has %d bytes, want 32: nothing but the random id", len(owner))
		}

		// Wait 0 is one try.
		occupy(t, store.real, "held", time.Hour)
		before := len(store.seen("acquire"))
		err := s.Do(t.Context(), "held", mustNotRun(t))
		if !errors.Is(err, core.ErrNotAcquired) {
			t.Errorf("got %v, want ErrNotAcquired", err)
		}
		if tries := len(store.seen("acquire")) - before; tries != 1 {
			t.Errorf("%d tries, want 1", tries)
		}
	})
}

func TestOptionsAreGivenToTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newScriptedStore(t)
		label := strings.Repeat("ü", core.MaxLabelLen/2)
		s := newStrategy(t, store, core.Options{TTL: 7 * time.Second, Label: label})
		if err := s.Do(t.Context(), "key", until(20*time.Second, nil)); err != nil {
			t.Fatal(err) // the owner is not too long for the store
		}
		for _, c := range store.seen("acquire", "renew") {
			if c.ttl != 7*time.Second {
				t.Errorf("%v has ttl %v, want 7s", c, c.ttl)
			}
		}
		owner := store.seen("acquire")[0].owner
		if !strings.HasPrefix(owner, label) || core.OwnerLabel(owner) != label {
			t.Errorf("owner does not show the label: OwnerLabel is %q", core.OwnerLabel(owner))
		}
		for _, c := range store.seen() {
			if c.owner != owner || c.key != "key" {
				t.Errorf("%v has another owner or key", c)
			}
		}
	})
}

func TestLongestTTLWorks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := newMemory(t)
		s := newStrategy(t, store, core.Options{TTL: math.MaxInt64})
		err := s.Do(t.Context(), "key", func(ctx context.Context) error {
			time.Sleep(1000 * time.Hour)
			wantHeld(t, store, "key")
			return ctx.Err()
		})
		if err != nil {
			t.Error(err)
		}
		wantFree(t, store, "key")
	})
}

func TestNilStoreIsLoggedOnce(t *testing.T) {
	core.ForgetNilStoreWarning()
	var log testlog.Book
	for range 3 {
		if _, err := core.NewStrategy(nil, core.Options{Name: "billing", Logger: log.Logger()}); err != nil {
			t.Fatal(err)
		}
	}
	lines := log.Lines()
	if len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0], "only goroutines of this process") || !strings.Contains(lines[0], "lock=billing") {
		t.Errorf("logged %q, want one warning", lines)
	}

	// Bad options are not the store's fault, and must not use the warning up.
	core.ForgetNilStoreWarning()
	if _, err := core.NewStrategy(nil, core.Options{TTL: -1, Logger: log.Logger()}); err == nil {
		t.Fatal("bad options were accepted")
	}
	if got := log.Lines(); len(got) != 1 {
		t.Errorf("bad options logged %q", got[1:])
	}
}

func TestNilStoresShareOneStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two := newStrategy(t, nil, core.Options{}), newStrategy(t, nil, core.Options{Wait: core.WaitForever})
		var token int64
		err := one.Do(t.Context(), "shared", func(ctx context.Context) error {
			token, _ = core.TokenFor(ctx, "shared")
			time.Sleep(10 * ttl)
			if ran, err := newStrategy(t, nil, core.Options{}).TryDo(context.Background(), "shared", nothing); ran || err != nil {
				t.Errorf("TryDo of another strategy: %v, %v, want the key held", ran, err)
			}
			if err := two.Do(ctx, "shared", nothing); !core.IsRejection(err) {
				t.Errorf("got %v, want a refusal: the same store, the same key", err)
			}
			return ctx.Err()
		})
		if err != nil {
			t.Error(err)
		}
		// The process-wide store signals: nobody waits for a poll.
		lease, err := one.Acquire(t.Context(), "shared")
		if err != nil {
			t.Fatal(err)
		}
		const work = 12345 * ms
		time.AfterFunc(work, func() { _ = lease.Release() })
		start := time.Now()
		next, err := core.Do(t.Context(), two, "shared", func(ctx context.Context) (int64, error) {
			next, _ := core.Token(ctx)
			return next, nil
		})
		if waited := time.Since(start); err != nil || waited != work {
			t.Errorf("got %v after %v, want the key after %v", err, waited, work)
		}
		if token == 0 || lease.Token() <= token || next <= lease.Token() {
			t.Errorf("tokens %d, %d, %d do not grow", token, lease.Token(), next)
		}
	})
}

// A default logger that is set after the strategy was made is used.
func TestNilLoggerIsTheDefaultLogger(t *testing.T) {
	store := newScriptedStore(t)
	store.release = func(context.Context, request) error { return errServer }
	s, err := core.NewStrategy(store, core.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var log testlog.Book
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(log.Logger())
	if err := s.Do(t.Context(), "key", nothing); err != nil {
		t.Fatal(err)
	}
	if lines := log.Lines(); len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0], errServer.Error()) {
		t.Errorf("logged %q, want one warning about the release", lines)
	}
}
