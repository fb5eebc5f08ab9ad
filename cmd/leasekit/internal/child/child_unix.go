//go:build unix

package child

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Child is a running command.
type Child struct {
	pid  int
	done chan struct{}
	code int

	// Of the goroutine that waits for the command:
	tty   int  // file descriptor of the controlling terminal, -1 if there is none
	given bool // the command is in the terminal's foreground, in place of us

	mu    sync.Mutex
	ended bool // its pid may belong to somebody else by now
}

// Start starts the command at path. It has the standard streams of this
// process, and is the leader of a new process group.
//
// The command gets the terminal, as from a shell: at once if it is started in
// the foreground with its input from the terminal and its output to it, else
// when it wants it, so that until then it is there for what the command is piped
// from or into. A command that is stopped from the terminal stops this process
// and its group too, for their shell to see, and goes on with them.
//
// On Linux the kernel kills the command when this process dies, whatever it
// died of; what the command has started itself may live on.
func Start(path string, argv, env []string) (*Child, error) {
	c := &Child{tty: controllingTerminal(), done: make(chan struct{})}
	attributes := &syscall.SysProcAttr{Setpgid: true}
	if inForeground(int(os.Stdin.Fd())) && inForeground(int(os.Stdout.Fd())) && c.tty >= 0 {
		// The new process does this before it becomes the command: a key that
		// is pressed at the command's first output is for the command already.
		attributes.Foreground = true
		attributes.Ctty = c.tty
		c.given = true
	}
	killWithParent(attributes)
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGCHLD)
	// Before there is a command that could go on while this process is stopped.
	stops := make(chan os.Signal, 1)
	if !signal.Ignored(unix.SIGTSTP) {
		signal.Notify(stops, unix.SIGTSTP)
	}
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
			signal.Stop(stops)
			c.leaveTerminal()
			started <- err
			return
		}
		c.pid = process.Pid
		_ = process.Release() // waited for below, stops included
		go c.passStopsOn(stops)
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
// command has ended. A group that is stopped continues for a signal that is to
// end it.
func (c *Child) Signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	_ = unix.Kill(-c.pid, sig)
	switch sig {
	case unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP:
		_ = unix.Kill(-c.pid, unix.SIGCONT)
	}
}

// groupPoll is how often EndGroup looks.
const groupPoll = 20 * time.Millisecond

// EndGroup returns when nothing is left of the group of a command that has
// ended: at kill it sends SIGKILL, and leaves the rest to the kernel. As long as
// anything is left, the group's number is nobody else's.
func (c *Child) EndGroup(kill <-chan time.Time) {
	tick := time.NewTicker(groupPoll)
	defer tick.Stop()
	for {
		// Orphans of the command come to this process, if it is the first of
		// its container.
		for reaped := 1; reaped > 0; {
			reaped, _ = unix.Wait4(-c.pid, nil, unix.WNOHANG, nil) // -1 with an error
		}
		if err := unix.Kill(-c.pid, 0); errors.Is(err, unix.ESRCH) {
			return
		}
		select {
		case <-tick.C:
		case <-kill:
			_ = unix.Kill(-c.pid, unix.SIGKILL)
			return
		}
	}
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
			c.stopped(status.StopSignal())
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
		c.leaveTerminal()
		close(c.done)
		return
	}
}

// passStopsOn hands Ctrl-Z on to the command, whose stop then stops this process:
// the terminal sends it here while the command has not been given it.
func (c *Child) passStopsOn(stops chan os.Signal) {
	defer signal.Stop(stops)
	for {
		select {
		case <-stops:
			c.Signal(unix.SIGTSTP)
		case <-c.done:
			return
		}
	}
}

// stopped is called when sig has stopped the command.
//
// Without a terminal that is the command's own affair: its lease is renewed.
func (c *Child) stopped(sig syscall.Signal) {
	if c.tty < 0 {
		return
	}
	wanted := sig == unix.SIGTTIN || sig == unix.SIGTTOU
	if wanted && !c.given && c.giveTerminal() {
		c.Signal(unix.SIGCONT)
		return
	}
	wanted = wanted || c.given
	c.takeTerminal()
	if orphaned() {
		// No shell could continue us, so that the kernel would not have let the
		// terminal stop us either.
		if sig != unix.SIGTTIN && sig != unix.SIGTTOU {
			c.continueWith(wanted)
		}
		return
	}
	// The signal may stop another thread first, and this one goes on for a
	// moment: so wait for the shell's signal, not for the return of kill.
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, unix.SIGCONT)
	defer signal.Stop(continued)
	_ = unix.Kill(0, unix.SIGSTOP) // what the command is piped into, too: it is one job
	<-continued
	c.continueWith(wanted)
}

// continueWith lets the command go on, with the terminal if it wants it and the
// shell has put us into the foreground.
func (c *Child) continueWith(terminal bool) {
	if terminal {
		c.giveTerminal()
	}
	c.Signal(unix.SIGCONT)
}

// orphaned tells whether nobody could continue this process's group if it were
// stopped: none of its processes has a parent in another group of its session.
// What has become of others in the group than this process and its parents is
// not looked at.
func orphaned() bool {
	session, err := unix.Getsid(0)
	if err != nil {
		return false
	}
	parent := unix.Getppid()
	for ; parent > 0; parent = parentOf(parent) {
		if of, err := unix.Getsid(parent); err != nil || of != session {
			return true
		}
		if group, err := unix.Getpgid(parent); err != nil || group != unix.Getpgrp() {
			return false
		}
	}
	return parent == 0 // the first process of a container
}

// controllingTerminal opens the terminal of this process's session; -1: it has
// none.
func controllingTerminal() int {
	fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return fd
}

func inForeground(fd int) bool {
	group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// giveTerminal puts the command into the foreground, if this process is there.
func (c *Child) giveTerminal() bool {
	c.given = inForeground(c.tty) && unix.IoctlSetPointerInt(c.tty, unix.TIOCSPGRP, c.pid) == nil
	return c.given
}

// takeTerminal puts this process's group into the foreground again, if the
// command was given it.
func (c *Child) takeTerminal() {
	if !c.given {
		return
	}
	// A process in the background that does this is stopped, unless it ignores
	// the signal.
	signal.Ignore(unix.SIGTTOU)
	c.given = unix.IoctlSetPointerInt(c.tty, unix.TIOCSPGRP, unix.Getpgrp()) != nil
}

// leaveTerminal is for when there is no command any more.
func (c *Child) leaveTerminal() {
	c.takeTerminal()
	if c.tty >= 0 {
		_ = unix.Close(c.tty)
	}
}
