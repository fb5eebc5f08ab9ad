package integration

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/core"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

// mongoLeases returns the collection of a client of its own.
func mongoLeases(t testing.TB, addr string) *mongo.Collection {
	t.Helper()
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://" + addr + "/?directConnection=true"))
	check(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = client.Disconnect(ctx)
	})
	return client.Database("leasekit").Collection("leases")
}

func mongoStore(t testing.TB, leases *mongo.Collection) core.LockStore {
	t.Helper()
	store, err := mongostore.New(leases, mongostore.Options{})
	check(t, err)
	t.Cleanup(func() { _ = store.Close() })
	return store
}
