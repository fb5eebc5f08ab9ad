package etcdstore

import (
	"context"
	"iter"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/leasekit/leasekit/core"
)

const (
	// inspectPage is how many keys one request of Leases reads.
	inspectPage = 500
	// inspectAtOnce is how many leases it asks the rest of at once. etcd tells
	// it of one lease a request.
	inspectAtOnce = 16
)

// Leases implements [core.Inspector]. Keys come in the order of their bytes. It
// costs a read for 500 keys, and one request for each, as etcd tells in no
// other way how long a lease still lives; that is in whole seconds, rounded
// up. Keys with a foreign value are left out.
func (s *Store) Leases(ctx context.Context, q core.LeaseQuery) iter.Seq2[core.LeaseInfo, error] {
	return func(yield func(core.LeaseInfo, error) bool) {
		if err := q.Check(); err != nil {
			yield(core.LeaseInfo{}, err)
			return
		}
		err := s.usable(ctx)
		first, opts := s.prefix+q.Prefix, []clientv3.OpOption{clientv3.WithLimit(inspectPage)}
		if q.Key != "" {
			first = s.prefix + q.Key
		} else {
			opts = append(opts, clientv3.WithRange(clientv3.GetPrefixRangeEnd(first)))
		}
		for err == nil {
			var resp *clientv3.GetResponse
			if resp, err = s.client.Get(ctx, first, opts...); err != nil {
				break
			}
			infos, errs := s.inspect(ctx, resp.Kvs)
			for i, info := range infos {
				if errs[i] != nil {
					err = errs[i]
					break
				}
				if info.Key != "" && !yield(info, nil) {
					return
				}
			}
			if !resp.More || err != nil {
				break
			}
			first = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
		}
		if err != nil {
			yield(core.LeaseInfo{}, s.wrap(ctx, err))
		}
	}
}

// inspect describes keys. One that is no lock, or has ended, has an empty Key.
func (s *Store) inspect(ctx context.Context, kvs []*mvccpb.KeyValue) ([]core.LeaseInfo, []error) {
	infos, errs := make([]core.LeaseInfo, len(kvs)), make([]error, len(kvs))
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, inspectAtOnce)
	for i, kv := range kvs {
		if foreign("", kv) != nil {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			info, live, err := s.describe(ctx, kv)
			if live {
				infos[i] = info
			}
			errs[i] = err
			<-slots
		})
	}
	return infos, errs
}

// describe tells what an operator may see of a key. live is false if its lease
// has ended meanwhile.
func (s *Store) describe(ctx context.Context, kv *mvccpb.KeyValue) (info core.LeaseInfo, live bool, err error) {
	info = core.LeaseInfo{
		Key:   strings.TrimPrefix(string(kv.Key), s.prefix),
		Label: core.OwnerLabel(string(kv.Value)),
		Token: kv.CreateRevision,
	}
	resp, err := s.client.TimeToLive(ctx, clientv3.LeaseID(kv.Lease))
	if err != nil || resp.TTL < 0 {
		return info, false, err
	}
	// etcd rounds down, and would say of a lease in its last second that it
	// has ended.
	info.Left = time.Duration(min(resp.TTL+1, resp.GrantedTTL)) * time.Second
	return info, true, nil
}

// Break implements [core.Breaker].
func (s *Store) Break(ctx context.Context, key string) (core.LeaseInfo, bool, error) {
	if err := core.CheckKey(key); err != nil {
		return core.LeaseInfo{}, false, err
	}
	if err := s.usable(ctx); err != nil {
		return core.LeaseInfo{}, false, err
	}
	name := s.prefix + key
	kv, err := s.get(ctx, name)
	for kv != nil && err == nil {
		if err = foreign(name, kv); err != nil {
			break
		}
		var was core.LeaseInfo
		if was, _, err = s.describe(ctx, kv); err != nil {
			break
		}
		// The lease that was looked at, and not its successor.
		var resp clientv3.OpResponse
		var n tally
		resp, n, err = s.do(ctx, s.timing.patience, clientv3.OpTxn(
			[]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(name), "=", kv.CreateRevision)},
			[]clientv3.Op{clientv3.OpDelete(name)},
			[]clientv3.Op{clientv3.OpGet(name)}))
		if err != nil {
			break
		}
		txn := resp.Txn()
		if txn.Succeeded || !n.once() { // by an earlier delivery, perhaps
			s.tries.free(name)
			return was, true, nil
		}
		kv = found(txn)
	}
	return core.LeaseInfo{}, false, s.wrap(ctx, err)
}
