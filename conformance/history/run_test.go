package history_test

import (
	"testing"
	"testing/synctest"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/conformance/history"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

func openMemory(t testing.TB) *memory.Store {
	t.Helper()
	store, err := memory.New(memory.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func TestMemoryStoreIsLinearizable(t *testing.T) {
	shared := openMemory(t)
	history.Run(t, conformance.Config{Open: func(testing.TB) core.LockStore { return shared }})
}

func TestMemoryStoreIsLinearizableOnFakeTime(t *testing.T) {
	backend := conformance.PerRule(func(t testing.TB) *memory.Store { t.Helper(); return openMemory(t) })
	history.Run(t, conformance.Config{
		Around: synctest.Test,
		Open:   func(t testing.TB) core.LockStore { t.Helper(); return backend(t) },
	})
}
