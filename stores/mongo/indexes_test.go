package mongostore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

// newName is a collection that does not exist.
func newName(t testing.TB) *mongo.Collection {
	t.Helper()
	coll := connect(t, testserver.Mongo(t).URL).Database(database()).Collection("n_" + strings.ToLower(rand.Text()))
	t.Cleanup(func() { _ = coll.Drop(context.WithoutCancel(t.Context())) })
	return coll
}

func ttlIndexes(t testing.TB, coll *mongo.Collection) (found int) {
	t.Helper()
	specs, err := coll.Indexes().ListSpecifications(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range specs {
		if s.ExpireAfterSeconds != nil {
			found++
		}
	}
	return found
}

func TestEnsureIndexesManyAtOnce(t *testing.T) {
	coll := newName(t)
	for range 2 {
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if err := mongostore.EnsureIndexes(t.Context(), coll); err != nil {
					t.Errorf("EnsureIndexes: %v", err)
				}
			})
		}
		wg.Wait()
		if n := ttlIndexes(t, coll); n != 1 {
			t.Errorf("%d TTL indexes, want 1", n)
		}
	}
}

// Nobody would notice for weeks that nothing is ever deleted.
func TestMissingIndexIsAnError(t *testing.T) {
	for name, prepare := range map[string]func(*mongo.Collection) error{
		"no collection": func(*mongo.Collection) error { return nil },
		"no index": func(c *mongo.Collection) error {
			_, err := c.InsertOne(t.Context(), bson.M{})
			return err
		},
		"an index without expiry": func(c *mongo.Collection) error {
			_, err := c.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "purge", Value: -1}}})
			return err
		},
		"an index on two fields": func(c *mongo.Collection) error {
			_, err := c.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "purge", Value: 1}, {Key: "x", Value: 1}}})
			return err
		},
		"a partial index": func(c *mongo.Collection) error {
			_, err := c.Indexes().CreateOne(t.Context(), mongo.IndexModel{
				Keys:    bson.D{{Key: "purge", Value: -1}},
				Options: options.Index().SetExpireAfterSeconds(0).SetPartialFilterExpression(bson.M{"x": bson.M{"$gt": 1}}),
			})
			return err
		},
		"a TTL index on another field": func(c *mongo.Collection) error {
			_, err := c.Indexes().CreateOne(t.Context(), mongo.IndexModel{
				Keys:    bson.D{{Key: "until", Value: 1}},
				Options: options.Index().SetExpireAfterSeconds(0),
			})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			coll := newName(t)
			if err := prepare(coll); err != nil {
				t.Fatal(err)
			}
			s := newStore(t, coll, mongostore.Options{})
			for range 2 {
				g, err := s.Acquire(t.Context(), "k", "me", time.Minute)
				if !errors.Is(err, mongostore.ErrNoIndex) || g.Acquired || !strings.Contains(err.Error(), "mongostore.EnsureIndexes") {
					t.Errorf("Acquire returned %+v, %v, want an error that names EnsureIndexes", g, err)
				}
			}
			if document(t, coll, "k") != nil {
				t.Error("a refused Acquire left a document")
			}
			mustRelease(t, s, "k", "me")
			if err := mongostore.EnsureIndexes(t.Context(), coll); err != nil {
				t.Fatalf("EnsureIndexes: %v", err)
			}
			mustAcquire(t, s, "k", "me", time.Minute)
		})
	}
}

// A collection that is dropped comes back with the next lease. The store says
// that its index has not, in the end, and goes on when it is there again.
func TestDroppedIndexIsMissed(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{})
	mustAcquire(t, s, "before", "me", time.Minute)
	if err := coll.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, s, "after", "me", time.Minute) // not looked at again so soon
	s.CheckIndexesAlways()
	for range 2 {
		if g, err := s.Acquire(t.Context(), "k", "me", time.Minute); err == nil || !strings.Contains(err.Error(), "mongostore.EnsureIndexes") {
			t.Errorf("Acquire returned %+v, %v, want an error that names EnsureIndexes", g, err)
		}
	}
	if err := mongostore.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		mustAcquire(t, s, fmt.Sprint("again", i), "me", time.Minute)
	}
}

// In a collection that takes "a" for "A", two keys would be one.
func TestCollationIsRefused(t *testing.T) {
	coll := newName(t)
	fold := options.CreateCollection().SetCollation(&options.Collation{Locale: "en", Strength: 2})
	if err := coll.Database().CreateCollection(t.Context(), coll.Name(), fold); err != nil {
		t.Fatal(err)
	}
	s := newStore(t, coll, mongostore.Options{})
	_, acquire := s.Acquire(t.Context(), "k", "me", time.Minute)
	for call, err := range map[string]error{"EnsureIndexes": mongostore.EnsureIndexes(t.Context(), coll), "Acquire": acquire} {
		if err == nil || !strings.Contains(err.Error(), "collation") {
			t.Errorf("%s returned %v, want an error about the collation", call, err)
		}
	}
	if n := ttlIndexes(t, coll); n != 0 {
		t.Errorf("EnsureIndexes made %d indexes in a collection that it refuses", n)
	}

	// Made anew under a store that has looked before: still no wrong answer.
	if err := coll.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := mongostore.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, s, "warm", "up", time.Minute)
	if err := coll.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := coll.Database().CreateCollection(t.Context(), coll.Name(), fold); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, s, "key", "me", time.Minute)
	if g, err := s.Acquire(t.Context(), "KEY", "you", time.Minute); err == nil {
		t.Errorf("Acquire of another key, which the collection takes for the same, returned %+v and no error", g)
	}
	if ok, err := s.Renew(t.Context(), "KEY", "ME", time.Minute); ok || err != nil {
		t.Errorf("Renew of another key by another owner returned %v, %v, want false, nil", ok, err)
	}
	if ok, err := s.Renew(t.Context(), "key", "ME", time.Minute); ok || err != nil {
		t.Errorf("Renew by an owner in capitals returned %v, %v, want false, nil", ok, err)
	}
	mustRelease(t, s, "key", "ME")
	mustBeHeld(t, s, "key")
}

var purgeKeys = flag.Int("keys", 2000, "number of keys that TestDocumentsArePurged locks")

// What is left of keys that were locked once.
func TestDocumentsArePurged(t *testing.T) {
	coll := newCollection(t)
	if err := quickenTTL(t, coll); err != nil {
		t.Skipf("the server looks once a minute for what to purge, and refuses to be quicker: %v", err)
	}
	s := newStore(t, coll, mongostore.Options{Retention: time.Millisecond})
	kept := newStore(t, coll, mongostore.Options{Prefix: "kept/", Retention: time.Hour})
	mustAcquire(t, kept, "k", "me", time.Second)
	mustRelease(t, kept, "k", "me")
	keys := *purgeKeys
	began := time.Now()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for i := range keys / 16 {
				key := rand.Text()
				mustAcquire(t, s, key, "me", time.Second)
				if i%2 == 0 {
					mustRelease(t, s, key, "me")
				}
			}
		})
	}
	wg.Wait()
	locked := time.Since(began)
	for deadline := time.Now().Add(time.Minute); count(t, coll) > 1 && time.Now().Before(deadline); {
		time.Sleep(50 * time.Millisecond)
	}
	if n := count(t, coll); n != 1 {
		t.Errorf("%d documents are left of %d keys, want the one with a longer retention", n, keys)
	}
	t.Logf("%d keys in %v, gone %v later", keys, locked.Round(time.Millisecond), (time.Since(began) - locked).Round(time.Millisecond))
}
