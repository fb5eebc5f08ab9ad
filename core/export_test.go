package core

import "sync"

// ForgetNilStoreWarning makes the next strategy without a store log it again.
func ForgetNilStoreWarning() { warnProcessStore = sync.Once{} }

// ChildrenOf returns how many contexts the lease has to cancel at its end.
func ChildrenOf(l *Lease) int {
	l.h.mu.Lock()
	defer l.h.mu.Unlock()
	return len(l.h.children)
}

// TimerRuns reports whether something would still be done for the lease. A timer
// that is left running keeps all of it in memory.
func TimerRuns(l *Lease) bool { return l.h.timer.Stop() }

// LinesOf returns how many keys somebody waits for.
func LinesOf(s *Strategy) int {
	s.lines.mu.Lock()
	defer s.lines.mu.Unlock()
	return len(s.lines.m)
}
