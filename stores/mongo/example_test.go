package mongostore_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/core"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

func Example() {
	ctx := context.Background()
	client, err := mongo.Connect(options.Client().ApplyURI(os.Getenv("MONGODB_URI")))
	if err != nil {
		log.Panic(err)
	}
	defer client.Disconnect(ctx)

	coll := client.Database("app").Collection("leases")
	if err := mongostore.EnsureIndexes(ctx, coll); err != nil {
		log.Panic(err)
	}
	store, err := mongostore.New(coll, mongostore.Options{})
	if err != nil {
		log.Panic(err)
	}
	defer store.Close()

	strategy, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second, Wait: 10 * time.Second})
	if err != nil {
		log.Panic(err)
	}
	err = strategy.Do(ctx, "nightly-report", func(context.Context) error {
		fmt.Println("nobody else is here")
		return nil
	})
	if err != nil {
		log.Panic(err)
	}
}

// New takes any collection handle; the client may have whatever defaults the
// rest of the program needs.
func ExampleNew() {
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://db1,db2,db3/?replicaSet=rs0&readPreference=secondaryPreferred&w=1"))
	if err != nil {
		log.Panic(err)
	}
	store, err := mongostore.New(client.Database("app").Collection("leases"), mongostore.Options{
		Prefix:    "billing/",
		Retention: 24 * time.Hour,
	})
	if err != nil {
		log.Panic(err)
	}
	defer store.Close()
}

// Run it once in a deployment, or at every start: it does nothing when the index
// is there.
func ExampleEnsureIndexes() {
	ctx := context.Background()
	client, err := mongo.Connect(options.Client().ApplyURI(os.Getenv("MONGODB_URI")))
	if err != nil {
		log.Panic(err)
	}
	if err := mongostore.EnsureIndexes(ctx, client.Database("app").Collection("leases")); err != nil {
		log.Panic(err)
	}
}

// The protected document refuses whoever comes with a token older than the one it
// has seen.
func Example_fencing() {
	writeReport := func(ctx context.Context, reports *mongo.Collection, text string) error {
		token, _ := core.TokenFor(ctx, "nightly-report")
		result, err := reports.UpdateOne(ctx,
			bson.D{{Key: "_id", Value: "nightly"}, {Key: "fence", Value: bson.D{{Key: "$lte", Value: token}}}},
			bson.D{{Key: "$set", Value: bson.D{{Key: "text", Value: text}, {Key: "fence", Value: token}}}})
		if err != nil {
			return err
		}
		if result.MatchedCount == 0 {
			return fmt.Errorf("token %d: a later holder has written", token)
		}
		return nil
	}
	_ = writeReport
}
