package etcdstore_test

import (
	"context"
	"fmt"
	"log"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/leasekit/leasekit/core"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

func ExampleNew() {
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{"127.0.0.1:2379"},
		// Notice a member that has fallen silent, and go to another one.
		DialKeepAliveTime:    2 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	store, err := etcdstore.New(client, etcdstore.Options{Prefix: "billing/locks/"})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()

	strategy, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second, Wait: time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	err = strategy.Do(context.Background(), "invoice-run", func(ctx context.Context) error {
		token, _ := core.TokenFor(ctx, "invoice-run")
		fmt.Println("working under token", token)
		return ctx.Err()
	})
	if core.IsRejection(err) {
		fmt.Println("another machine is at it")
	} else if err != nil {
		log.Fatal(err)
	}
}

func ExampleStore_Leases() {
	var store *etcdstore.Store // from New
	for lease, err := range store.Leases(context.Background(), core.LeaseQuery{Prefix: "invoice-"}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(lease.Key, "is held by", lease.Label, "for", lease.Left, "more")
	}
}
