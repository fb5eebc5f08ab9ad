//go:build unix

package child

import (
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Child is a running command.
type Child struct {
	pid  int
	tty  int // file descriptor of the terminal, -1 if the command has none
	done chan struct{}
	code int

	mu    sync.Mutex
	ended bool // its pid may belong to somebody else by now
}

// Start starts the command at path. It has the standard streams of this
// process, and is the leader of a new process group. If this process is in the
// foreground of the terminal on standard input, the command is so from now on.
//
// On Linux the kernel kills the command when this process dies, whatever it
// died of; what the command has started itself may live on.
func Start(path string, argv, env []string) (*Child, error) {
	c := &Child{tty: foregroundTerminal(), done: make(chan struct{})}
	attributes := &syscall.SysProcAttr{Setpgid: true}
	if c.tty >= 0 {
		// The new process does this before it becomes the command: a key that
		// is pressed at the command's first output is for the command already.
		attributes.Foreground = true
		attributes.Ctty = c.tty
	}
	killWithParent(attributes)
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGCHLD)
	started := make(chan error, 1)
	go func() {
		// The kernel kills the command when the thread that started it ends,
		// so that thread has to stay.
		runtime.LockOSThread()
		defer signal.Stop(changed)
		process, err := os.StartProcess(path, argv, &os.ProcAttr{
			Env:   env,
			Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
			Sys:   attributes,
		})
		if err != nil {
			started <- err
			return
		}
		c.pid = process.Pid
		_ = process.Release() // waited for below, stops included
		started <- nil
		c.wait(changed)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return c, nil
}

// Done is closed when the command has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// ExitCode returns the command's exit code, or 128 plus the signal that ended
// it, once Done is closed.
func (c *Child) ExitCode() int { return c.code }

// Signal sends sig to the command's process group; nothing happens if the
// command has ended.
func (c *Child) Signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		_ = unix.Kill(-c.pid, sig)
	}
}

// Terminate asks the command's process group to end, also one that is stopped.
func (c *Child) Terminate() {
	c.Signal(unix.SIGTERM)
	c.Signal(unix.SIGCONT)
}

func (c *Child) wait(changed <-chan os.Signal) {
	for range changed {
		// Nothing here blocks with the lock held, and the pid is nobody else's
		// before it has been waited for.
		c.mu.Lock()
		var status unix.WaitStatus
		pid, err := unix.Wait4(c.pid, &status, unix.WUNTRACED|unix.WNOHANG, nil)
		if err == nil && pid == 0 { // the signal was for another child, or an earlier change
			c.mu.Unlock()
			continue
		}
		if err == nil && status.Stopped() {
			c.mu.Unlock()
			c.stopped()
			continue
		}
		c.ended = true
		c.mu.Unlock()
		switch {
		case err != nil:
			c.code = 1
		case status.Signaled():
			c.code = ExitSignalBase + int(status.Signal())
		default:
			c.code = status.ExitStatus()
		}
		c.takeTerminal()
		close(c.done)
		return
	}
}

// stopped stops this process too when the user has stopped the command from the
// terminal, so that the shell sees it, and goes on when the shell says so.
// Without a terminal a stopped command is its own affair: its lease is renewed.
func (c *Child) stopped() {
	if c.tty < 0 {
		return
	}
	c.takeTerminal()
	// The signal may stop another thread first, and this one goes on for a
	// moment: so wait for the shell's signal, not for the return of kill.
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, unix.SIGCONT)
	defer signal.Stop(continued)
	_ = unix.Kill(os.Getpid(), unix.SIGSTOP)
	<-continued
	// The shell has put us into the foreground, or not.
	if inForeground(c.tty) {
		_ = unix.IoctlSetPointerInt(c.tty, unix.TIOCSPGRP, c.pid)
	}
	c.Signal(unix.SIGCONT)
}

// foregroundTerminal returns the terminal on standard input if this process is
// in its foreground, else -1.
func foregroundTerminal() int {
	fd := int(os.Stdin.Fd())
	if !inForeground(fd) {
		return -1
	}
	return fd
}

func inForeground(fd int) bool {
	group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// takeTerminal puts this process's group into the foreground again.
func (c *Child) takeTerminal() {
	if c.tty < 0 {
		return
	}
	// A process in the background that does this is stopped, unless it ignores
	// the signal.
	signal.Ignore(unix.SIGTTOU)
	defer signal.Reset(unix.SIGTTOU)
	_ = unix.IoctlSetPointerInt(c.tty, unix.TIOCSPGRP, unix.Getpgrp())
}
