package memory_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

func newStore(t testing.TB) *memory.Store {
	store, err := memory.New(memory.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func config() conformance.Config {
	const inProcess = "the store lives and dies with its process, there is no server"
	// The clients of a memory store are the goroutines that share it.
	backend := conformance.PerRule(newStore)
	return conformance.Config{
		Open: func(t testing.TB) core.LockStore { return backend(t) },
		// It keeps leases and no records, whatever the retention.
		OpenRetention: func(t testing.TB, _ time.Duration) (core.LockStore, func() int) {
			store := newStore(t)
			return store, store.Len
		},
		NotSupported: map[string]string{
			"MutualExclusionOfProcesses": inProcess,
			"LeaseSurvivesRestart":       inProcess,
			"TokenSurvivesRestart":       inProcess,
			"SignalAfterRestart":         inProcess,
			"Refusals":                   inProcess,
			"Retries":                    inProcess,
		},
	}
}

func TestConformance(t *testing.T) { conformance.Run(t, config()) }

// On fake time nothing is late and nothing has to be tried again.
func TestConformanceOnFakeTime(t *testing.T) {
	c := config()
	c.Around = synctest.Test
	conformance.Run(t, c)
}

func BenchmarkConformance(b *testing.B) { conformance.Benchmark(b, config()) }
