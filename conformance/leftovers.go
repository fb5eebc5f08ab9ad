package conformance

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/leasekit/leasekit/core"
)

func leftoverRules() []Rule {
	return group("Leftovers", Rule{
		Name:     "NoLeaks",
		Sentence: "No goroutine outlives the call, except what New documents and Close stops, and one driver call whose ctx has ended, which ends within the client's own I/O timeout.",
		Busy:     true,
		Check:    checkNoLeaks,
	}, Rule{
		Name:     "ConnectionFreeWhileHeld",
		Sentence: "Stores never hold a connection while a callback runs.",
		Needs:    needs("OpenOneConnection", func(c *Config) bool { return c.OpenOneConnection != nil }),
		Check:    checkConnectionFreeWhileHeld,
	})
}

// ioTimeout is the time that a client library gets to give up a call whose ctx
// has ended: go-redis, pgx and the MongoDB driver need 5 s or less by default,
// on a machine that is not busy.
const ioTimeout = 30 * time.Second

// family counts the goroutines that were started, directly or not, by f, and
// no others: goroutines inherit the profiler's labels of the one that starts
// them. So other tests may run meanwhile.
type family struct{ id string }

func newFamily() *family { return &family{id: rand.Text()} }

func (fam *family) do(ctx context.Context, f func(ctx context.Context)) {
	pprof.Do(ctx, pprof.Labels("conformance", fam.id), f)
}

// alive returns how many goroutines of the family there are, and their stacks.
func (fam *family) alive() (n int, stacks string) {
	var b bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&b, 1); err != nil {
		return 0, err.Error()
	}
	var found strings.Builder
	for record := range strings.SplitSeq(b.String(), "\n\n") {
		if !strings.Contains(record, fam.id) {
			continue
		}
		count, _, _ := strings.Cut(strings.TrimSpace(record), " ")
		c, err := strconv.Atoi(count)
		if err != nil {
			// The head of the profile, a line, stands before the first record.
			_, rest, _ := strings.Cut(record, "\n")
			count, _, _ = strings.Cut(rest, " ")
			c, _ = strconv.Atoi(count)
		}
		n += c
		found.WriteString("\n" + record)
	}
	return n, found.String()
}

// mustFall waits until at most limit goroutines are left.
func (fam *family) mustFall(t *T, limit int, after string) {
	deadline := time.Now().Add(ioTimeout)
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		n, stacks := fam.alive()
		if n <= limit {
			return
		}
		if time.Now().After(deadline) {
			t.Broken(fmt.Sprintf("%d goroutines %v after %s:%s", n, ioTimeout, after, stacks), fmt.Sprintf("at most %d", limit))
		}
		t.Sleep(pause)
	}
}

func checkNoLeaks(t *T) {
	// What a client keeps for itself does not grow with the number of calls,
	// nor with that of clients that were closed. More than this is growth.
	const calls, opens, kept = 100, 20, 10

	fam := newFamily()
	fam.do(t.Context(), func(ctx context.Context) {
		store := t.Open()
		use := func(n int) {
			for range n {
				useOnce(t, ctx, store)
			}
		}
		use(5)
		n, _ := fam.alive()
		use(calls)
		fam.mustFall(t, n+kept, fmt.Sprintf("%d acquisitions, renewals and releases, some of them given up", calls))
	})

	fam = newFamily()
	fam.do(t.Context(), func(ctx context.Context) {
		for range opens {
			store, closeStore := t.OpenClosable()
			useOnce(t, ctx, store)
			closeStore()
		}
		fam.mustFall(t, kept, fmt.Sprintf("%d clients had been opened and closed", opens))
	})
}

// useOnce calls every method, with every kind of answer.
func useOnce(t *T, ctx context.Context, store core.LockStore) {
	lease := t.Acquire(store, t.Key(), t.Long())
	t.Try(store, lease.Key, t.Owner(), t.Long())
	lease.MustRenew(t.Long())
	t.MustNotRenew(store, lease.Key, t.Owner(), t.Long(), "a stranger")
	lease.MustRelease()
	lease.MustRelease()

	owner := t.Owner()
	short, cancel := context.WithTimeout(ctx, 20*time.Microsecond)
	_, _ = store.Acquire(short, lease.Key, owner, t.TTL())
	_, _ = store.Renew(short, lease.Key, owner, t.TTL())
	_ = store.Release(short, lease.Key, owner)
	cancel()
	t.MustRelease(store, lease.Key, owner)
	// Left to end by itself.
	t.Acquire(store, t.Key(), core.MinTTL)
}

func checkConnectionFreeWhileHeld(t *T) {
	store := t.Config.OpenOneConnection(t.rec)
	ctx, cancel := context.WithTimeout(t.Context(), ioTimeout)
	defer cancel()
	var held []*Lease
	for i := range 5 {
		try, err := t.tryContext(ctx, store, t.Key(), t.Owner(), t.Long())
		if err != nil || !try.Acquired {
			t.Broken(fmt.Sprintf("with one connection and %d leases held, Acquire of a free key: acquired %v, error %v", i, try.Acquired, err), "acquired")
		}
		held = append(held, &Lease{t: t, Store: store, Try: try})
	}
	// A waiter that listens must not take the connection either.
	if n, ok := core.Capability[core.Notifier](store); ok {
		if _, stop, err := n.Subscribe(ctx, held[0].Key); err == nil {
			defer stop()
		}
	}
	t.Go(len(held), func(i int) {
		lease := held[i]
		if renewed, err := store.Renew(ctx, lease.Key, lease.Owner, t.Long()); err != nil || !renewed {
			t.Broken(fmt.Sprintf("with one connection and %d leases held, Renew: %v, error %v", len(held), renewed, err), "true")
		}
		if err := store.Release(ctx, lease.Key, lease.Owner); err != nil {
			t.Broken(fmt.Sprintf("with one connection and %d leases held, Release: error %v", len(held), err), "nil")
		}
	})
}
