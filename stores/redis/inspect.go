package redisstore

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/await"
)

// pageSize is how many keys the server is asked to look at in one SCAN: some
// 100 µs of its time.
const pageSize = 500

// errReply says that a script answered in a form that it never has.
var errReply = errors.New("a reply of unexpected form")

// Leases implements [core.Inspector]: SCAN over the keys of the store, on every
// master of a cluster, and a look at each record by a script. The server goes
// through all of its keys for it, other applications' included, in small steps.
//
// SCAN may return a key twice. So that no lease is seen twice, a 64-bit hash of
// each key is kept while the sequence is read, some 40 bytes a lease.
func (s *Store) Leases(ctx context.Context, q core.LeaseQuery) iter.Seq2[core.LeaseInfo, error] {
	return func(yield func(core.LeaseInfo, error) bool) {
		if err := q.Check(); err != nil {
			yield(core.LeaseInfo{}, err)
			return
		}
		if q.Key != "" {
			list, err := s.runList(ctx, s.inspect, q.Key)
			if err == nil && len(list) == 0 {
				return
			}
			yield(leaseInfo(q.Key, list, err))
			return
		}
		if err := s.scan(ctx, q.Prefix, yield); err != nil {
			yield(core.LeaseInfo{}, explain(ctx, s.prefix+q.Prefix, err))
		}
	}
}

// Break implements [core.Breaker] with one EVALSHA. If go-redis sends it again
// because the reply was lost, the second delivery gets the first one's answer, and
// spares whoever has the key by then.
func (s *Store) Break(ctx context.Context, key string) (was core.LeaseInfo, broken bool, err error) {
	if err := core.CheckKey(key); err != nil {
		return core.LeaseInfo{}, false, err
	}
	list, err := s.runList(ctx, s.breaking, key, s.retention, newNonce())
	if err == nil && len(list) == 0 {
		return core.LeaseInfo{}, false, nil
	}
	was, err = leaseInfo(key, list, err)
	return was, err == nil, err
}

// leaseInfo makes the answer of a script, owner, token and microseconds left, a
// LeaseInfo.
func leaseInfo(key string, list []any, err error) (core.LeaseInfo, error) {
	if err != nil {
		return core.LeaseInfo{}, err
	}
	if len(list) == 3 {
		owner, isOwner := list[0].(string)
		token, isToken := list[1].(int64)
		left, isLeft := list[2].(int64)
		if isOwner && isToken && isLeft {
			return core.LeaseInfo{
				Key:   key,
				Label: core.OwnerLabel(owner),
				Token: token,
				Left:  time.Duration(left) * time.Microsecond,
			}, nil
		}
	}
	return core.LeaseInfo{}, fmt.Errorf("redis: %w", errReply)
}

// scan yields the live leases of all keys that begin with prefix until yield
// returns false.
func (s *Store) scan(ctx context.Context, prefix string, yield func(core.LeaseInfo, error) bool) error {
	nodes, err := await.Call(ctx, s.workers, func() ([]redis.Cmdable, error) { return s.masters(ctx) })
	if err != nil {
		return err
	}
	seen := map[uint64]struct{}{}
	seed := maphash.MakeSeed()
	pattern := globQuoter.Replace(s.prefix+prefix) + "*"
	for _, node := range nodes {
		for cursor, more := uint64(0), true; more; more = cursor != 0 {
			page, err := await.Call(ctx, s.workers, func() (scanPage, error) { return s.page(ctx, node, cursor, pattern) })
			if err != nil {
				return err
			}
			cursor = page.next
			for _, lease := range page.leases {
				hash := maphash.String(seed, lease.Key)
				if _, twice := seen[hash]; twice {
					continue
				}
				seen[hash] = struct{}{}
				if !yield(lease, nil) {
					return nil
				}
			}
		}
	}
	return nil
}

// globQuoter makes text match itself in a pattern of SCAN.
var globQuoter = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// masters returns a client for each server that has keys of its own.
func (s *Store) masters(ctx context.Context) ([]redis.Cmdable, error) {
	cluster, ok := inner[interface {
		ForEachMaster(ctx context.Context, fn func(ctx context.Context, client *redis.Client) error) error
	}](s.client)
	if !ok {
		// A server of a cluster has a part of the keys, and its client does not
		// know. Where one may not ask, there is nothing to be known.
		info, _ := s.client.ClusterInfo(ctx).Result()
		for line := range strings.Lines(info) {
			if n, ok := strings.CutPrefix(strings.TrimSpace(line), "cluster_size:"); ok && n != "0" && n != "1" {
				return nil, fmt.Errorf("redis: the client is not one of a cluster, and its server is one of %s masters, so that the list would lack keys: use a redis.ClusterClient", n)
			}
		}
		return []redis.Cmdable{s.client}, nil
	}
	var mu sync.Mutex
	var nodes []redis.Cmdable
	err := cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		nodes = append(nodes, node)
		return nil
	})
	return nodes, err
}

type scanPage struct {
	leases []core.LeaseInfo
	next   uint64 // cursor, 0 at the end
}

// page makes one step of SCAN and reads the records that it found.
func (s *Store) page(ctx context.Context, node redis.Cmdable, cursor uint64, pattern string) (scanPage, error) {
	names, next, err := node.ScanType(ctx, cursor, pattern, pageSize, "hash").Result()
	if err != nil {
		return scanPage{}, err
	}
	page := scanPage{next: next}
	if len(names) == 0 {
		return page, nil
	}
	lists, err := s.inspectAll(ctx, node, names)
	if err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		if err = node.ScriptLoad(ctx, inspectSource).Err(); err == nil {
			lists, err = s.inspectAll(ctx, node, names)
		}
	}
	if err != nil {
		return scanPage{}, err
	}
	for i, list := range lists {
		key := strings.TrimPrefix(names[i], s.prefix)
		if len(list) == 0 || core.CheckKey(key) != nil {
			continue // no lease, or nothing that this store could have written
		}
		lease, err := leaseInfo(key, list, nil)
		if err != nil {
			return scanPage{}, err
		}
		page.leases = append(page.leases, lease)
	}
	return page, nil
}

// inspectAll runs the script on each record, in one round trip. A foreign value
// beside the records is left out.
func (s *Store) inspectAll(ctx context.Context, node redis.Cmdable, names []string) ([][]any, error) {
	pipe := node.Pipeline()
	cmds := make([]*redis.SliceCmd, len(names))
	for i, name := range names {
		cmds[i] = redis.NewSliceCmd(ctx, "evalsha", s.inspect.digest, "1", name)
		_ = pipe.Process(ctx, cmds[i])
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	lists := make([][]any, len(names))
	for i, cmd := range cmds {
		list, err := cmd.Result()
		switch {
		case err == nil:
			lists[i] = list
		case redis.HasErrorPrefix(err, "FOREIGN"):
		case redis.HasErrorPrefix(err, "MOVED"), redis.HasErrorPrefix(err, "ASK"):
			// The slot has just moved away; the client knows where to.
			if lists[i], err = s.runList(ctx, s.inspect, strings.TrimPrefix(names[i], s.prefix)); err != nil {
				return nil, err
			}
		default:
			return nil, err
		}
	}
	return lists, nil
}
