package history_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/conformance/history"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testdoc"
)

const (
	ttl   = 200 * time.Millisecond
	slack = 20 * time.Millisecond
	// wire is how long a request is on its way, and an answer, at most.
	wire = 2 * time.Millisecond
)

// backend is a server with one mistake, or none.
type backend struct {
	mistake string
	rand    *rand.Rand

	mu      sync.Mutex
	records map[string]*record
	token   int64
}

// record of a key; owner is "" when it was released.
type record struct {
	owner, former string
	token         int64
	until         time.Time
	released      time.Time
}

func newBackend(mistake string, seed uint64) *backend {
	return &backend{mistake: mistake, rand: rand.New(rand.NewPCG(seed, 99)), records: make(map[string]*record), token: 1000}
}

var errLost = errors.New("the connection broke")

// send calls f after the time that a request takes, and returns after the time
// that the answer takes, or earlier if ctx ends. f runs in any case.
func (b *backend) send(ctx context.Context, f func()) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	b.mu.Lock()
	there, back := rand2(b.rand, wire), rand2(b.rand, wire)
	fate := b.rand.IntN(100)
	b.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		time.Sleep(there)
		switch {
		case fate == 0 && b.is("LosesRequests"):
			done <- errLost
			return
		case fate < 3 && b.is("ExecutesLate"):
			done <- errLost
			time.Sleep(3 * ttl * time.Duration(1+fate) / 2)
			f()
			return
		case fate < 3 && b.is("ExecutesTwice"):
			f()
			done <- errLost
			time.Sleep(ttl * time.Duration(1+fate))
			f()
			return
		}
		f()
		time.Sleep(back)
		done <- nil
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func rand2(r *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(most)))
}

func (b *backend) is(mistake string) bool { return b.mistake == mistake }

// chance is true once in n times.
func (b *backend) chance(n int) bool { return b.rand.IntN(n) == 0 }

func (b *backend) live(r *record) bool { return r.owner != "" && time.Now().Before(r.until) }

func (b *backend) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	var g core.Grant
	err := b.send(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		r := b.records[key]
		if r == nil {
			r = new(record)
			b.records[key] = r
		}
		live := b.live(r)
		switch {
		case b.is("StaleRead"): // of a replica that lags
			live = live || r.former != "" && time.Since(r.released) < 30*time.Millisecond
		case b.is("ReleaseLeavesLease"):
			live = live || time.Now().Before(r.until)
		case b.is("SameOwnerReenters"):
			live = live && r.owner != owner
		case b.is("SpuriousRefusal"):
			live = live || b.chance(20)
		case b.is("ExpiryBySweeper"):
			live = r.owner != "" && time.Now().Before(r.until.Add(ttl))
		case b.is("LosesData") && b.chance(50):
			live = false
		}
		if b.is("DoubleGrant") { // reads, and then writes
			b.mu.Unlock()
			time.Sleep(wire)
			b.mu.Lock()
		}
		drawn := b.token + 1
		if b.is("TokenDrawnEarly") {
			drawn = b.token + 10 - int64(b.rand.IntN(3))*5
		}
		if live {
			g = core.Grant{Left: time.Until(r.until)}
			return
		}
		if r.owner != "" {
			r.former = r.owner
		}
		b.token = max(b.token, drawn)
		r.owner, r.token, r.until = owner, drawn, time.Now().Add(b.life(ttl))
		switch {
		case b.is("TokenOfRecord"):
			r.token = 1
		case b.is("TokenInNanoseconds"):
			r.token = time.Now().UnixNano()
		case b.is("TokenOfLastGrant") && b.chance(5):
			r.token = b.token - 1
		}
		g = core.Grant{Acquired: true, Token: r.token}
		if b.is("AnswersHeldWhenGranted") && b.chance(20) {
			g = core.Grant{}
		}
	})
	if err != nil {
		return core.Grant{}, b.hide(err)
	}
	return g, nil
}

