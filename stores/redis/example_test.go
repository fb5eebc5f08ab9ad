package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

func ExampleNew() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer client.Close()
	store, err := redisstore.New(client, redisstore.Options{})
	if err != nil {
		log.Panic(err)
	}
	defer store.Close()

	strategy, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second, Wait: time.Minute})
	if err != nil {
		log.Panic(err)
	}
	err = strategy.Do(context.Background(), "nightly-report", func(ctx context.Context) error {
		token, _ := core.TokenFor(ctx, "nightly-report")
		fmt.Println("holding the lease, fencing token", token)
		return nil
	})
	if core.IsRejection(err) {
		fmt.Println("somebody else is at it")
	} else if err != nil {
		log.Panic(err)
	}
}

// A cluster needs nothing but its own client: a lock is one key.
func ExampleNew_cluster() {
	client := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{"redis-1:6379", "redis-2:6379", "redis-3:6379"},
	})
	defer client.Close()
	store, err := redisstore.New(client, redisstore.Options{Prefix: "billing:locks:"})
	if err != nil {
		log.Panic(err)
	}
	defer store.Close()
}

// Two servers that do not know of each other can grant the same key, so what
// spreads keys over such servers is refused.
func ExampleNew_ring() {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "localhost:7001", "b": "localhost:7002"}})
	defer ring.Close()
	_, err := redisstore.New(ring, redisstore.Options{})
	fmt.Println(errors.Is(err, core.ErrInvalid))
	// Output: true
}
