// Package child runs one command in a process group of its own, as a shell
// would: with the terminal, with signals passed on, and never longer than the
// process that started it.
package child

import (
	"errors"
	"io/fs"
	"os/exec"
)

// The exit codes of a shell for a command that could not be started.
const (
	ExitNotExecutable = 126
	ExitNotFound      = 127
	ExitSignalBase    = 128 // plus the number of the signal that ended it
)

// Find returns the path of the command name, or an error and the exit code for
// it.
func Find(name string) (path string, code int, err error) {
	path, err = exec.LookPath(name)
	switch {
	case err == nil:
		return path, 0, nil
	case errors.Is(err, fs.ErrPermission):
		return "", ExitNotExecutable, err
	default:
		return "", ExitNotFound, err
	}
}