// life is how long a lease of ttl lives.
func (b *backend) life(ttl time.Duration) time.Duration {
	switch b.mistake {
	case "EndsEarly":
		return ttl * 8 / 10
	case "TTLInSeconds":
		return max(ttl.Truncate(time.Second), time.Second)
	case "ClockRunsSlow": // within what is allowed
		return ttl * 1005 / 1000
	case "ClockRunsFast":
		return ttl * 995 / 1000
	case "UsesSlack":
		return ttl + slack - 2*wire
	}
	return ttl
}

// hide is what a store does that takes errors for answers.
func (b *backend) hide(err error) error {
	if b.is("ErrorMeansHeld") {
		return nil
	}
	return err
}

func (b *backend) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	var renewed bool
	err := b.send(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		r := b.records[key]
		if r == nil {
			return
		}
		mine := b.live(r) && r.owner == owner
		switch {
		case b.is("RenewRevives"):
			mine = r.owner == owner
		case b.is("RenewRevivesReleased"):
			mine = mine || r.owner == "" && r.former == owner
		case b.is("RenewWithoutOwnerCheck"):
			mine = b.live(r)
		case b.is("StrangersRenewPushes") && b.live(r):
			r.until = time.Now().Add(ttl)
		case b.is("RenewForgetsLease") && b.chance(10):
			mine = false
		}
		if !mine {
			return
		}
		renewed = true
		switch {
		case b.is("LostUpdate"): // reads the record, and writes it back
			b.mu.Unlock()
			time.Sleep(wire)
			b.mu.Lock()
			r.owner = owner
		case b.is("RenewDoesNothing"):
			return
		case b.is("RenewAdds"):
			r.until = r.until.Add(ttl)
			return
		}
		if b.is("RenewRevivesReleased") {
			r.owner = owner
		}
		r.until = time.Now().Add(b.life(ttl))
	})
	if err != nil {
		return false, b.hide(err)
	}
	return renewed, nil
}

func (b *backend) Release(ctx context.Context, key, owner string) error {
	return b.send(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		r := b.records[key]
		if r == nil || r.owner == "" {
			return
		}
		if r.owner != owner && !b.is("ReleaseRemovesSuccessor") {
			return
		}
		if b.is("ReleaseIsForgotten") && b.chance(5) {
			return
		}
		r.owner, r.former, r.released = "", r.owner, time.Now()
	})
}

// drive drives a backend on fake time.
func drive(t *testing.T, mistake string, seed uint64) history.Report {
	t.Helper()
	var report history.Report
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(mistake, seed)
		var err error
		report, err = history.Drive(t.Context(), func(int) (core.LockStore, error) { return b, nil }, history.Plan{
			Seed:    seed,
			TTL:     ttl,
			Calls:   6000,
			Abandon: 0.04,
			Check:   history.Options{Slack: slack, Deliveries: 2},
		})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // for requests that are late
	})
	return report
}

