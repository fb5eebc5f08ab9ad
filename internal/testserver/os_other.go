//go:build !unix

package testserver

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// Servers are started on Unix only. Elsewhere tests use servers that they are
// given by URL; what is here lets the package compile.

const (
	sigStop = syscall.Signal(0)
	sigCont = syscall.Signal(0)
)

var errNotUnix = errors.New("servers can be started on Unix only")

func setAttributes(*exec.Cmd, syscall.Signal, *account) {}
func listens(int, int) bool                             { return true }
func descendants(int) []int                             { return nil }
func exists(int) bool                                   { return false }
func signal(int, syscall.Signal) error                  { return errNotUnix }
func tryLock(*os.File) error                            { return errNotUnix }
