// Package conformance is a test suite for stores of leasekit: it checks every
// sentence of docs/contract.md on a real backend, yours included.
//
// A store's author writes one function that opens the store:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, conformance.Config{
//			Open: func(t testing.TB) core.LockStore {
//				store, err := mystore.New(…)
//				if err != nil {
//					t.Fatal(err)
//				}
//				t.Cleanup(func() { store.Close() })
//				return store
//			},
//		})
//	}
//
// # What a failure means
//
// A rule is broken only if the times that were measured around the calls prove
// it: a lease counts as too short if another client had it, answer in hand,
// before ttl had passed since the first request was sent, and as too long if a
// try that was sent after ttl and Slack was refused. When a busy machine made a
// proof impossible the rule is tried again with longer leases, and reported as
// not judged, which fails the test too, if that did not help.
//
// The suite itself is tested with broken stores, each with one mistake that
// somebody made in production: docs/conformance.md lists them and the rules
// that catch them.
package conformance