// mutants, and the rule that is seen to be broken, where it is nearly always the
// same. Now and then a call that runs at the same time explains the mistake
// itself, and what comes of it breaks another rule: TestCheckRejects has the
// exact cases.
var mutants = []struct {
	mistake string
	story   string
	rule    string
}{
	{"StaleRead", "asks a replica that lags whether the key is held", ""},
	{"DoubleGrant", "looks whether the key is free, and takes it in a second step", ""},
	{"LostUpdate", "renews by reading the record and writing it back", ""},
	{"TokenOfRecord", "begins again at 1 with each record", "strictly increase"},
	{"TokenOfLastGrant", "gives a token twice now and then", "strictly increase"},
	{"TokenDrawnEarly", "draws tokens from a sequence that runs ahead", "strictly increase"},
	{"TokenInNanoseconds", "takes nanoseconds for the token", "less than 2^53"},
	{"ReleaseLeavesLease", "keeps the lease when it is released", ""},
	{"ReleaseIsForgotten", "forgets a release now and then", ""},
	{"ReleaseRemovesSuccessor", "releases by key alone", ""},
	{"RenewWithoutOwnerCheck", "renews by key alone", "a renewal acts only"},
	{"StrangersRenewPushes", "pushes the expiry first, and compares the owner for the answer", ""},
	{"RenewRevives", "renews an expired lease", "an expired lease cannot be renewed"},
	{"RenewRevivesReleased", "renews a released lease", ""},
	{"RenewDoesNothing", "answers true, and leaves the expiry", ""},
	{"RenewAdds", "adds ttl to the expiry", ""},
	{"RenewForgetsLease", "says false to the holder now and then", "a live lease is renewed"},
	{"SameOwnerReenters", "lets the owner of a live lease in again", "the same owner's too"},
	{"SpuriousRefusal", "refuses a free key now and then", ""},
	{"AnswersHeldWhenGranted", "says held now and then when it has granted", ""},
	{"ErrorMeansHeld", "says held when it does not know", ""},
	{"ExpiryBySweeper", "lets leases live on for another ttl", ""},
	{"EndsEarly", "ends leases after four fifths of their time", ""},
	{"TTLInSeconds", "keeps whole seconds", ""},
	{"LosesData", "forgets a lease now and then", ""},
}

// seeds is how many histories of each are made: $LEASEKIT_HISTORY_SEEDS or 2.
func seeds(t *testing.T) uint64 {
	t.Helper()
	if s := os.Getenv("LEASEKIT_HISTORY_SEEDS"); s != "" {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return 2
}

func TestMutantsAreCaught(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.mistake, func(t *testing.T) {
			t.Parallel()
			found := make(map[string]int)
			var calls, named uint64
			first := seeds(t)
			seed := uint64(0)
			for ; seed < first || named == 0 && seed < first+6; seed++ {
				r := drive(t, m.mistake, seed+1)
				if len(r.Undecided) > 0 {
					t.Errorf("seed %d: %v", seed+1, r)
				}
				if r.Violation == nil {
					t.Fatalf("seed %d: a store that %s is not caught: %v", seed+1, m.story, r)
				}
				calls += uint64(r.Calls)
				found[r.Violation.Sentence]++
				if strings.Contains(r.Violation.Error(), m.rule) {
					named++
				} else {
					t.Logf("seed %d: got %v\n%s", seed+1, r.Violation, r.Violation.Table(12))
				}
			}
			if 2*named < first {
				t.Errorf("%q is named in %d of %d histories", m.rule, named, seed)
			}
			t.Logf("caught after %d calls on average: %v", calls/seed, found)
		})
	}
}

// What the contract allows must not be taken for a violation.
func TestHonestStoresPass(t *testing.T) {
	for _, quirk := range []string{"", "LosesRequests", "ExecutesLate", "ExecutesTwice", "ClockRunsSlow", "ClockRunsFast", "UsesSlack"} {
		t.Run(fmt.Sprintf("quirk=%s", quirk), func(t *testing.T) {
			t.Parallel()
			var unknown int
			for seed := range seeds(t) {
				r := drive(t, quirk, seed+1)
				if !r.OK() || r.Calls < 5000 {
					t.Fatalf("%v", r)
				}
				if v := r.Violation; v != nil {
					t.Fatalf("%s", v.Table(30))
				}
				unknown += r.Unknown
				if seed == 0 {
					t.Log(r)
				}
			}
			if quirk != "" && unknown == 0 {
				t.Error("no outcome was unknown")
			}
		})
	}
}

// The document says what the tests prove.
func TestMutantTable(t *testing.T) {
	var table strings.Builder
	table.WriteString("| mutant | a store that … |\n|---|---|\n")
	for _, m := range mutants {
		fmt.Fprintf(&table, "| %s | %s |\n", m.mistake, m.story)
	}
	testdoc.Check(t, "../../docs/conformance.md", "history mutants", table.String())
}
