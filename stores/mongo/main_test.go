package mongostore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

func TestMain(m *testing.M) { testserver.Main(m) }

// database is the one that all tests of the process use, each with a collection
// of its own.
var database = sync.OnceValue(func() string { return "leasekit_test_" + strings.ToLower(rand.Text()[:8]) })

// connect returns a client of its own, with what more says on top of the URL.
func connect(t testing.TB, url string, more ...*options.ClientOptions) *mongo.Client {
	t.Helper()
	client, err := mongo.Connect(append([]*options.ClientOptions{options.Client().ApplyURI(url)}, more...)...)
	if err != nil {
		t.Fatalf("mongo.Connect: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
		defer cancel()
		_ = client.Disconnect(ctx)
	})
	return client
}

// newCollection is a new collection with its index on the shared server.
func newCollection(t testing.TB, more ...*options.ClientOptions) *mongo.Collection {
	t.Helper()
	return newCollectionAt(t, testserver.Mongo(t).URL, more...)
}

func newCollectionAt(t testing.TB, url string, more ...*options.ClientOptions) *mongo.Collection {
	t.Helper()
	coll := connect(t, url, more...).Database(database()).Collection("c_" + strings.ToLower(rand.Text()))
	if err := mongostore.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatalf("EnsureIndexes: %v", err)
	}
	t.Cleanup(func() { _ = coll.Drop(context.WithoutCancel(t.Context())) })
	return coll
}

func newStore(t testing.TB, coll *mongo.Collection, o mongostore.Options) *mongostore.Store {
	t.Helper()
	store, err := mongostore.New(coll, o)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return store
}

// through is the collection as seen by a client of its own.
func through(t testing.TB, coll *mongo.Collection, url string, more ...*options.ClientOptions) *mongo.Collection {
	t.Helper()
	return connect(t, url, more...).Database(coll.Database().Name()).Collection(coll.Name())
}

func mustAcquire(t testing.TB, s core.LockStore, key, owner string, ttl time.Duration) core.Grant {
	t.Helper()
	g, err := s.Acquire(t.Context(), key, owner, ttl)
	if err != nil || !g.Acquired {
		t.Fatalf("Acquire(%q): got %+v, %v, want acquired", key, g, err)
	}
	return g
}

func mustBeHeld(t testing.TB, s core.LockStore, key string) core.Grant {
	t.Helper()
	g, err := s.Acquire(t.Context(), key, rand.Text(), time.Minute)
	if err != nil || g.Acquired {
		t.Fatalf("Acquire(%q) by another owner: got %+v, %v, want held", key, g, err)
	}
	return g
}

func mustRelease(t testing.TB, s core.LockStore, key, owner string) {
	t.Helper()
	if err := s.Release(t.Context(), key, owner); err != nil {
		t.Fatalf("Release(%q): %v", key, err)
	}
}

// document returns what the server keeps for _id.
func document(t testing.TB, coll *mongo.Collection, id string) bson.M {
	t.Helper()
	var doc bson.M
	err := coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&doc)
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		t.Fatalf("FindOne(%q): %v", id, err)
	}
	return doc
}
