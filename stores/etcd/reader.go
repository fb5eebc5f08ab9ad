package etcdstore

import (
	"context"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// maxRead is how many keys one transaction reads; etcd's default limit is
	// 128 operations.
	maxRead = 64
	// readers is how many of these are on their way at once.
	readers = 4
)

// reader reads keys, many in one request. A read that finds others on their way
// goes out as soon as one of them has returned, with all that have come since:
// alone there is no delay, together the requests get fewer.
type reader struct {
	s *Store

	mu      sync.Mutex
	queue   []*read
	workers int
}

// read is one key that somebody wants to read.
type read struct {
	name string
	gone bool // nobody waits for it any more
	in   *batch

	done chan struct{}
	kv   *mvccpb.KeyValue
	err  error
}

// batch is a request for some keys.
type batch struct {
	cancel  context.CancelFunc
	waiting int // reads that are not gone
}

func (r *reader) init(s *Store) { r.s = s }

// get reads a key, linearizably. nil means that there is none.
func (r *reader) get(ctx context.Context, name string) (*mvccpb.KeyValue, error) {
	rd := &read{name: name, done: make(chan struct{})}
	r.mu.Lock()
	if r.workers < readers {
		if !r.s.spawn(r.work) {
			r.mu.Unlock()
			return nil, ErrClosed
		}
		r.workers++
	}
	r.queue = append(r.queue, rd)
	r.mu.Unlock()

	select {
	case <-rd.done:
		return rd.kv, rd.err
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rd.gone = true
	if b := rd.in; b != nil {
		b.waiting--
		if b.waiting == 0 {
			b.cancel()
		}
	}
	return nil, ctx.Err()
}

// work sends requests until nothing is queued.
func (r *reader) work() {
	for {
		ctx, cancel := context.WithCancel(r.s.ctx)
		reads := r.take(&batch{cancel: cancel})
		if len(reads) > 0 {
			r.read(ctx, reads)
		}
		cancel()
		if len(reads) == 0 {
			return
		}
	}
}

// take moves reads from the queue to b. If there are none the worker ends.
func (r *reader) take(b *batch) []*read {
	r.mu.Lock()
	defer r.mu.Unlock()
	var reads []*read
	for len(r.queue) > 0 && len(reads) < maxRead {
		rd := r.queue[0]
		r.queue[0] = nil
		r.queue = r.queue[1:]
		if !rd.gone {
			rd.in = b
			reads = append(reads, rd)
		}
	}
	b.waiting = len(reads)
	if len(reads) == 0 {
		r.workers--
	}
	return reads
}

// read reads, and tells those who wait.
func (r *reader) read(ctx context.Context, reads []*read) {
	if len(reads) == 1 {
		kv, err := r.s.get(ctx, reads[0].name)
		reads[0].end(kv, r.reason(err))
		return
	}
	gets := make([]clientv3.Op, len(reads))
	for i, rd := range reads {
		gets[i] = clientv3.OpGet(rd.name)
	}
	resp, _, err := r.s.do(ctx, r.s.timing.patience, clientv3.OpTxn(nil, gets, nil))
	if err != nil && isRefusal(err) {
		// One key that may not be read must not fail the others.
		for _, rd := range reads {
			kv, err := r.s.get(ctx, rd.name)
			rd.end(kv, r.reason(err))
		}
		return
	}
	for i, rd := range reads {
		var kv *mvccpb.KeyValue
		if err == nil {
			if kvs := resp.Txn().Responses[i].GetResponseRange().GetKvs(); len(kvs) > 0 {
				kv = kvs[0]
			}
		}
		rd.end(kv, r.reason(err))
	}
}

// reason is what those are told whose request failed with err. They are not
// told of the request's own context, which ends when the store is closed.
func (r *reader) reason(err error) error {
	if err != nil && r.s.ctx.Err() != nil {
		return ErrClosed
	}
	return err
}

func (rd *read) end(kv *mvccpb.KeyValue, err error) {
	rd.kv, rd.err = kv, err
	close(rd.done)
}
