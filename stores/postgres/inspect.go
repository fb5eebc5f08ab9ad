package pgstore

import (
	"context"
	"encoding/hex"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/await"
)

// An operator's tools find out here that leases can be listed and broken.
var (
	_ core.Inspector = (*Store)(nil)
	_ core.Breaker   = (*Store)(nil)
)

// pageRows is the number of leases that are read at a time: a quarter of a
// megabyte of the longest ones.
const pageRows = 256

// Leases implements [core.Inspector]. It reads a page of 256 leases at a time,
// in the order of the keys' bytes, and holds no connection in between. It needs
// SELECT alone, and works on a standby, where it shows what has been replayed.
func (s *Store) Leases(ctx context.Context, q core.LeaseQuery) iter.Seq2[core.LeaseInfo, error] {
	return func(yield func(core.LeaseInfo, error) bool) {
		if err := q.Check(); err != nil {
			yield(core.LeaseInfo{}, err)
			return
		}
		var from, to []byte
		if q.Key != "" {
			from, to = s.key(q.Key), after(s.key(q.Key))
		} else {
			from, to = span(s.key(q.Prefix))
		}
		for {
			page, err := await.Call(ctx, s.workers, func() ([]core.LeaseInfo, error) { return s.page(ctx, from, to) })
			if err != nil {
				yield(core.LeaseInfo{}, err)
				return
			}
			for _, info := range page {
				if !yield(info, nil) {
					return
				}
			}
			if len(page) < pageRows {
				return
			}
			from = after(s.key(page[len(page)-1].Key))
		}
	}
}

func (s *Store) page(ctx context.Context, from, to []byte) ([]core.LeaseInfo, error) {
	var page []core.LeaseInfo
	err := s.query(ctx, s.o.statement("leases"), []any{from, to, int64(pageRows)}, func(rows pgx.Rows) error {
		page = page[:0] // the statement may have been sent again
		for more := true; more; more = rows.Next() {
			info, err := s.info(rows)
			if err != nil {
				return err
			}
			page = append(page, info)
		}
		return nil
	})
	return page, err
}

// info reads a row of key, owner, token and rest. Key and owner come in
// hexadecimal, for as bytea in text they would depend on bytea_output.
func (s *Store) info(row pgx.Rows) (core.LeaseInfo, error) {
	var hexKey, hexOwner string
	var token, rest int64
	if err := row.Scan(&hexKey, &hexOwner, &token, &rest); err != nil {
		return core.LeaseInfo{}, err
	}
	key, err := hex.DecodeString(hexKey)
	if err != nil {
		return core.LeaseInfo{}, err
	}
	owner, err := hex.DecodeString(hexOwner)
	if err != nil {
		return core.LeaseInfo{}, err
	}
	return core.LeaseInfo{
		Key:   string(key[len(s.o.Prefix):]),
		Label: core.OwnerLabel(string(owner)),
		Token: token,
		Left:  left(rest),
	}, nil
}

// Break implements [core.Breaker].
func (s *Store) Break(ctx context.Context, key string) (was core.LeaseInfo, broken bool, err error) {
	if err := core.CheckKey(key); err != nil {
		return core.LeaseInfo{}, false, err
	}
	was, err = await.Call(ctx, s.workers, func() (was core.LeaseInfo, err error) {
		err = s.query(ctx, s.o.statement("break"), []any{s.key(key), s.channel}, func(row pgx.Rows) error {
			was, err = s.info(row)
			return err
		})
		return was, err
	})
	return was, err == nil && was.Token > 0, err
}

// left is the duration of us microseconds, at least one: the lease was live.
func left(us int64) time.Duration {
	return time.Duration(min(max(us, 1), math.MaxInt64/1000)) * time.Microsecond
}

// after is the smallest key greater than key.
func after(key []byte) []byte { return append(slices.Clip(key), 0) }

// span returns the bounds of the users' keys that begin with prefix: from is
// the first, to is above the last. Keys are UTF-8 without NUL, so that the
// smallest begins with 0x01, and no byte is 0xff.
func span(prefix []byte) (from, to []byte) {
	if len(prefix) == 0 {
		return []byte{0x01}, []byte{0xff}
	}
	to = append([]byte(nil), prefix...)
	to[len(to)-1]++
	return prefix, to
}
