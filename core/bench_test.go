package core_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

// BenchmarkDo is a whole Do with an empty callback on the memory store, beside
// what it cannot do without: an entry in a map, under a mutex.
func BenchmarkDo(b *testing.B) {
	ctx := context.Background()
	b.Run("impl=mutex+map", func(b *testing.B) {
		type lease struct {
			owner string
			until time.Time
		}
		var mu sync.Mutex
		leases := map[string]lease{}
		b.ReportAllocs()
		for b.Loop() {
			mu.Lock()
			if l, ok := leases["key"]; !ok || !time.Now().Before(l.until) {
				leases["key"] = lease{"owner", time.Now().Add(time.Minute)}
			}
			mu.Unlock()
			mu.Lock()
			if leases["key"].owner == "owner" {
				delete(leases, "key")
			}
			mu.Unlock()
		}
	})
	b.Run("impl=store", func(b *testing.B) {
		store, _ := memory.New(memory.Options{})
		b.ReportAllocs()
		for b.Loop() {
			if g, err := store.Acquire(ctx, "key", "owner", time.Minute); err != nil || !g.Acquired {
				b.Fatal(g, err)
			}
			if err := store.Release(ctx, "key", "owner"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("impl=Do", func(b *testing.B) {
		store, _ := memory.New(memory.Options{})
		s, err := core.NewStrategy(store, core.Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		for b.Loop() {
			if err := s.Do(ctx, "key", func(context.Context) error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
	})
}
