package memory_test

import (
	"context"
	"fmt"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

func ExampleNew() {
	store, err := memory.New(memory.Options{})
	if err != nil {
		panic(err)
	}
	locks, err := core.NewStrategy(store, core.Options{})
	if err != nil {
		panic(err)
	}
	err = locks.Do(context.Background(), "cache", func(context.Context) error {
		fmt.Println("held:", store.Len())
		return nil
	})
	fmt.Println(err, store.Len())
	// Output:
	// held: 1
	// <nil> 0
}

// A test moves the server's clock to see what becomes of a crashed holder.
func ExampleOptions() {
	now := time.Now()
	store, err := memory.New(memory.Options{Now: func() time.Time { return now }})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	first, _ := store.Acquire(ctx, "key", "crashed", time.Minute)
	held, _ := store.Acquire(ctx, "key", "successor", time.Minute)
	fmt.Println("while it lives:", held.Acquired, held.Left)

	now = now.Add(time.Minute)
	next, _ := store.Acquire(ctx, "key", "successor", time.Minute)
	fmt.Println("after it:", next.Acquired, next.Token > first.Token)
	// Output:
	// while it lives: false 1m0s
	// after it: true true
}

// Who waits for a key is told when it is released.
func ExampleStore_Subscribe() {
	store, _ := memory.New(memory.Options{})
	ctx := context.Background()
	if _, err := store.Acquire(ctx, "key", "owner", time.Minute); err != nil {
		panic(err)
	}
	signals, stop, err := store.Subscribe(ctx, "key")
	if err != nil {
		panic(err)
	}
	defer stop()
	if err := store.Release(ctx, "key", "owner"); err != nil {
		panic(err)
	}
	<-signals
	g, _ := store.Acquire(ctx, "key", "waiter", time.Minute)
	fmt.Println(g.Acquired)
	// Output: true
}
