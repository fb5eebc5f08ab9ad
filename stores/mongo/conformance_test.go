package mongostore_test

import (
	"context"
	"crypto/rand"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

// How a process that the suite starts finds the server and the collection.
const (
	urlEnv        = "MONGOSTORE_TEST_URL"
	collectionEnv = "MONGOSTORE_TEST_COLLECTION"
)

// TestConformance runs the suite on a server of its own, which it restarts and
// pauses; or, if $LEASEKIT_TEST_MONGO names one, on that, and then leaves out
// the rules that would disturb others.
func TestConformance(t *testing.T) {
	var server *testserver.Server
	var coll *mongo.Collection
	url, name := os.Getenv(urlEnv), os.Getenv(collectionEnv)
	switch {
	case url != "": // a process that the suite has started
		db, c, _ := strings.Cut(name, ".")
		coll = connect(t, url).Database(db).Collection(c)
	case os.Getenv("LEASEKIT_TEST_MONGO") != "":
		url = testserver.Mongo(t).URL
		coll = newCollectionAt(t, url)
	default:
		server = testserver.StartMongo(t)
		url = server.URL
		coll = newCollectionAt(t, url)
	}
	open := func(t testing.TB, o mongostore.Options, more ...*options.ClientOptions) *mongostore.Store {
		return newStore(t, through(t, coll, url, more...), o)
	}
	behind := func() *testserver.Server { // the proxies
		if server != nil {
			return server
		}
		return testserver.Mongo(t)
	}
	config := conformance.Config{
		Open: func(t testing.TB) core.LockStore { return open(t, mongostore.Options{}) },
		Env: func(testing.TB) []string {
			return []string{urlEnv + "=" + url, collectionEnv + "=" + coll.Database().Name() + "." + coll.Name()}
		},
		Flush: func(t testing.TB) {
			if _, err := coll.DeleteMany(t.Context(), bson.D{}); err != nil {
				t.Fatal(err)
			}
		},
		OpenOneConnection: func(t testing.TB) core.LockStore {
			return open(t, mongostore.Options{}, options.Client().SetMaxPoolSize(1))
		},
		OpenResending: func(t testing.TB) core.LockStore {
			w := newWire(t, behind(), deliverTwice)
			return newStore(t, through(t, coll, w.url), mongostore.Options{})
		},
		Foreign: func(t testing.TB, key string) func() bool {
			foreign := bson.M{"_id": key, "owner": bson.A{"a", "b"}, "until": "tomorrow"}
			if _, err := coll.InsertOne(t.Context(), foreign); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _, _ = coll.DeleteOne(context.WithoutCancel(t.Context()), bson.D{{Key: "_id", Value: key}}) })
			return func() bool { return reflect.DeepEqual(document(t, coll, key), foreign) }
		},
		NotSupported: map[string]string{
			"ClientClockDoesNotMatter": "the store never reads the time of day: TestClientClockIsNotRead runs it in the year 2000",
		},
	}
	if err := quickenTTL(t, coll); err != nil {
		config.NotSupported["StateIsBounded"] = "the server looks for what to purge once a minute, and its user may not change that: " + err.Error()
	} else {
		config.OpenRetention = func(t testing.TB, retention time.Duration) (core.LockStore, func() int) {
			own := newCollectionAt(t, url)
			return newStore(t, own, mongostore.Options{Retention: retention}), func() int { return count(t, own) }
		}
	}
	if os.Getenv(urlEnv) != "" {
		// Proxies are none of a worker's business.
	} else if _, err := urlAt(behind(), ""); err != nil {
		config.NotSupported["Faults"] = err.Error()
	} else {
		config.Faults = conformance.Faults{
			Addr: primary(t, behind()),
			Open: func(t testing.TB, addr string) core.LockStore {
				at, err := urlAt(behind(), addr)
				if err != nil {
					t.Fatal(err)
				}
				return newStore(t, through(t, coll, at), mongostore.Options{})
			},
		}
	}
	if server != nil {
		config.Restart = func(t testing.TB) {
			server.Kill(t)
			server.Start(t)
		}
		config.Pause = func(t testing.TB) func() {
			server.Pause(t)
			return func() { server.Resume(t) }
		}
		config.Writes = writes(coll)
		config.Refusals = []conformance.Refusal{refusedByValidator(open, coll)}
	}
	conformance.Run(t, config)
}

func BenchmarkConformance(b *testing.B) {
	coll := newCollection(b)
	conformance.Benchmark(b, conformance.Config{
		Open: func(t testing.TB) core.LockStore { return newStore(t, coll, mongostore.Options{}) },
	})
}

// deliverTwice is a client library that sends every write again.
func deliverTwice(command string, _ bson.Raw) trick {
	if command == "findAndModify" || command == "update" {
		return trick{twice: true}
	}
	return trick{}
}

// quickenTTL makes the server look every second for what it may purge.
func quickenTTL(t testing.TB, coll *mongo.Collection) error {
	return coll.Database().Client().Database("admin").
		RunCommand(t.Context(), bson.D{{Key: "setParameter", Value: 1}, {Key: "ttlMonitorSleepSecs", Value: 1}}).Err()
}

func count(t testing.TB, coll *mongo.Collection) int {
	t.Helper()
	n, err := coll.CountDocuments(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}

// writes returns a function that counts what was written to the collection
// since its first call, as those see it who replicate the oplog.
func writes(coll *mongo.Collection) func(t testing.TB) int64 {
	var since bson.Timestamp
	return func(t testing.TB) int64 {
		t.Helper()
		if since.IsZero() {
			since.T = uint32(time.Now().Add(-10 * time.Second).Unix())
		}
		n, err := coll.Database().Client().Database("local").Collection("oplog.rs").CountDocuments(t.Context(), bson.D{
			{Key: "ts", Value: bson.D{{Key: "$gte", Value: since}}},
			{Key: "ns", Value: coll.Database().Name() + "." + coll.Name()},
		})
		if err != nil {
			t.Skipf("the oplog cannot be read: %v", err)
		}
		return n
	}
}

// refusedByValidator makes the server refuse whatever is written to the
// collection, as a full disk would.
func refusedByValidator(open func(testing.TB, mongostore.Options, ...*options.ClientOptions) *mongostore.Store, coll *mongo.Collection) conformance.Refusal {
	validate := func(t testing.TB, validator bson.D) {
		err := coll.Database().RunCommand(context.WithoutCancel(t.Context()),
			bson.D{{Key: "collMod", Value: coll.Name()}, {Key: "validator", Value: validator}}).Err()
		if err != nil {
			t.Fatalf("collMod: %v", err)
		}
	}
	return conformance.Refusal{Name: "Validator", Begin: func(t testing.TB) (core.LockStore, func()) {
		store := open(t, mongostore.Options{})
		validate(t, bson.D{{Key: rand.Text(), Value: bson.D{{Key: "$exists", Value: true}}}})
		return store, func() { validate(t, bson.D{}) }
	}}
}
