package mongostore

import (
	"context"
	"errors"
	"iter"
	"slices"
	"strings"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/core"
)

var (
	_ core.Inspector = (*Store)(nil)
	_ core.Breaker   = (*Store)(nil)
)

// pageSize is the number of leases that are read at a time.
const pageSize = 256

// Leases implements [core.Inspector]. It reads 256 leases at a time from the
// primary, in the order of the keys' bytes, by the index of _id; between two
// pages it holds neither a connection nor a cursor. Documents that are no
// leases are left out.
func (s *Store) Leases(ctx context.Context, q core.LeaseQuery) iter.Seq2[core.LeaseInfo, error] {
	return func(yield func(core.LeaseInfo, error) bool) {
		if err := q.Check(); err != nil {
			yield(core.LeaseInfo{}, err)
			return
		}
		ids := bson.D{{Key: "$eq", Value: s.prefix + q.Key}}
		if q.Key == "" {
			ids = withPrefix(s.prefix + q.Prefix)
		}
		for from := ids; ; {
			page, err := call(ctx, s.workers, func(ctx context.Context) ([]record, error) { return s.page(ctx, from) })
			if err != nil {
				yield(core.LeaseInfo{}, err)
				return
			}
			for _, r := range page {
				if !yield(s.info(r), nil) {
					return
				}
			}
			if len(page) < pageSize {
				return
			}
			from = slices.Concat(ids, bson.D{{Key: "$gt", Value: page[len(page)-1].id}})
		}
	}
}

// page reads the first live leases whose _id satisfies ids.
func (s *Store) page(ctx context.Context, ids bson.D) ([]record, error) {
	cursor, err := s.coll.Aggregate(ctx, bson.A{
		bson.D{{Key: "$match", Value: bson.D{{Key: "_id", Value: ids}, {Key: "$expr", Value: isLive()}}}},
		bson.D{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		bson.D{{Key: "$limit", Value: pageSize}},
		bson.D{{Key: "$addFields", Value: bson.D{{Key: fieldNow, Value: "$$NOW"}}}},
	}, options.Aggregate().SetCollation(&simple))
	if err != nil {
		return nil, wrap(ctx, "", err)
	}
	defer cursor.Close(ctx)
	var page []record
	for cursor.Next(ctx) {
		r, err := s.parse(cursor.Current)
		if err != nil {
			return nil, err
		}
		page = append(page, r)
	}
	return page, wrap(ctx, "", cursor.Err())
}

func (s *Store) info(r record) core.LeaseInfo {
	return core.LeaseInfo{
		Key:   strings.TrimPrefix(r.id, s.prefix),
		Label: core.OwnerLabel(r.owner),
		Token: r.token,
		Left:  r.left(),
	}
}

// Break implements [core.Breaker]: a read that tells whose lease it is, and a
// release of that lease. If the key changes hands in between it looks again.
func (s *Store) Break(ctx context.Context, key string) (was core.LeaseInfo, broken bool, err error) {
	if err := core.CheckKey(key); err != nil {
		return core.LeaseInfo{}, false, err
	}
	was, err = call(ctx, s.workers, func(ctx context.Context) (core.LeaseInfo, error) {
		id := s.prefix + key
		for range maxRaces {
			r, err := s.look(ctx, id)
			if err != nil || r.left() == 0 {
				return core.LeaseInfo{}, err
			}
			done, err := s.release(ctx, id, r.owner)
			if err != nil {
				return core.LeaseInfo{}, err
			}
			if done {
				return s.info(r), nil
			}
		}
		return core.LeaseInfo{}, errors.New("mongo: the lease changed hands every time before it could be broken")
	})
	return was, err == nil && was.Token > 0, err
}

// withPrefix is the range of the strings that begin with prefix. It ends before
// the next string of the same length: UTF-8 sorts like its code points.
func withPrefix(prefix string) bson.D {
	ids := bson.D{{Key: "$gte", Value: prefix}}
	for end := prefix; end != ""; {
		last, size := utf8.DecodeLastRuneInString(end)
		end = end[:len(end)-size]
		if last == utf8.MaxRune {
			continue // there is no next rune
		}
		if last++; last == 0xD800 {
			last = 0xE000 // past the surrogates, which are no runes
		}
		return append(ids, bson.E{Key: "$lt", Value: end + string(last)})
	}
	return ids
}
