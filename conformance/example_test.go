package conformance_test

import (
	"testing"
	"testing/synctest"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

// A store's author writes one function. In a test file it is called
// TestConformance, and t is its argument.
func ExampleRun() {
	_ = func(t *testing.T) {
		conformance.Run(t, conformance.Config{
			Open: func(t testing.TB) core.LockStore {
				store, err := memory.New(memory.Options{}) // yours, on the backend that all calls share
				if err != nil {
					t.Fatal(err)
				}
				return store
			},
		})
	}
}

// What a store does not claim, and what is known to be wrong with it, is said
// with the reason. Both are in the summary.
func ExampleConfig() {
	_ = conformance.Config{
		// Open: …
		NotSupported: map[string]string{"TokenSurvivesDataLoss": "revisions begin at 1 when the cluster is wiped"},
		KnownFailing: map[string]string{"HeldTryIsARead": "issue 12: the try locks the row"},
	}
}

// A store whose backend is a value in the test's process is checked on fake
// time, with a backend for each rule.
func ExamplePerRule() {
	backend := conformance.PerRule(func(t testing.TB) *memory.Store {
		store, err := memory.New(memory.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return store
	})
	_ = conformance.Config{
		Around: synctest.Test,
		Open:   func(t testing.TB) core.LockStore { return backend(t) },
	}
}

// A rule of one's own runs beside those of the contract.
func ExampleRule() {
	_ = conformance.Config{
		// Open: …
		Rules: []conformance.Rule{{
			Group:    "House",
			Name:     "KeysMayBeLong",
			Sentence: "A key of 512 bytes costs no more than one of 10.",
			Check: func(t *conformance.T) {
				store := t.Open()
				lease := t.Acquire(store, t.Key(), t.TTL())
				lease.MustRelease()
			},
		}},
	}
}

// What every rule checks can be listed.
func ExampleRules() {
	for _, rule := range conformance.Rules() {
		_ = rule.Group + "/" + rule.Name + ": " + rule.Sentence
	}
}

func ExampleBenchmark() {
	_ = func(b *testing.B) {
		conformance.Benchmark(b, conformance.Config{
			Open: func(t testing.TB) core.LockStore {
				store, err := memory.New(memory.Options{})
				if err != nil {
					t.Fatal(err)
				}
				return store
			},
		})
	}
}
