package cli

import (
	"os"
	"path/filepath"
	"strconv"
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
	pidFile := filepath.Join(t.TempDir(), "pid")
	p := begin(t, url, "run", randomKey(), "--", "sh", "-c", "echo $$ >"+pidFile+"; echo ready; while :; do sleep 0.05; done")
	p.out.await(t, "ready")
	text, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
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
	p.out.await(t, ".")
	text, _, _ := strings.Cut(strings.TrimPrefix(p.out.String(), "pid "), ".")
	pid, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	if code := p.end(t); code != exitLost {
		t.Errorf("exit code %d, want %d; %s", code, exitLost, p.err)
	}
	awaitDeath(t, pid)
}

// running tells whether pid is a process that still runs; one that nobody has
// reaped yet does not.
func running(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z")
}
