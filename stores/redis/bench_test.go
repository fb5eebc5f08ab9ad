package redisstore_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// BenchmarkFloor compares acquire and release with the least that a lock in
// Redis can be, SET NX PX and DEL, on the same client, turn by turn, so that
// both meet the same noise. It reports the median of each and their ratio.
//
// With a context that can end the store does more than the raw commands: it
// comes back when that ends, for which the driver's call needs a goroutine.
func BenchmarkFloor(b *testing.B) {
	for _, clients := range []int{1, 16} {
		for _, ends := range []bool{false, true} {
			b.Run(fmt.Sprintf("clients=%d/ctxends=%v", clients, ends), func(b *testing.B) {
				ctx := context.Background()
				if ends {
					ctx = b.Context()
				}
				benchmarkFloor(ctx, b, clients)
			})
		}
	}
}

func benchmarkFloor(ctx context.Context, b *testing.B, clients int) {
	client := connect(b, testserver.Redis(b).Addr, nil)
	store := newStore(b, client, redisstore.Options{})

	// What each way does once, on a key of its own.
	ways := []struct {
		name string
		once func(key, owner string) error
	}{
		{"raw", func(key, owner string) error {
			if err := client.SetNX(ctx, key, owner, 30*time.Second).Err(); err != nil {
				return err
			}
			return client.Del(ctx, key).Err()
		}},
		{"leasekit", func(key, owner string) error {
			if _, err := store.Acquire(ctx, key, owner, 30*time.Second); err != nil {
				return err
			}
			return store.Release(ctx, key, owner)
		}},
	}
	const batch = 64 // long enough for a mean, short against the noise
	times := make([][]float64, len(ways))
	allocs := make([]float64, len(ways))
	keys := make([]string, clients)
	for i := range keys {
		keys[i] = rand.Text()
	}
	turn := func(w int) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		done := make(chan error, clients)
		for _, key := range keys {
			go func() {
				for range batch {
					if err := ways[w].once(ways[w].name+key, "owner"); err != nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
		}
		for range keys {
			if err := <-done; err != nil {
				b.Error(err)
			}
		}
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		times[w] = append(times[w], float64(took.Nanoseconds())/batch/float64(clients))
		allocs[w] += float64(after.Mallocs - before.Mallocs)
	}
	turn(0) // connections, scripts
	turn(1)
	times[0], times[1], allocs[0], allocs[1] = nil, nil, 0, 0
	for b.Loop() {
		turn(0)
		turn(1)
	}
	for w := range ways {
		slices.Sort(times[w])
	}
	median := func(w int) float64 { return times[w][len(times[w])/2] }
	b.ReportMetric(0, "ns/op")
	for w, way := range ways {
		b.ReportMetric(median(w), way.name+"-ns")
		b.ReportMetric(allocs[w]/float64(len(times[w])*batch*clients), way.name+"-allocs")
	}
	b.ReportMetric(median(1)/median(0), "ratio")
}
