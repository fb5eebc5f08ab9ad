package mongostore_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

const benchTTL = 30 * time.Second

// way is one of several things that are compared, each on a document of its own.
type way struct {
	name   string
	once   func() error
	times  []time.Duration
	allocs uint64
}

// compare runs the ways turn by turn, so that all meet the same noise, and
// reports the median of each and its ratio to the first.
func compare(b *testing.B, ways ...*way) {
	b.Helper()
	for _, w := range ways { // connections, documents
		for range 20 {
			if err := w.once(); err != nil {
				b.Fatalf("%s: %v", w.name, err)
			}
		}
	}
	var before, after runtime.MemStats
	n := 0
	for b.Loop() {
		for i := range ways {
			w := ways[(i+n)%len(ways)]
			runtime.ReadMemStats(&before)
			began := time.Now()
			err := w.once()
			w.times = append(w.times, time.Since(began))
			runtime.ReadMemStats(&after)
			w.allocs += after.Mallocs - before.Mallocs
			if err != nil {
				b.Fatalf("%s: %v", w.name, err)
			}
		}
		n++
	}
	median := func(w *way) float64 {
		slices.Sort(w.times)
		return float64(w.times[len(w.times)/2].Nanoseconds())
	}
	floor := median(ways[0])
	for _, w := range ways {
		b.ReportMetric(median(w)/1e3, w.name+"-µs")
		b.ReportMetric(float64(w.allocs)/float64(n), w.name+"-allocs")
		if w != ways[0] {
			b.ReportMetric(median(w)/floor, w.name+"/floor")
		}
	}
	b.ReportMetric(0, "ns/op") // of all together: no use
}

// majority is the collection with the write concern that the store uses.
func majority(coll *mongo.Collection) *mongo.Collection {
	journaled := true
	return coll.Clone(options.Collection().SetWriteConcern(&writeconcern.WriteConcern{W: "majority", Journal: &journaled}))
}

// BenchmarkFloor compares acquire and release with the least that a lock in
// MongoDB can be: two updates of one field, by _id, acknowledged by a majority.
func BenchmarkFloor(b *testing.B) {
	coll := newCollection(b)
	ctx := b.Context()
	s := newStore(b, coll, mongostore.Options{})
	owner := rand.Text()
	acquireRelease := func(key string) error {
		if _, err := s.Acquire(ctx, key, owner, benchTTL); err != nil {
			return err
		}
		return s.Release(ctx, key, owner)
	}

	b.Run("op=acquire-release", func(b *testing.B) {
		raw, n := majority(coll), 0
		update := func() error {
			n++
			_, err := raw.UpdateOne(ctx, bson.D{{Key: "_id", Value: "raw"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "n", Value: n}}}},
				options.UpdateOne().SetUpsert(n == 1))
			return err
		}
		compare(b,
			&way{name: "raw", once: func() error {
				if err := update(); err != nil {
					return err
				}
				return update()
			}},
			&way{name: "leasekit", once: func() error { return acquireRelease("k") }})
	})
	b.Run("op=fresh-key", func(b *testing.B) {
		raw := majority(coll)
		compare(b,
			&way{name: "raw", once: func() error {
				id := rand.Text()
				if _, err := raw.InsertOne(ctx, bson.D{{Key: "_id", Value: id}, {Key: "n", Value: 0}}); err != nil {
					return err
				}
				_, err := raw.UpdateByID(ctx, id, bson.D{{Key: "$set", Value: bson.D{{Key: "n", Value: 1}}}})
				return err
			}},
			&way{name: "leasekit", once: func() error { return acquireRelease(rand.Text()) }})
	})
	b.Run("op=renew", func(b *testing.B) {
		raw, n := majority(coll), 0
		if _, err := s.Acquire(ctx, "renewed", owner, time.Hour); err != nil {
			b.Fatal(err)
		}
		compare(b,
			&way{name: "raw", once: func() error {
				n++
				_, err := raw.UpdateByID(ctx, "raw", bson.D{{Key: "$set", Value: bson.D{{Key: "n", Value: n}}}})
				return err
			}},
			&way{name: "leasekit", once: func() error { _, err := s.Renew(ctx, "renewed", owner, time.Hour); return err }})
		_ = s.Release(ctx, "renewed", owner)
	})
	b.Run("op=held-try", func(b *testing.B) {
		if _, err := s.Acquire(ctx, "held", owner, time.Hour); err != nil {
			b.Fatal(err)
		}
		compare(b,
			&way{name: "find", once: func() error {
				_, err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: "held"}}).Raw()
				return err
			}},
			&way{name: "leasekit", once: func() error { _, err := s.Acquire(ctx, "held", "other", benchTTL); return err }})
		_ = s.Release(ctx, "held", owner)
	})
}

// BenchmarkHandOver measures the time from the end of one callback to the start
// of the next, in another process's place: every contender has a client of its
// own. It reports how long the unluckiest waited, in hand-overs.
func BenchmarkHandOver(b *testing.B) {
	for _, contenders := range []int{2, 16, 32} {
		b.Run(fmt.Sprintf("contenders=%d", contenders), func(b *testing.B) { benchmarkHandOver(b, contenders) })
	}
}

func benchmarkHandOver(b *testing.B, contenders int) {
	coll := newCollection(b)
	key := rand.Text()
	var (
		mu        sync.Mutex
		times     []time.Duration
		ended     time.Time // the last callback
		last      = -1      // who ran it
		since     = make([]int, contenders)
		unluckies int
		wg        sync.WaitGroup
	)
	for i := range contenders {
		s := newStore(b, through(b, coll, testserver.Mongo(b).URL), mongostore.Options{})
		strategy, err := core.NewStrategy(s, core.Options{TTL: benchTTL, Wait: core.WaitForever})
		if err != nil {
			b.Fatal(err)
		}
		wg.Go(func() {
			for done := false; !done; {
				err := strategy.Do(b.Context(), key, func(context.Context) error {
					mu.Lock()
					defer mu.Unlock()
					if last >= 0 && last != i {
						times = append(times, time.Since(ended))
						unluckies = max(unluckies, len(times)-since[i])
					}
					since[i], last = len(times), i
					done = len(times) >= b.N
					time.Sleep(time.Millisecond) // let the others fail and wait
					ended = time.Now()
					return nil
				})
				if err != nil {
					b.Errorf("Do: %v", err)
					return
				}
				time.Sleep(time.Millisecond) // who has just released stands back
			}
		})
	}
	wg.Wait()
	slices.Sort(times)
	b.ReportMetric(0, "ns/op")
	for name, at := range map[string]int{"p50-µs": len(times) / 2, "p99-µs": len(times) * 99 / 100, "max-µs": len(times) - 1} {
		b.ReportMetric(float64(times[at].Microseconds()), name)
	}
	b.ReportMetric(float64(unluckies), "longest-wait-in-hand-overs")
}
