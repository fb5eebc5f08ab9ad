package cli

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/leasekit/leasekit/internal/testserver"
)

// The kernel kills the command when leasekit is gone, whatever it died of.
func TestKilledLeasekitTakesTheCommandWithIt(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	p := begin(t, url, "run", randomKey(), "--", "sh", "-c", `echo "pid $$."; while :; do sleep 0.05; done`)
	pid := p.out.awaitPid(t)
	p.signal(t, syscall.SIGKILL)
	_ = p.Wait()
	awaitDeath(t, pid)
}

func awaitDeath(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(patient); running(pid); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the command lives on")
		}
	}
}

// The command ends at once when it is told to, but not what it has started.
func TestLossEndsWhatTheCommandLeftBehind(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	p := begin(t, url, "run", "--max-hold", "2s", "--grace", "500ms", randomKey(), "--", "sh", "-c",
		`sh -c 'trap "" TERM; echo "pid $$."; exec sleep 600' & wait`)
	pid := p.out.awaitPid(t)
	if code := p.end(t); code != exitLost {
		t.Errorf("exit code %d, want %d; %s", code, exitLost, p.err)
	}
	awaitDeath(t, pid)
}

// stat returns what /proc says of pid: its state, "" if there is no such process,
// and its parent.
func stat(pid int) (state string, parent int) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0
	}
	_, fields, _ := strings.Cut(string(text), ") ") // behind the name
	_, _ = fmt.Sscan(fields, &state, &parent)
	return state, parent
}

// running tells whether pid is a process that still runs; one that nobody has
// reaped yet does not.
func running(pid int) bool {
	state, _ := stat(pid)
	return state != "" && state != "Z"
}

func stopped(pid int) bool {
	state, _ := stat(pid)
	return state == "T"
}
