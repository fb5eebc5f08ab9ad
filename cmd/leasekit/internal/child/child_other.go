//go:build !unix

package child

import (
	"errors"
	"syscall"
	"time"
)

// Child is a running command; there is none on this system.
type Child struct{}

// Start returns an error: process groups and signals are needed.
func Start(string, []string, []string) (*Child, error) {
	return nil, errors.New("running commands needs a Unix system")
}

// Done is never closed.
func (c *Child) Done() <-chan struct{} { return nil }

// ExitCode returns 1.
func (c *Child) ExitCode() int { return 1 }

// Signal does nothing.
func (c *Child) Signal(syscall.Signal) {}

// EndGroup does nothing.
func (c *Child) EndGroup(<-chan time.Time) {}
