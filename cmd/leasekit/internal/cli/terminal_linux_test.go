package cli

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/leasekit/leasekit/internal/testserver"
)

// terminal is a pseudo-terminal with a leasekit on it, as in a person's shell.
type terminal struct {
	*process
	keyboard *os.File
	screen   *output
}

// onTerminal starts leasekit, as ssh -t would, as the leader of a session that
// has a terminal of so many columns, and is in its foreground.
func onTerminal(t *testing.T, columns uint16, url string, args ...string) *terminal {
	t.Helper()
	return startOnTerminal(t, columns, leasekit(t, url, args...))
}

func startOnTerminal(t *testing.T, columns uint16, p *process) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no pseudo-terminals here: ", err)
	}
	t.Cleanup(func() { master.Close() })
	conn, err := master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var number int
	var errs [3]error
	if err := conn.Control(func(fd uintptr) {
		number, errs[0] = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		errs[1] = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0)
		errs[2] = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns})
	}); err != nil || errs != [3]error{} {
		t.Fatal(err, errs)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close()

	term := &terminal{process: p, keyboard: master, screen: &output{written: make(chan struct{}, 1)}}
	term.Stdin, term.Stdout, term.Stderr = slave, slave, slave
	term.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := term.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = term.Process.Kill() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			if n > 0 {
				_, _ = term.screen.Write(buf[:n])
			}
			if err != nil { // EIO: nobody has the terminal open any more
				return
			}
		}
	}()
	return term
}

func (term *terminal) press(t *testing.T, keys string) {
	t.Helper()
	if _, err := term.keyboard.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

func TestBreakAsksOnATerminal(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	hold(t, url, key, "stuck-host")

	term := onTerminal(t, 80, url, "break", key)
	term.screen.await(t, "held by stuck-host")
	term.screen.await(t, "[y/N]")
	term.press(t, "\n")
	if code := term.end(t); code != exitFailure {
		t.Errorf("answer no: exit code %d, %s", code, term.screen)
	}
	if code, _, _ := run(t, url, "run", key, "--", "true"); code != exitHeld {
		t.Error("the lease was broken although the answer was no")
	}

	term = onTerminal(t, 80, url, "break", key)
	term.screen.await(t, "[y/N]")
	term.press(t, "y\n")
	term.screen.await(t, "broke the lease")
	if code := term.end(t); code != 0 {
		t.Errorf("answer yes: exit code %d, %s", code, term.screen)
	}
	free(t, url, key)
}

func TestListFitsTheTerminal(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	prefix := randomKey() + strings.Repeat("/deep", 30)
	hold(t, url, prefix+"/x", strings.Repeat("long-host-name", 10))
	term := onTerminal(t, 80, url, "list", prefix)
	term.screen.await(t, "LEFT")
	term.screen.await(t, "s\r\n") // the end of the row
	if code := term.end(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	for line := range strings.SplitSeq(term.screen.String(), "\r\n") {
		if n := len([]rune(line)); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

// The command reads from the terminal, is in its foreground, and gets what the
// keyboard sends; afterwards the terminal is leasekit's again.
func TestCommandHasTheTerminal(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	term := onTerminal(t, 80, url, "run", "--quiet", randomKey(), "--", "sh", "-c",
		`tty >/dev/null && echo "on a terminal"; read line && echo "read: $line"; trap 'echo interrupted; exit 5' INT; echo go; while :; do sleep 0.05; done`)
	term.screen.await(t, "on a terminal")
	term.press(t, "hello\n")
	term.screen.await(t, "read: hello")
	term.screen.await(t, "go")
	term.press(t, "\x03") // Ctrl-C goes to the foreground group, which is the command's
	term.screen.await(t, "interrupted")
	if code := term.end(t); code != 5 {
		t.Errorf("exit code %d, want the command's own, 5: %s", code, term.screen)
	}
}

// inShell starts an interactive shell and has it run leasekit as a job: with
// command, which says "pid N." first of all, and with redirection behind.
func inShell(t *testing.T, command, redirection string) (term *terminal, pid int) {
	t.Helper()
	p := leasekit(t, testserver.Redis(t).URL)
	exe := p.Path
	p.Path, p.Args = "/bin/sh", []string{"sh", "-i"}
	p.Env = append(p.Env, "PS1=> ", "ENV=", "KEY="+randomKey(), "LEASEKIT="+exe, "COMMAND="+command)
	term = startOnTerminal(t, 200, p)
	term.press(t, `"$LEASEKIT" run --quiet "$KEY" -- sh -c "$COMMAND" `+redirection+"\n")
	return term, term.screen.awaitPid(t)
}

// until waits.
func (term *terminal) until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patient); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not so after %v:\n%s", what, patient, term.screen)
		}
	}
}

