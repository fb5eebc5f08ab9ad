//go:build unix

package testserver

import (
	"os"
	"syscall"
)

const (
	sigStop = syscall.SIGSTOP
	sigCont = syscall.SIGCONT
)

func signal(pid int, sig syscall.Signal) error { return syscall.Kill(pid, sig) }

// tryLock locks f against other processes, or fails at once.
func tryLock(f *os.File) error { return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) }
