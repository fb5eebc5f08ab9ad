//go:build unix && !linux

package child

import "syscall"

// Only Linux can kill a child when its parent dies.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
