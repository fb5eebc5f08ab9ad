package history_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/conformance/history"
	"github.com/leasekit/leasekit/core"
)

// scripted answers as it is told.
type scripted struct {
	core.LockStore
	err error
}

func (s *scripted) Unwrap() core.LockStore { return s.LockStore }

func (s *scripted) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	g, err := s.LockStore.Acquire(ctx, key, owner, ttl)
	if s.err != nil {
		return core.Grant{}, s.err
	}
	return g, err
}

func TestRecorderRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		rec := history.NewRecorder()
		inner := &scripted{LockStore: openMemory(t)}
		a, b := rec.Record(inner, 3), rec.Record(inner, 4)
		g, err := a.Acquire(ctx, "k", "first", time.Second)
		if err != nil || !g.Acquired {
			t.Fatalf("got %+v, %v", g, err)
		}
		time.Sleep(time.Millisecond)
		if g, err := b.Acquire(ctx, "k", "second", time.Minute); err != nil || g.Acquired || g.Left == 0 {
			t.Errorf("got %+v, %v, want what the store answers", g, err)
		}
		if ok, err := a.Renew(ctx, "k", "first", 2*time.Second); err != nil || !ok {
			t.Errorf("Renew: %v, %v", ok, err)
		}
		if ok, err := b.Renew(ctx, "k", "second", time.Second); err != nil || ok {
			t.Errorf("Renew: %v, %v", ok, err)
		}
		end := rec.Fault(history.FaultSpan{Name: "trouble", Breaks: true, Begin: time.Hour, End: time.Hour})
		inner.err = errors.New("lost")
		if _, err := b.Acquire(ctx, "other", "second", time.Second); !errors.Is(err, inner.err) {
			t.Errorf("got %v, want the store's error", err)
		}
		end()
		end()
		if err := a.Release(ctx, "k", "first"); err != nil {
			t.Error(err)
		}

		h := rec.History()
		want := []string{
			"acquire(owner 1, 1s) = token ",
			"acquire(owner 2, 1m0s) = held",
			"renew(owner 1, 2s) = true",
			"renew(owner 2, 1s) = false",
			"acquire(owner 1, 1s) = unknown: lost", // owners are counted for each key
			"release(owner 1) = ok",
		}
		if len(h.Ops) != len(want) {
			t.Fatalf("got %v", h.Ops)
		}
		var last time.Duration
		for i, op := range h.Ops {
			if !strings.HasPrefix(op.String(), want[i]) {
				t.Errorf("call %d: got %v, want %s", i, op, want[i])
			}
			if op.Call <= last || op.Return <= op.Call {
				t.Errorf("call %d from %v to %v, after %v: times must grow, also where the clock stands still", i, op.Call, op.Return, last)
			}
			last = op.Return
		}
		if h.Ops[0].Client != 3 || h.Ops[1].Client != 4 || h.Ops[4].Key != "other" || h.Ops[1].Call < time.Millisecond {
			t.Errorf("got %+v", h.Ops)
		}
		if len(h.Faults) != 1 || h.Faults[0].Begin <= h.Ops[3].Return || h.Faults[0].End >= h.Ops[5].Call || h.Faults[0].End <= h.Ops[4].Return {
			t.Errorf("got faults %+v", h.Faults)
		}
		if strings.Contains(h.Ops[4].String(), "second") {
			t.Error("an owner is in the history")
		}
		if r := history.Check(h, history.Options{}); !r.OK() || r.Keys != 2 || r.Calls != 6 || r.Unknown != 1 {
			t.Error(r)
		}
	})
}

func TestRecorderDoesNotRecordInvalidCalls(t *testing.T) {
	rec := history.NewRecorder()
	s := rec.Record(openMemory(t), 0)
	if _, err := s.Acquire(t.Context(), "k", "", time.Second); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	if _, err := s.Renew(t.Context(), "k", "o", 0); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	if err := s.Release(t.Context(), "", "o"); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	if h := rec.History(); len(h.Ops) != 0 {
		t.Errorf("got %v", h.Ops)
	}
	if r := history.Check(rec.History(), history.Options{}); !r.OK() || r.Keys != 0 {
		t.Error(r)
	}
}

func TestRecordedStoreKeepsCapabilities(t *testing.T) {
	s := history.NewRecorder().Record(openMemory(t), 0)
	if _, ok := core.Capability[core.Notifier](s); !ok {
		t.Error("the Notifier is hidden")
	}
}

// hanging never answers.
type hanging struct{ core.LockStore }

func (hanging) Renew(ctx context.Context, _, _ string, _ time.Duration) (bool, error) {
	<-ctx.Done()
	return false, ctx.Err()
}

func TestCallThatRunsIsOfUnknownOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := history.NewRecorder()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _, _ = rec.Record(hanging{}, 0).Renew(ctx, "k", "o", time.Second) }()
		synctest.Wait()
		h := rec.History()
		if len(h.Ops) != 1 || !h.Ops[0].Unknown() || h.Ops[0].Return != 0 || !strings.Contains(h.Ops[0].String(), "no answer yet") {
			t.Errorf("got %v", h.Ops)
		}
		if r := history.Check(h, history.Options{}); !r.OK() || r.Unknown != 1 {
			t.Error(r)
		}
	})
}

// A Recorder can sit below a Strategy: what that makes of a store is checked.
func TestStrategyIsRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := history.NewRecorder()
		shared := openMemory(t)
		var wg sync.WaitGroup
		for client := range 4 {
			strategy, err := core.NewStrategy(rec.Record(shared, client), core.Options{TTL: 300 * time.Millisecond, Wait: core.WaitForever})
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				for i := range 20 {
					err := strategy.Do(t.Context(), "job", func(context.Context) error {
						time.Sleep(time.Duration(i*client) * 10 * time.Millisecond)
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		h := rec.History()
		renewals := 0
		for _, op := range h.Ops {
			if op.Kind == history.Renew && op.Yes {
				renewals++
			}
		}
		if renewals == 0 {
			t.Error("no renewal was recorded")
		}
		if r := history.Check(h, history.Options{}); !r.OK() || r.Calls < 160 {
			t.Error(r)
		}
	})
}
