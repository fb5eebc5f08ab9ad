// Package core is the heart of leasekit: the [LockStore] interface that every
// backend implements, and the [Strategy] that runs a callback only while it
// holds a lease on a key.
//
//	strategy, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second})
//	…
//	err = strategy.Do(ctx, "nightly-report", func(ctx context.Context) error {
//		token, _ := core.TokenFor(ctx, "nightly-report")
//		return writeReport(ctx, token)
//	})
//
// The strategy gives every try a fresh random owner, waits for a held key,
// renews the lease by a third of its ttl, cancels the callback's context when
// the lease is lost, and releases only what it owns. Each acquisition carries a
// fencing token that grows, so that the protected resource can refuse a holder
// that was paused and wakes up late.
//
// What stores and the strategy promise is written down in docs/contract.md;
// package conformance checks it on any store.
package core
