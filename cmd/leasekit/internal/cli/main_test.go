//go:build unix

package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/leasekit/leasekit/cmd/leasekit/internal/storeurl"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
)

// beLeasekit makes the test binary the command itself, so that its tests run
// real processes without a build.
const beLeasekit = "LEASEKIT_TEST_BE_LEASEKIT"

func TestMain(m *testing.M) {
	if os.Getenv(beLeasekit) != "" {
		os.Unsetenv(beLeasekit)
		os.Exit(Main(os.Args[1:]))
	}
	// What nohup has had ignored must not be so for the processes under test.
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	testserver.Main(m)
}

// patient bounds every wait of these tests; none takes nearly that long.
const patient = 60 * time.Second

// output collects what a process writes, and lets a test wait for a line.
type output struct {
	mu      sync.Mutex
	text    bytes.Buffer
	written chan struct{}
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case o.written <- struct{}{}:
	default:
	}
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// await returns when the output contains text.
func (o *output) await(t *testing.T, text string) {
	t.Helper()
	o.awaitMatch(t, regexp.MustCompile(regexp.QuoteMeta(text)))
}

// awaitMatch returns the first match of pattern in the output, and its groups,
// when there is one.
func (o *output) awaitMatch(t *testing.T, pattern *regexp.Regexp) []string {
	t.Helper()
	timeout := time.After(patient)
	for {
		if match := pattern.FindStringSubmatch(o.String()); match != nil {
			return match
		}
		select {
		case <-o.written:
		case <-timeout:
			t.Fatalf("no %q in output:\n%s", pattern, o)
		}
	}
}

var saidPid = regexp.MustCompile(`pid (\d+)\.`)

// awaitPid returns the number of the command that says "pid N.", when it has.
func (o *output) awaitPid(t *testing.T) int {
	t.Helper()
	pid, err := strconv.Atoi(o.awaitMatch(t, saidPid)[1])
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// process is a running leasekit.
type process struct {
	*exec.Cmd
	out, err *output
}

// leasekit returns the command, not started, on the store at url.
func leasekit(t *testing.T, url string, args ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patient)
	t.Cleanup(cancel)
	p := &process{
		Cmd: exec.CommandContext(ctx, exe, args...),
		out: &output{written: make(chan struct{}, 1)},
		err: &output{written: make(chan struct{}, 1)},
	}
	p.Env = append(os.Environ(), beLeasekit+"=1", "LEASEKIT_STORE="+url)
	p.Stdout, p.Stderr = p.out, p.err
	// What the command leaves running holds the pipes open.
	p.WaitDelay = time.Second
	return p
}

// begin starts it in the background.
func begin(t *testing.T, url string, args ...string) *process {
	t.Helper()
	p := leasekit(t, url, args...)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Process.Kill() })
	return p
}

// end waits for it and returns its exit code.
func (p *process) end(t *testing.T) int {
	t.Helper()
	err := p.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		t.Fatal(err)
	}
	return p.ProcessState.ExitCode()
}

// run runs it to its end.
func run(t *testing.T, url string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	p := begin(t, url, args...)
	code = p.end(t)
	return code, p.out.String(), p.err.String()
}

func (p *process) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := p.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

func randomKey() string { return "cli/" + rand.Text() }

// hold takes a lease on key, in this process, until the test has ended.
func hold(t *testing.T, url, key, label string) *core.Lease {
	t.Helper()
	opened, err := storeurl.Open(url, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(opened.Close)
	s, err := core.NewStrategy(opened.Store, core.Options{Label: label})
	if err != nil {
		t.Fatal(err)
	}
	lease, err := s.Acquire(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lease.Release() })
	return lease
}

// free fails the test unless key can be acquired at once.
func free(t *testing.T, url, key string) {
	t.Helper()
	if code, _, stderr := run(t, url, "run", key, "--", "true"); code != exitOK {
		t.Errorf("key is not free: exit code %d, %s", code, stderr)
	}
}
