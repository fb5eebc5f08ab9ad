package core_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

func ExampleStrategy_Do() {
	store, err := memory.New(memory.Options{}) // or Redis, etcd, Postgres, MongoDB
	if err != nil {
		panic(err)
	}
	locks, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second})
	if err != nil {
		panic(err)
	}
	err = locks.Do(context.Background(), "nightly-report", func(ctx context.Context) error {
		// Nobody else is in here for "nightly-report". ctx is cancelled if that
		// should ever stop being true.
		fmt.Println("writing the report")
		return ctx.Err()
	})
	switch {
	case core.IsRejection(err):
		fmt.Println("somebody else does it")
	case err != nil:
		fmt.Println("failed:", err)
	}
	// Output: writing the report
}

// Wait for a key that is held, and tell the outcomes apart.
func ExampleStrategy_Do_outcomes() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{Wait: 10 * time.Millisecond})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	holder, err := locks.Acquire(ctx, "account-7")
	if err != nil {
		panic(err)
	}
	defer holder.Release()

	err = locks.Do(ctx, "account-7", func(context.Context) error { return nil })
	var (
		held   *core.NotAcquiredError
		lost   *core.LostError
		failed *core.StoreError
	)
	switch {
	case err == nil:
		fmt.Println("done")
	case errors.As(err, &lost):
		fmt.Println("the lease was lost, and the callback failed:", lost.Err)
	case errors.As(err, &held) && held.Key == "account-7":
		fmt.Println("answer with", held.HTTPStatus(), held.Code())
	case errors.As(err, &failed):
		fmt.Println("the store failed:", failed.Err)
	default:
		fmt.Println("the callback failed, or ctx ended:", err)
	}
	// Output: answer with 409 LOCK_NOT_ACQUIRED
}

// TryDo does not wait, and says whether its callback ran: for work that one
// machine of many has to do.
func ExampleStrategy_TryDo() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{})
	if err != nil {
		panic(err)
	}
	cleanUp := func(ctx context.Context) {
		ran, err := locks.TryDo(ctx, "clean-up", func(context.Context) error {
			fmt.Println("cleaning up")
			return nil
		})
		if err != nil {
			fmt.Println("failed:", err)
		}
		fmt.Println("ran:", ran)
	}

	cleanUp(context.Background())

	other, err := locks.Acquire(context.Background(), "clean-up")
	if err != nil {
		panic(err)
	}
	defer other.Release()
	cleanUp(context.Background())
	// Output:
	// cleaning up
	// ran: true
	// ran: false
}

// A callback with a result.
func ExampleDo() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{})
	if err != nil {
		panic(err)
	}
	price, err := core.Do(context.Background(), locks, "price-list", func(context.Context) (float64, error) {
		return 9.95, nil
	})
	fmt.Println(price, err)
	// Output: 9.95 <nil>
}

// Work that does not fit into a callback holds a Lease.
func ExampleStrategy_Acquire() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{Wait: core.WaitForever})
	if err != nil {
		panic(err)
	}
	// The time-out is about the waiting: the lease goes on after it.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	lease, err := locks.Acquire(ctx, "shard-3")
	if err != nil {
		panic(err)
	}
	defer lease.Release()

	work := lease.Context(context.Background()) // ends when the lease does
	token, _ := core.TokenFor(work, "shard-3")
	fmt.Println(lease.Key(), token == lease.Token(), work.Err())

	if err := lease.Release(); err != nil {
		fmt.Println("lost or not released:", err)
	}
	fmt.Println(context.Cause(work))
	// Output:
	// shard-3 true <nil>
	// lease released
}

// account stands for a row that a lock protects. Its write is
//
//	UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2
type account struct {
	mu             sync.Mutex
	balance, fence int64
}

func (a *account) write(balance, token int64) (updated bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fence > token {
		return false
	}
	a.balance, a.fence = balance, token
	return true
}

