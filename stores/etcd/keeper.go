package etcdstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
)

// stalled is after how long without any answer a stream counts as broken, and
// another one is opened, to another member if there is one. It is more than the
// server takes to revoke an expired lease that stands in front.
const stalled = time.Second

var (
	errSequence  = errors.New("answer for another lease than the one asked for")
	errNeighbour = errors.New("ended by another lease's error")
)

// keeper sends the keep-alives of a store on one stream. The server answers them
// in order, so that thousands can be on their way at once.
//
// One goroutine opens the stream and sends, so that a connection that takes
// nothing holds up no caller; one for each stream receives.
type keeper struct {
	s    *Store
	open func(context.Context) (pb.Lease_LeaseKeepAliveClient, error)
	wake chan struct{}

	mu      sync.Mutex
	queue   []*beat // to be sent
	running bool
	stream  *stream // that takes what is sent; nil: none
}

// stream is one stream and what was sent on it.
type stream struct {
	cancel context.CancelFunc
	flight []*beat // sent and not answered, in order
	// progress is when the stream was last heard of: opened, or answered, or
	// not yet in use.
	progress time.Time
}

// beat is one keep-alive.
type beat struct {
	lease *lease
	sent  instant
	gone  bool // nobody waits for it any more

	done  chan struct{}
	alive bool
	err   error
}

func (k *keeper) init(s *Store, open func(context.Context) (pb.Lease_LeaseKeepAliveClient, error)) {
	k.s, k.open = s, open
	k.wake = make(chan struct{}, 1)
}

// send begins a keep-alive of l. The caller has to call wait or abandon.
func (k *keeper) send(l *lease) *beat {
	b := &beat{lease: l, sent: k.s.clock(), done: make(chan struct{})}
	k.enqueue(b)
	return b
}

func (k *keeper) enqueue(b *beat) {
	k.mu.Lock()
	if !k.running {
		if !k.s.spawn(k.run) {
			k.mu.Unlock()
			b.end(false, ErrClosed)
			return
		}
		k.running = true
	}
	k.queue = append(k.queue, b)
	k.mu.Unlock()
	select {
	case k.wake <- struct{}{}:
	default: // it is going to look
	}
}

// wait waits for the answer. It is true if the lease lives its whole time from
// when the keep-alive was sent; false if it is gone, or if the answer came so late
// that the lease may have been about to be revoked, or in another term. An error means
// that there was no answer; those that may be over soon are tried again.
func (k *keeper) wait(ctx context.Context, b *beat) (bool, error) {
	look := time.NewTicker(stalled)
	defer look.Stop()
	for n := 1; ; {
		select {
		case <-b.done:
		case <-ctx.Done():
			k.abandon(b)
			return false, ctx.Err()
		case <-look.C:
			k.look()
			continue
		}
		if b.err == nil || !worthAnotherStream(b.err) {
			return b.alive, b.err
		}
		if err := pause(ctx, n); err != nil {
			return false, errors.Join(ctx.Err(), b.err)
		}
		n++
		b = k.send(b.lease)
	}
}

// worthAnotherStream reports whether another stream may do better than the one
// that ended with err.
func worthAnotherStream(err error) bool {
	if errors.Is(err, errSequence) || errors.Is(err, errNeighbour) {
		return true
	}
	switch code, etcd := codeOf(err); code {
	case codes.Unavailable, codes.Canceled, codes.Internal:
		return true
	case codes.Unauthenticated, codes.InvalidArgument:
		return etcd // the token or the user's rights are old; a new stream asks anew
	default:
		return false
	}
}

// abandon says that nobody waits for b any more.
func (k *keeper) abandon(b *beat) {
	k.mu.Lock()
	b.gone = true
	k.mu.Unlock()
	k.look()
}

// look gives the stream up if it has stalled. Whoever waits for it is told, and
// sends on another one.
func (k *keeper) look() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stream != nil && len(k.stream.flight) > 0 && time.Since(k.stream.progress) >= stalled {
		k.stream.cancel()
	}
}