// Ctrl-Z stops the command and leasekit as it stops any job: the shell is back,
// and fg lets both go on, wherever their standard streams lead. The command
// starts nothing while it can be stopped: a shell that is stopped in its vfork
// hangs until SIGCONT, on its own account.
func TestCtrlZStopsTheJob(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, command, redirection string
		terminal                   bool // the command has it before Ctrl-Z
		code                       int
	}{
		{"terminal", `echo "pid $$."; read line; echo "got $line"; exit 7`, "", true, 7},
		{"output to a pipe", `echo "pid $$."; read line; echo "got $line"; exit 7`, "| cat", true, 0},
		{"input from a file", `echo "pid $$."; exec sleep 600`, "</dev/null", false, 130},
		{"neither", `echo "pid $$."; exec sleep 600`, "< /dev/null | cat", false, -1},
		{"input from a file, and the terminal", `echo "pid $$."; read line </dev/tty; echo "got $line"; exit 7`, "</dev/null", true, 7},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			term, pid := inShell(t, test.command, test.redirection)
			for range 2 {
				if test.terminal {
					term.until(t, "the command reads from the terminal", func() bool { return foregroundGroup(t, term) == pid && !stopped(pid) })
				}
				before := strings.Count(term.screen.String(), "Stopped")
				term.press(t, "\x1a")
				term.until(t, "the shell says so", func() bool { return strings.Count(term.screen.String(), "Stopped") > before })
				term.until(t, "the command is stopped", func() bool { return stopped(pid) })
				term.press(t, "fg\n")
				term.until(t, "the command goes on", func() bool { return !stopped(pid) })
			}
			if test.terminal {
				term.press(t, "hello\n")
				term.screen.await(t, "got hello")
			} else {
				term.until(t, "the shell has let go of the terminal", func() bool { return foregroundGroup(t, term) != term.Process.Pid })
				term.press(t, "\x03")
			}
			term.press(t, "echo \"code=$?.\"\n")
			if test.code >= 0 {
				term.screen.await(t, fmt.Sprintf("code=%d.", test.code))
			} else {
				term.until(t, "the command ends", func() bool { return !running(pid) })
			}
			term.press(t, "exit\n")
		})
	}
}

// What is started in the background gets the terminal when it is brought to the
// front.
func TestBackgroundJobStopsWhenItReads(t *testing.T) {
	t.Parallel()
	term, pid := inShell(t, `echo "pid $$."; read line; echo "got $line"; exit 7`, "</dev/tty &")
	_, leasekit := stat(pid)
	term.until(t, "both are stopped", func() bool { return stopped(pid) && stopped(leasekit) })
	term.press(t, "fg\n")
	term.until(t, "the command reads from the terminal", func() bool { return foregroundGroup(t, term) == pid && !stopped(pid) })
	term.press(t, "hello\n")
	term.screen.await(t, "got hello")
	term.press(t, "echo \"code=$?.\"\n")
	term.screen.await(t, "code=7.")
	term.press(t, "exit\n")
}

// Where there is no shell to continue them, as in a container or under ssh -t,
// nothing is stopped: it would be so for ever.
func TestCtrlZWithoutAShellStopsNothing(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	term := onTerminal(t, 80, url, "run", "--quiet", randomKey(), "--", "sh", "-c",
		`echo go; read line; echo "read: $line"; exit 7`)
	term.screen.await(t, "go")
	for range 3 {
		term.press(t, "\x1a")
	}
	term.press(t, "hello\n")
	term.screen.await(t, "read: hello")
	if code := term.end(t); code != 7 {
		t.Errorf("exit code %d, want 7: %s", code, term.screen)
	}
}

// foregroundGroup returns the process group that has the terminal.
func foregroundGroup(t *testing.T, term *terminal) (group int) {
	t.Helper()
	conn, err := term.keyboard.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := conn.Control(func(fd uintptr) {
		group, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPGRP)
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return group
}
