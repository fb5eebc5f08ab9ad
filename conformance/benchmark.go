package conformance

import (
	"context"
	"crypto/rand"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

func benchmark(b *testing.B, c Config) {
	const ttl = 30 * time.Second
	store := c.Open(b)
	acquire := func(b *testing.B, ctx context.Context, key, owner string) {
		b.Helper()
		grant, err := store.Acquire(ctx, key, owner, ttl)
		if err != nil || !grant.Acquired {
			b.Fatalf("acquired %v, error %v, want the free key", grant.Acquired, err)
		}
	}
	release := func(b *testing.B, ctx context.Context, key, owner string) {
		b.Helper()
		if err := store.Release(ctx, key, owner); err != nil {
			b.Fatal(err)
		}
	}

	b.Run("op=acquire-release", func(b *testing.B) {
		b.ReportAllocs()
		ctx, key, owner := b.Context(), rand.Text(), rand.Text()
		for b.Loop() {
			acquire(b, ctx, key, owner)
			release(b, ctx, key, owner)
		}
	})
	b.Run("op=held-try", func(b *testing.B) {
		b.ReportAllocs()
		ctx, key, owner, other := b.Context(), rand.Text(), rand.Text(), rand.Text()
		acquire(b, ctx, key, owner)
		defer release(b, ctx, key, owner)
		for b.Loop() {
			if grant, err := store.Acquire(ctx, key, other, ttl); err != nil || grant.Acquired {
				b.Fatalf("acquired %v, error %v, want a held key", grant.Acquired, err)
			}
		}
	})
	b.Run("op=renew", func(b *testing.B) {
		b.ReportAllocs()
		ctx, key, owner := b.Context(), rand.Text(), rand.Text()
		acquire(b, ctx, key, owner)
		defer release(b, ctx, key, owner)
		for b.Loop() {
			if renewed, err := store.Renew(ctx, key, owner, ttl); err != nil || !renewed {
				b.Fatalf("renewed %v, error %v, want true", renewed, err)
			}
		}
	})

	strategy, err := core.NewStrategy(store, core.Options{TTL: ttl, Wait: core.WaitForever})
	if err != nil {
		b.Fatal(err)
	}
	nothing := func(context.Context) error { return nil }
	b.Run("op=do", func(b *testing.B) {
		b.ReportAllocs()
		ctx, key := b.Context(), rand.Text()
		for b.Loop() {
			if err := strategy.Do(ctx, key, nothing); err != nil {
				b.Fatal(err)
			}
		}
	})
	// Many keys at once: how the store scales over keys that nobody contends.
	b.Run("op=do/keys=many", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			ctx, key := b.Context(), rand.Text()
			for pb.Next() {
				if err := strategy.Do(ctx, key, nothing); err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
	// Eight contenders for one key: the time of a hand-over.
	b.Run("op=contended/clients=8", func(b *testing.B) {
		ctx, key := b.Context(), rand.Text()
		var started atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for started.Add(1) <= int64(b.N) {
					if err := strategy.Do(ctx, key, nothing); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}