// run opens streams and sends what is queued, until Close.
func (k *keeper) run() {
	var wire pb.Lease_LeaseKeepAliveClient
	for {
		select {
		case <-k.wake:
		case <-k.s.ctx.Done():
			k.mu.Lock()
			for _, b := range k.queue {
				b.end(false, ErrClosed)
			}
			k.queue, k.running = nil, false
			k.mu.Unlock()
			return
		}
		for {
			batch, ready := k.take()
			if len(batch) == 0 {
				break
			}
			if !ready {
				var err error
				if wire, err = k.connect(batch); err != nil {
					for _, b := range batch {
						b.end(false, k.reason(err))
					}
					continue
				}
			}
			for _, b := range batch {
				if wire.Send(&pb.LeaseKeepAliveRequest{ID: int64(b.lease.id)}) != nil {
					break // the receiver gets the error, and ends all that is in flight
				}
			}
		}
	}
}

// take takes what is queued. If there is a stream it is in flight on that from
// now on.
func (k *keeper) take() (batch []*beat, ready bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, b := range k.queue {
		if !b.gone {
			batch = append(batch, b)
		}
	}
	k.queue = nil
	if k.stream == nil {
		return batch, false
	}
	if len(k.stream.flight) == 0 {
		k.stream.progress = time.Now()
	}
	k.stream.flight = append(k.stream.flight, batch...)
	return batch, true
}

// connect opens a stream with batch in flight.
func (k *keeper) connect(batch []*beat) (pb.Lease_LeaseKeepAliveClient, error) {
	ctx, cancel := context.WithCancel(k.s.ctx)
	st := &stream{cancel: cancel, flight: batch, progress: time.Now()}
	k.mu.Lock()
	k.stream = st // so that it can be given up while it is being opened
	k.mu.Unlock()
	wire, err := k.open(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil && !k.s.spawn(func() { k.receive(st, wire) }) {
		err = ErrClosed
	}
	if err != nil {
		k.stream = nil
		cancel()
		return nil, err
	}
	st.progress = time.Now()
	return wire, nil
}

// receive ends what is in flight on st, as answers come.
func (k *keeper) receive(st *stream, wire pb.Lease_LeaseKeepAliveClient) {
	defer st.cancel()
	for {
		resp, err := wire.Recv()
		t := k.s.clock()
		k.mu.Lock()
		if err == nil && (len(st.flight) == 0 || int64(st.flight[0].lease.id) != resp.ID) {
			err = errSequence
		}
		if err != nil {
			k.stream = nil
			k.mu.Unlock()
			for i, b := range st.flight {
				if i > 0 && !worthAnotherStream(err) {
					// It was about the first one alone: a lease whose key
					// may not be written any more, say.
					err = errNeighbour
				}
				b.end(false, k.reason(err))
			}
			return
		}
		b := st.flight[0]
		st.flight[0] = nil
		st.flight = st.flight[1:]
		st.progress = time.Now()
		k.mu.Unlock()

		// etcd decides that a lease has expired, and revokes it a little
		// later. A keep-alive in between is answered with yes, in vain. Not if
		// the answer is here before the lease could have expired. For the term
		// see lease.
		alive := resp.TTL > 0 && b.lease.life(t) > 0 && resp.Header.GetRaftTerm() == b.lease.term
		k.s.observe(resp.Header, position{})
		if alive {
			b.lease.extend(b.sent)
		}
		b.end(alive, nil)
	}
}

// reason is what those are told whose stream ended with err.
func (k *keeper) reason(err error) error {
	if k.s.ctx.Err() != nil {
		return ErrClosed
	}
	return fmt.Errorf("keep-alive stream: %w", err)
}

func (b *beat) end(alive bool, err error) {
	b.alive, b.err = alive, err
	close(b.done)
}
