//go:build unix && !linux

package child

import "syscall"

// killWithParent does nothing: only Linux can kill a child when its parent dies.
func killWithParent(*syscall.SysProcAttr) {}
