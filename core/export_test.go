package core

import "sync"

// ForgetNilStoreWarning makes the next strategy without a store log it again.
func ForgetNilStoreWarning() { warnProcessStore = sync.Once{} }
