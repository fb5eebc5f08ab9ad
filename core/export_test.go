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
