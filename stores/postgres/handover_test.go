package pgstore_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
)

// BenchmarkHandOver measures from the call of a release to the start of the next
// holder's callback, with contenders that are each a client of its own.
func BenchmarkHandOver(b *testing.B) {
	url := testserver.Postgres(b).URL
	admin := newPool(b, url)
	for _, contenders := range []int{2, 16} {
		b.Run(fmt.Sprintf("contenders=%d", contenders), func(b *testing.B) {
			o := newTable(b, admin)
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			var mu sync.Mutex
			var released time.Time // by the holder before
			var took []time.Duration
			holder, last := -1, -1
			turns := make(chan struct{})
			var wg sync.WaitGroup
			for i := range contenders {
				store := newStore(b, newPool(b, url, maxConns(2)), o)
				strategy, err := core.NewStrategy(store, core.Options{TTL: long, Wait: core.WaitForever})
				if err != nil {
					b.Fatal(err)
				}
				wg.Go(func() {
					for ctx.Err() == nil {
						err := strategy.Do(ctx, "key", func(context.Context) error {
							now := time.Now()
							mu.Lock()
							holder = i
							if last >= 0 && last != i { // from one to another
								took = append(took, now.Sub(released))
							}
							mu.Unlock()
							select {
							case turns <- struct{}{}:
							case <-ctx.Done():
							}
							// Let the others fail and wait.
							time.Sleep(2 * time.Millisecond)
							mu.Lock()
							last, released = holder, time.Now()
							mu.Unlock()
							return nil
						})
						if err != nil && ctx.Err() == nil {
							b.Errorf("Do: %v", err)
							return
						}
					}
				})
			}
			for b.Loop() {
				<-turns
			}
			cancel()
			wg.Wait()
			if len(took) == 0 {
				b.Skip("nobody handed the key to another")
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-us")
			b.ReportMetric(float64(took[len(took)-1].Microseconds()), "max-us")
			b.ReportMetric(float64(len(took)), "handovers")
		})
	}
}
