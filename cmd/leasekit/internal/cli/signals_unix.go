//go:build unix

package cli

import (
	"os"
	"syscall"
)

// passedOn are the signals that go to the command. Those that the kernel makes
// of a process's own faults, and SIGCHLD and the like, stay here.
var passedOn = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT,
	syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH, syscall.SIGALRM,
}

// endsWaiting tells whether a signal that arrives before the command runs ends
// leasekit, as it would end most programs.
func endsWaiting(sig syscall.Signal) bool {
	return sig != syscall.SIGWINCH
}
