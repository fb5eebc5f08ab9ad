package core

import (
	"container/list"
	"sync"
)

// lines are the waiters of a strategy, by key, in the order in which they came.
//
// A release signals everybody who waits for the key. If all of them tried, all
// but one would try in vain, and hold up the one. So of the waiters of one
// strategy only the first in line heeds a signal, and is called by the others if
// it gets none itself; whoever leaves without the key passes his turn on. Polls
// are not affected: should a turn be lost, it costs one poll, as a lost signal
// does.
type lines struct {
	mu sync.Mutex
	m  map[string]*list.List // of *waiter
}

// join puts w at the end of the line for key.
func (ls *lines) join(key string, w *waiter) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	line := ls.m[key]
	if line == nil {
		if ls.m == nil {
			ls.m = make(map[string]*list.List)
		}
		line = list.New()
		ls.m[key] = line
	}
	w.turn = make(chan struct{}, 1)
	w.place = line.PushBack(w)
}

// leave takes w out of the line for key. If it leaves without the key, a signal
// may have been meant for it: the next in line has to look.
func (ls *lines) leave(key string, w *waiter, acquired bool) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	line := ls.m[key]
	wasFirst := line.Front() == w.place
	line.Remove(w.place)
	switch {
	case line.Len() == 0:
		delete(ls.m, key)
	case wasFirst && !acquired:
		callFirst(line)
	}
}

// isFirst tells whether it is w's turn.
func (ls *lines) isFirst(key string, w *waiter) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.m[key].Front() == w.place
}

// signalled tells whether a signal that w has got is for w to heed. If it is for
// the first in line, and that one hears no signals, it is called.
func (ls *lines) signalled(key string, w *waiter) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	line := ls.m[key]
	if line.Front() == w.place {
		return true
	}
	if !first(line).hears.Load() {
		callFirst(line)
	}
	return false
}

// released calls the first in line for key, which has just become free: no
// signal of the store can be faster.
func (ls *lines) released(key string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if line := ls.m[key]; line != nil {
		callFirst(line)
	}
}

func first(line *list.List) *waiter {
	return line.Front().Value.(*waiter) //nolint:forcetypeassert // a line is of waiters
}

func callFirst(line *list.List) {
	select {
	case first(line).turn <- struct{}{}:
	default: // called already
	}
}
