package mongostore_test

import (
	"crypto/rand"
	"runtime"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

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
