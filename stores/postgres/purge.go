package pgstore

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// How the store purges. A step costs about as much as an acquisition, so that
// one in purgeRarely acquisitions is not felt; the rows that it walks are twice
// what the acquisitions between two steps can have added. After a step that
// deleted half of what it saw more rows are walked, and sooner.
const (
	purgeRows    = 128
	purgeMany    = 512
	purgeRarely  = 64
	purgeOften   = 2
	purgeTimeout = 5 * time.Second
)

// purger deletes rows that nobody has locked for a long time, in small steps.
// A step follows an acquisition, for only those add rows, if
//
//   - none was made by this store within Retention, or
//   - the number of acquisitions since the last one has reached an interval,
//     which doubles up to purgeRarely while steps delete little, and is
//     purgeOften after one that deleted half of what it saw.
//
// So a program that acquires once in its life takes a step, one that was idle
// does so at once, and a heap of old rows is removed by up to purgeMany /
// purgeOften rows an acquisition.
type purger struct {
	store *Store
	purge string
	setup string
	args  []any
	plan  []any // in front of args: have it planned each time, for the table as it is

	mu       sync.Mutex
	grants   int       // since the last step
	interval int       // grants between two steps
	rows     int64     // to walk in the next step
	last     time.Time // of the last step
	running  bool
	closed   bool
	grown    bool // the table was larger than somePages, and not small since
	growths  int
	steps    sync.WaitGroup
}

func (p *purger) init(s *Store) {
	p.store = s
	p.purge = s.o.statement("purge")
	p.setup = s.o.statement("cursor")
	p.interval, p.rows = purgeOften, purgeRows
	// No user's key begins with a NUL byte.
	cursor := append([]byte{0}, s.o.Prefix...)
	low, high := span([]byte(s.o.Prefix))
	p.args = []any{cursor, low, high, micros(s.o.Retention)}
	if c, ok := s.db.(configured); !ok || c.Config().ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeSimpleProtocol {
		p.plan = []any{exec}
	}
}

// granted counts an acquisition, and takes a step if one is due.
func (p *purger) granted() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.grants++
	if p.running || p.closed {
		return
	}
	now := time.Now()
	if p.grants < p.interval && now.Sub(p.last) < p.store.o.Retention {
		return
	}
	p.grants, p.last, p.running = 0, now, true
	p.steps.Go(p.step)
}

// step walks on by some rows. That it fails is nothing to tell anybody:
// the next one goes on where it stopped, and what made it fail is what the
// callers see themselves.
func (p *purger) step() {
	ctx, cancel := context.WithTimeout(context.Background(), purgeTimeout)
	defer cancel()
	p.mu.Lock()
	rows := p.rows
	p.mu.Unlock()
	deleted, err := p.walk(ctx, rows)

	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = false
	switch {
	case err == nil && deleted >= rows/2:
		p.interval, p.rows = purgeOften, purgeMany
	case err != nil || deleted < rows/4:
		p.interval, p.rows = min(2*p.interval, purgeRarely), purgeRows
	}
}

// walk looks at the next rows, and returns how many it deleted.
func (p *purger) walk(ctx context.Context, rows int64) (deleted int64, err error) {
	for range 2 {
		var found, walked, pages int64
		err = p.store.query(ctx, p.purge, append(slices.Concat(p.plan, p.args), rows), func(row pgx.Rows) error {
			return row.Scan(&found, &walked, &deleted, &pages)
		})
		if err != nil {
			return 0, err
		}
		if found > 0 {
			p.sized(pages)
			return deleted, nil
		}
		// There is no cursor yet, or another step has locked it; then so be it.
		n, err := p.store.exec(ctx, p.setup, p.args[:2]...)
		if err != nil || n == 0 {
			return 0, err
		}
	}
	return deleted, nil
}

// A table of fewPages may be read whole instead of by its primary key, one of
// somePages is not: a page costs PostgreSQL's planner 1, a row by its key 8.
const (
	fewPages  = 8
	somePages = 16
)

// sized has the store's statements prepared again if the table has grown out of
// the size at which they may have been.
func (p *purger) sized(pages int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case pages <= fewPages:
		p.grown = false
	case pages >= somePages && !p.grown:
		p.grown = true
		p.growths++
		p.store.sql.Store(p.store.o.statements(p.growths))
	}
}

// close waits for a running step, and lets no other begin.
func (p *purger) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.steps.Wait()
}
