package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/internal/testserver"
)

// skewed builds the leasekit command with a clock that is wrong by that much.
// A Go program asks the kernel for the time and no library, which could be
// replaced, so the standard library's own time.Now is: an overlay adds a number
// of seconds that the linker sets.
func skewed(t *testing.T, by time.Duration) (program string) {
	t.Helper()
	root, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	check(t, err)
	original := filepath.Join(strings.TrimSpace(string(root)), "src", "time", "time.go")
	source, err := os.ReadFile(original)
	check(t, err)
	now := []byte("func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n")
	if n := bytes.Count(source, now); n != 1 {
		t.Fatalf("%s: time.Now is not what this test knows how to change", original)
	}
	source = bytes.Replace(source, now, append(now, "\tsec += seconds(skew)\n"...), 1)
	source = append(source, `
var skew string // set by the linker

func seconds(s string) (n int64) {
	sign := int64(1)
	for _, c := range s {
		if c == '-' {
			sign = -1
		} else {
			n = n*10 + int64(c-'0')
		}
	}
	return sign * n
}
`...)
	dir := t.TempDir()
	changed, overlay := filepath.Join(dir, "time.go"), filepath.Join(dir, "overlay.json")
	check(t, os.WriteFile(changed, source, 0o600))
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	check(t, err)
	check(t, os.WriteFile(overlay, replace, 0o600))
	program = filepath.Join(dir, "leasekit")
	build := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlay,
		"-ldflags", "-X time.skew="+strconv.Itoa(int(by/time.Second)), "-o", program, "github.com/leasekit/leasekit/cmd/leasekit")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// contender runs the command line of a leasekit whose clock is wrong.
type contender struct {
	t       *testing.T
	program string
	store   string
}

func (c contender) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(c.t.Context(), c.program, args...)
	cmd.Env = append(os.Environ(), "LEASEKIT_STORE="+c.store)
	return cmd
}

// hold starts a job that holds key until its standard input ends, and returns
// its token when it has begun.
func (c contender) hold(key string, ttl time.Duration) (cmd *exec.Cmd, in io.Closer, token int64) {
	c.t.Helper()
	cmd = c.command("run", "--quiet", "--ttl", ttl.String(), "--wait", "1m", key, "--", "sh", "-c", `echo "$LEASEKIT_TOKEN"; exec cat`)
	in, err := cmd.StdinPipe()
	check(c.t, err)
	out, err := cmd.StdoutPipe()
	check(c.t, err)
	cmd.Stderr = os.Stderr
	check(c.t, cmd.Start())
	c.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		c.t.Fatalf("the job did not begin: %v, %v", err, cmd.Wait())
	}
	token, err = strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	check(c.t, err)
	return cmd, in, token
}

// held tells whether a try to get the key fails because somebody has it.
func (c contender) held(key string, ttl time.Duration) bool {
	c.t.Helper()
	cmd := c.command("run", "--quiet", "--ttl", ttl.String(), "--wait", "0", key, "--", "true")
	out, err := cmd.CombinedOutput()
	switch code := cmd.ProcessState.ExitCode(); code {
	case 0:
		return false
	case 75:
		return true
	default:
		c.t.Fatalf("exit code %d: %v\n%s", code, err, out)
		return false
	}
}

// Contenders whose clocks are wrong by hours exclude each other as all others
// do: only a server's clock ends a lease.
func TestClientClockWrongByHours(t *testing.T) {
	const hours, ttl = 5 * time.Hour, 5 * time.Second
	ahead, behind := skewed(t, hours), skewed(t, -hours)
	for _, program := range []string{ahead, behind} {
		c := contender{t, program, "memory:"}
		out, err := c.command("run", "--json", "key", "--", "true").CombinedOutput()
		check(t, err)
		var entry struct{ Time time.Time }
		check(t, json.Unmarshal(bytes.SplitN(out, []byte("\n"), 2)[0], &entry))
		if off := time.Until(entry.Time); (off.Abs()-hours).Abs() > time.Minute || off < 0 != (program == behind) {
			t.Fatalf("the clock is off by %v: this test proves nothing", off)
		}
	}
	for _, server := range []struct {
		name string
		get  func(testing.TB) *testserver.Server
	}{
		{"Redis", testserver.Redis}, {"etcd", testserver.Etcd}, {"PostgreSQL", testserver.Postgres}, {"MongoDB", testserver.Mongo},
	} {
		t.Run(server.name, func(t *testing.T) {
			t.Parallel() // it mostly waits
			url := server.get(t).URL
			if host, ok := strings.CutPrefix(url, "http://"); ok {
				url = "etcd://" + host
			}
			fast, slow := contender{t, ahead, url}, contender{t, behind, url}
			if out, err := fast.command("init").CombinedOutput(); err != nil {
				t.Fatalf("init: %v\n%s", err, out)
			}
			key, protected := "clock/"+t.Name(), new(resource)
			for _, order := range [][2]contender{{fast, slow}, {slow, fast}} {
				holder, rival := order[0], order[1]
				job, in, first := holder.hold(key, ttl)
				if !protected.write(first) {
					t.Fatalf("token %d was refused", first)
				}
				for end := time.Now().Add(2 * ttl); time.Now().Before(end); time.Sleep(ttl / 5) {
					if !rival.held(key, ttl) {
						t.Fatal("the rival got a key that is held")
					}
				}
				check(t, in.Close())
				if err := job.Wait(); err != nil {
					t.Fatalf("the holder lost the key: %v", err)
				}

				// The rival gets it, dies, and the first one follows when its
				// lease has run out.
				job, _, second := rival.hold(key, ttl)
				if !protected.write(second) {
					t.Errorf("token %d was refused after %d", second, first)
				}
				check(t, job.Process.Kill())
				_ = job.Wait()
				job, in, third := holder.hold(key, ttl)
				if !protected.write(third) {
					t.Errorf("token %d was refused after %d", third, second)
				}
				if protected.write(second) {
					t.Error("the dead holder's late write was accepted")
				}
				check(t, in.Close())
				check(t, job.Wait())
			}
			outcome(t, fmt.Sprintf("%s, contenders in processes of their own", server.name),
				"one contender's clock is 5 h ahead, the other's 5 h behind", "exclusive; tokens grow; fencing refuses the late write")
		})
	}
}
