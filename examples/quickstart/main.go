// Quickstart shows in about ten seconds what leasekit is for. Three workers
// deposit into one account, one at a time. Then the machine of one of them is
// suspended in the middle of its work, for longer than its lease lives; when it
// wakes up, its write is refused.
//
//	go run ./examples/quickstart
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/stores/memory"
)

const (
	ttl      = 2 * time.Second
	key      = "account/42"
	deposit  = 10
	rounds   = 3
	thinking = 400 * time.Millisecond
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func run() error {
	store, err := memory.New(memory.Options{})
	if err != nil {
		return err
	}
	var account Account
	say("three workers, %d deposits each, one lock on %q; a lease lives %v unless renewed", rounds, key, ttl)

	var workers sync.WaitGroup
	errs := make(chan error, 3)
	for _, name := range []string{"ann", "ben", "cat"} {
		workers.Go(func() { errs <- work(store, name, &account) })
	}
	workers.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return err
		}
	}
	say("balance %d: no deposit overwrote another one", account.Balance())

	say("")
	say("now the machine of ben is suspended in the middle of a deposit")
	if err := suspended(store, &account); err != nil {
		return err
	}
	if want := (3*rounds + 1) * deposit; account.Balance() != want {
		return fmt.Errorf("balance %d, want %d", account.Balance(), want)
	}
	say("balance %d: the late write changed nothing", account.Balance())
	return nil
}

// work deposits some times, each time under the lock.
func work(store core.LockStore, name string, account *Account) error {
	locks, err := core.NewStrategy(store, core.Options{TTL: ttl, Wait: core.WaitForever, Label: name})
	if err != nil {
		return err
	}
	for range rounds {
		err := locks.Do(context.Background(), key, func(ctx context.Context) error {
			token, _ := core.TokenFor(ctx, key)
			balance := account.Balance()
			time.Sleep(thinking) // without the lock, another worker would deposit now
			say("%s holds the lock, token …%04d: %d -> %d", name, token%10_000, balance, balance+deposit)
			return account.Write(balance+deposit, token)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// suspended plays a holder that stops in the middle of its callback, and whose
// renewals stop with it.
func suspended(store core.LockStore, account *Account) error {
	machine := &suspendable{LockStore: store}
	ben, err := core.NewStrategy(machine, core.Options{TTL: ttl, Label: "ben", Hooks: core.Hooks{
		Lost: func(_ context.Context, e core.Event) { say("ben's strategy: %v", e.Err) },
	}, Logger: quiet})
	if err != nil {
		return err
	}
	cat, err := core.NewStrategy(store, core.Options{TTL: ttl, Wait: core.WaitForever, Label: "cat"})
	if err != nil {
		return err
	}

	successor := make(chan error, 1)
	err = ben.Do(context.Background(), key, func(ctx context.Context) error {
		token, _ := core.TokenFor(ctx, key)
		balance := account.Balance()
		say("ben holds the lock, token …%04d, read balance %d, and is suspended for %v", token%10_000, balance, 2*ttl)
		machine.asleep.Store(true)
		go func() {
			successor <- cat.Do(context.Background(), key, func(ctx context.Context) error {
				token, _ := core.TokenFor(ctx, key)
				say("cat got the lock when ben's lease ran out, token …%04d: %d -> %d", token%10_000, account.Balance(), account.Balance()+deposit)
				return account.Write(account.Balance()+deposit, token)
			})
		}()
		time.Sleep(2 * ttl)
		machine.asleep.Store(false)
		say("ben wakes up and, without looking at its cancelled context, writes %d with its old token", balance+deposit)
		return account.Write(balance+deposit, token)
	})
	say("ben's Do returns: %v", err)
	if !errors.Is(err, core.ErrLost) || !errors.Is(err, ErrStaleToken) {
		return fmt.Errorf("expected a lost lease and a refused write, got: %w", err)
	}
	return <-successor
}

// ErrStaleToken is how an account refuses a writer whose lease is over.
var ErrStaleToken = errors.New("stale token: a later holder has written already")

// Account is a resource that fences itself: it remembers the highest token that
// it has seen and refuses a lower one. In SQL that is
//
//	UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2
type Account struct {
	mu      sync.Mutex
	balance int
	fence   int64
}

// Balance returns the balance.
func (a *Account) Balance() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.balance
}

// Write sets the balance, for the holder of token.
func (a *Account) Write(balance int, token int64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if token < a.fence {
		return ErrStaleToken
	}
	a.balance, a.fence = balance, token
	return nil
}

// suspendable is a store as seen from a machine that can be suspended:
// meanwhile no renewal leaves it.
type suspendable struct {
	core.LockStore
	asleep atomic.Bool
}

// Renew implements [core.LockStore].
func (s *suspendable) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if s.asleep.Load() {
		<-ctx.Done()
		return false, ctx.Err()
	}
	return s.LockStore.Renew(ctx, key, owner, ttl)
}