// The fencing recipe: the protected resource keeps the highest token that it
// has seen and refuses a lower one. That is what stops a holder who was paused
// for longer than his lease, and does not know it yet.
func ExampleTokenFor() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	var row account // fence bigint NOT NULL DEFAULT 0

	var paused int64 // the token of a holder who is about to be suspended
	_ = locks.Do(ctx, "account-7", func(ctx context.Context) error {
		paused, _ = core.TokenFor(ctx, "account-7")
		return nil
	})
	_ = locks.Do(ctx, "account-7", func(ctx context.Context) error {
		token, _ := core.TokenFor(ctx, "account-7")
		fmt.Println("successor writes:", row.write(100, token))
		fmt.Println("and once more:", row.write(150, token))
		return nil
	})
	fmt.Println("the paused one wakes up and writes:", row.write(7, paused))
	fmt.Println("balance:", row.balance)
	// Output:
	// successor writes: true
	// and once more: true
	// the paused one wakes up and writes: false
	// balance: 150
}

// Token is the innermost lock's, TokenFor that of the lock one asks for.
func ExampleToken() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{})
	if err != nil {
		panic(err)
	}
	_ = locks.Do(context.Background(), "order-1", func(ctx context.Context) error {
		return locks.Do(ctx, "customer-9", func(ctx context.Context) error {
			innermost, _ := core.Token(ctx)
			order, _ := core.TokenFor(ctx, "order-1")
			customer, _ := core.TokenFor(ctx, "customer-9")
			fmt.Println(innermost == customer, order < customer)
			return nil
		})
	})
	// Output: true true
}

// Hooks feed metrics and traces.
func ExampleHooks() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{
		Name: "reports",
		Hooks: core.Hooks{
			Acquired: func(_ context.Context, e core.Event) { fmt.Println(e.Name, "acquired", e.Key, "tries:", e.Tries) },
			Rejected: func(_ context.Context, e core.Event) { fmt.Println(e.Name, "rejected", e.Key) },
			Released: func(_ context.Context, e core.Event) { fmt.Println(e.Name, "released", e.Key) },
		},
	})
	if err != nil {
		panic(err)
	}
	_ = locks.Do(context.Background(), "2026-11", func(context.Context) error {
		_, err := locks.TryDo(context.Background(), "2026-11", func(context.Context) error { return nil })
		return err
	})
	// Output:
	// reports acquired 2026-11 tries: 1
	// reports rejected 2026-11
	// reports released 2026-11
}

// prefixed is a wrapper that changes keys. It has no Unwrap: what the inner
// store can do with keys, it cannot do with these.
type prefixed struct {
	core.LockStore
	prefix string
}

// logged is a wrapper that passes keys on unchanged.
type logged struct{ core.LockStore }

func (l logged) Unwrap() core.LockStore { return l.LockStore }

// Capability finds what a store can do besides, through wrappers.
func ExampleCapability() {
	store, _ := memory.New(memory.Options{})
	notifier, ok := core.Capability[core.Notifier](logged{store})
	fmt.Println(ok, notifier == core.Notifier(store))
	_, ok = core.Capability[core.Notifier](prefixed{store, "tests/"})
	fmt.Println(ok)
	// Output:
	// true true
	// false
}

// An operator may be shown the label of an owner, and nothing else of it.
func ExampleOwnerLabel() {
	fmt.Println(core.OwnerLabel("web-3/4711/0123456789abcdef0123456789abcdef"))
	// Output: web-3/4711
}

// IsRejection tells "somebody else does it" from what went wrong.
func ExampleIsRejection() {
	store, _ := memory.New(memory.Options{})
	locks, err := core.NewStrategy(store, core.Options{})
	if err != nil {
		panic(err)
	}
	other, _ := locks.Acquire(context.Background(), "import")
	defer other.Release()

	err = locks.Do(context.Background(), "import", func(context.Context) error { return nil })
	fmt.Println(core.IsRejection(err))
	// Output: true
}
