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

// onTerminal starts leasekit as the leader of a session that has a terminal of
// so many columns, and is in its foreground.
func onTerminal(t *testing.T, columns uint16, url string, args ...string) *terminal {
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

	term := &terminal{process: leasekit(t, url, args...), keyboard: master, screen: &output{written: make(chan struct{}, 1)}}
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

// Ctrl-Z stops the command and leasekit, as it stops any job. SIGCONT, which an
// interactive shell would send, lets both go on. The command starts nothing: a
// shell that is stopped in its vfork hangs until SIGCONT, on its own account.
func TestCtrlZStopsBoth(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	term := onTerminal(t, 80, url, "run", "--quiet", randomKey(), "--", "sh", "-c",
		`echo go; read line; echo "read: $line"; exit 7`)
	term.screen.await(t, "go")
	for range 3 {
		term.press(t, "\x1a")
		for end := time.Now().Add(patient); !stopped(term.Process.Pid); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("leasekit was not stopped: %s", term.screen)
			}
		}
		term.signal(t, syscall.SIGCONT)
		foreground(t, term)
	}
	term.press(t, "hello\n")
	term.screen.await(t, "read: hello")
	if code := term.end(t); code != 7 {
		t.Errorf("exit code %d, want 7: %s", code, term.screen)
	}
}

// foreground waits until the command has the terminal again: what is pressed
// before that is for leasekit.
func foreground(t *testing.T, term *terminal) {
	t.Helper()
	conn, err := term.keyboard.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patient); ; time.Sleep(5 * time.Millisecond) {
		var group int
		var failed error
		if err := conn.Control(func(fd uintptr) {
			group, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPGRP)
		}); err != nil || failed != nil {
			t.Fatal(err, failed)
		}
		if group != term.Process.Pid && !stopped(group) { // its leader is the command
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the command did not get the terminal back: %s", term.screen)
		}
	}
}

func stopped(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(state, "T")
}
