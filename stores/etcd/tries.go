package etcdstore

import (
	"context"
	"hash/maphash"
	"sync"
	"time"
)

const (
	// maxHeld is how many keys the store remembers to have seen held. More
	// than these cost a Raft entry for each try.
	maxHeld = 1 << 16

	// tryPatience is how long a call waits for another's answer before it
	// sends a request of its own: that other one may be stuck.
	tryPatience = 250 * time.Millisecond
)

// tries is what a store knows about keys that its callers try to get: which of
// them a transaction on its way is about, and which were held when last seen.
//
// When a key is released all who wait for it here try at once. One of them sends
// its transaction; the others wait for its answer, and then read the key, all in
// one request. The answer itself is no answer for them: it may be older than
// their calls.
type tries struct {
	mu   sync.Mutex
	m    map[string]*try
	seed maphash.Seed
	held map[uint64]struct{} // hashes of keys; a collision costs a read
}

// try is a transaction that tries to put a key.
type try struct {
	done chan struct{} // nil until somebody waits
}

// step is what a call has to do next.
type step uint8

const (
	stepSend  step = iota // send the transaction, then call leave
	stepAlone             // the same, and others do not wait for it
	stepWait              // wait for the answer to another call
	stepLook              // read the key
)

func (ts *tries) init() {
	ts.m = make(map[string]*try)
	ts.seed = maphash.MakeSeed()
	ts.held = make(map[uint64]struct{})
}

// enter tells what a call for the key called name has to do next. waited and
// looked say that it has done that before.
func (ts *tries) enter(name string, waited, looked bool) (step, *try) {
	hash := maphash.String(ts.seed, name)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t := ts.m[name]
	if t != nil && !waited {
		if t.done == nil {
			t.done = make(chan struct{})
		}
		return stepWait, t
	}
	if _, held := ts.held[hash]; held && !looked {
		return stepLook, nil
	}
	if t != nil {
		return stepAlone, nil
	}
	t = new(try)
	ts.m[name] = t
	return stepSend, t
}

// leave ends the try t, nil if others did not wait for it. held tells whether
// the key was seen held, by whomever.
func (ts *tries) leave(name string, t *try, held bool) {
	hash := maphash.String(ts.seed, name)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if held {
		ts.seenLocked(hash)
	}
	if t == nil {
		return
	}
	delete(ts.m, name)
	if t.done != nil {
		close(t.done)
	}
}

func (ts *tries) seenLocked(hash uint64) {
	if len(ts.held) >= maxHeld {
		for other := range ts.held { // any one
			delete(ts.held, other)
			break
		}
	}
	ts.held[hash] = struct{}{}
}

// free notes that the key was released, or was seen to be gone: the next try
// need not look first.
func (ts *tries) free(name string) {
	hash := maphash.String(ts.seed, name)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	delete(ts.held, hash)
}

// wait waits for the end of the try, for a while.
func (t *try) wait(ctx context.Context, while time.Duration) error {
	patience := time.NewTimer(while)
	defer patience.Stop()
	select {
	case <-t.done:
		return nil
	case <-patience.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
