package memory_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

// open returns an Open of one store, for a memory store's clients are the
// goroutines that share it.
func open() func(t testing.TB) core.LockStore {
	store, err := memory.New(memory.Options{})
	return func(t testing.TB) core.LockStore {
		if err != nil {
			t.Fatal(err)
		}
		return store
	}
}

func config() conformance.Config {
	return conformance.Config{
		Open: open(),
		// The store keeps no records, only leases, whatever the retention.
		OpenRetention: func(t testing.TB, _ time.Duration) (core.LockStore, func() int) {
			store, err := memory.New(memory.Options{})
			if err != nil {
				t.Fatal(err)
			}
			return store, store.Len
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
