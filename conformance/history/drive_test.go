package history_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/conformance/history"
	"github.com/leasekit/leasekit/core"
)

func openOne(store core.LockStore) func(int) (core.LockStore, error) {
	return func(int) (core.LockStore, error) { return store, nil }
}

func TestDriveEnds(t *testing.T) {
	for name, test := range map[string]struct {
		plan  history.Plan
		after time.Duration // the caller's context ends
		least time.Duration
	}{
		"after so many calls":   {history.Plan{Calls: 500}, 0, 0},
		"after a time":          {history.Plan{For: 5 * time.Second}, 0, 5 * time.Second},
		"with the context":      {history.Plan{}, 3 * time.Second, 3 * time.Second},
		"before it has begun":   {history.Plan{}, -1, 0},
		"with one key":          {history.Plan{Calls: 300, Keys: 1, Clients: 1}, 0, 0},
		"with more keys":        {history.Plan{Calls: 300, Keys: 9, Clients: 2}, 0, 0},
		"without giving up":     {history.Plan{Calls: 300, Abandon: -1}, 0, 0},
		"with the shortest ttl": {history.Plan{Calls: 300, TTL: 10 * time.Millisecond}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // fails if a goroutine is left
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				switch {
				case test.after < 0:
					cancel()
				case test.after > 0:
					time.AfterFunc(test.after, cancel)
				}
				start := time.Now()
				r, err := history.Drive(ctx, openOne(openMemory(t)), test.plan)
				if err != nil {
					t.Fatal(err)
				}
				if !r.OK() {
					t.Error(r)
				}
				if took := time.Since(start); took < test.least || test.least > 0 && took > test.least+time.Second {
					t.Errorf("took %v, want %v", took, test.least)
				}
				if n := test.plan.Calls; r.Calls < n || n > 0 && r.Calls > 2*n {
					t.Errorf("%d calls, want %d", r.Calls, n)
				}
				sum := 0
				for _, n := range r.Answers {
					sum += n
				}
				if sum != r.Calls || test.plan.Abandon < 0 && r.Unknown > 0 {
					t.Errorf("got %v", r)
				}
			})
		})
	}
}

func TestDriveRefusesNonsense(t *testing.T) {
	for _, plan := range []history.Plan{{Clients: -1}, {Keys: -1}, {CallsPerKey: -1}, {Calls: -1}, {TTL: time.Millisecond}, {TTL: -1}} {
		if _, err := history.Drive(t.Context(), openOne(openMemory(t)), plan); err == nil {
			t.Errorf("%+v was accepted", plan)
		}
	}
	broken := errors.New("cannot open")
	if _, err := history.Drive(t.Context(), func(int) (core.LockStore, error) { return nil, broken }, history.Plan{}); !errors.Is(err, broken) {
		t.Errorf("got %v, want the error of open", err)
	}
}

// refuses says that everything is invalid, which no plan of ours is.
type refuses struct{ core.LockStore }

func (refuses) Acquire(context.Context, string, string, time.Duration) (core.Grant, error) {
	return core.Grant{}, fmt.Errorf("%w: no", core.ErrInvalid)
}

func TestDriveReportsRefusal(t *testing.T) {
	if _, err := history.Drive(t.Context(), openOne(refuses{openMemory(t)}), history.Plan{For: time.Minute}); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("got %v, want %v", err, core.ErrInvalid)
	}
}

func TestDriveInjectsFaultsAndTellsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var broken, began atomic.Int32
		var reports []history.Report
		plan := history.Plan{
			For:      20 * time.Second,
			Progress: func(r history.Report) { reports = append(reports, r) },
			Faults: []history.Fault{{Name: "a fault", Breaks: true, Clients: []int{1}, Begin: func() func() {
				if broken.Add(1) != 1 {
					t.Error("two faults at once")
				}
				began.Add(1)
				return func() { broken.Add(-1) }
			}}},
		}
		r, err := history.Drive(t.Context(), openOne(openMemory(t)), plan)
		if err != nil || !r.OK() {
			t.Fatal(r, err)
		}
		if broken.Load() != 0 {
			t.Error("a fault was left")
		}
		if n := int(began.Load()); n < 10 || r.Faults["a fault"] != n {
			t.Errorf("%d faults, the report has %d", n, r.Faults["a fault"])
		}
		if len(reports) < 15 {
			t.Fatalf("%d reports in 20 s", len(reports))
		}
		for i, r := range reports[1:] {
			if r.Calls < reports[i].Calls || r.Elapsed < reports[i].Elapsed {
				t.Errorf("report %d goes back: %v", i+1, r)
			}
		}
		if last := reports[len(reports)-1]; last.Calls != r.Calls {
			t.Errorf("the last report has %d calls, the result %d", last.Calls, r.Calls)
		}
		for _, part := range []string{"linearizable", "seed ", "answers: acquire no", "faults: a fault "} {
			if !strings.Contains(r.String(), part) {
				t.Errorf("%q lacks %q", r, part)
			}
		}
	})
}

// memory of a long drive: keys that are done are forgotten.
func TestDriveStopsAtTheFirstViolation(t *testing.T) {
	r := drive(t, "TokenOfRecord", 7)
	if r.Violation == nil || r.Calls > 2000 || r.OK() {
		t.Errorf("got %v", r)
	}
}

func BenchmarkCheck(b *testing.B) {
	rec := history.NewRecorder()
	store := openMemory(b)
	_, err := history.Drive(b.Context(), func(client int) (core.LockStore, error) { return rec.Record(store, client), nil },
		history.Plan{For: time.Second, TTL: 20 * time.Millisecond, Keys: 1})
	if err != nil {
		b.Fatal(err)
	}
	h := rec.History()
	for b.Loop() {
		if r := history.Check(h, history.Options{}); !r.OK() {
			b.Fatal(r)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(h.Ops)), "ns/call")
}

// slow takes its time to acquire, and counts who acts for an owner meanwhile.
type slow struct {
	core.LockStore
	mu      sync.Mutex
	running map[string]bool
	early   int
}

func (s *slow) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	s.mark(owner, true)
	defer s.mark(owner, false)
	g, err := s.LockStore.Acquire(ctx, key, owner, ttl)
	time.Sleep(20 * time.Millisecond)
	return g, err
}

func (s *slow) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	s.look(owner)
	return s.LockStore.Renew(ctx, key, owner, ttl)
}

func (s *slow) Release(ctx context.Context, key, owner string) error {
	s.look(owner)
	return s.LockStore.Release(ctx, key, owner)
}

func (s *slow) mark(owner string, running bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[owner] = running
}

func (s *slow) look(owner string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running[owner] {
		s.early++
	}
}

// Owners are new for each call, so that nobody knows one before its Acquire has
// returned: a store need not reckon with that.
func TestDriveNamesNoOwnerBeforeItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &slow{LockStore: openMemory(t), running: make(map[string]bool)}
		r, err := history.Drive(t.Context(), openOne(store), history.Plan{Calls: 2000, Keys: 1})
		if err != nil || !r.OK() {
			t.Fatal(r, err)
		}
		if store.early > 0 {
			t.Errorf("%d calls were for an owner whose Acquire had not returned", store.early)
		}
	})
}
