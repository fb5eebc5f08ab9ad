//go:build unix

package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/leasekit/leasekit/conformance/faults"
	"github.com/leasekit/leasekit/internal/testserver"
)

// Every row of the table of exit codes in the manual.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	held := randomKey()
	hold(t, url, held, "somebody")
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("no program"), 0o644); err != nil {
		t.Fatal(err)
	}
	closedPort := "redis://127.0.0.1:1/0"

	for _, test := range []struct {
		name string
		url  string
		args []string
		code int
		says string // on standard error
	}{
		{"success", url, []string{"run", randomKey(), "--", "true"}, 0, "acquired"},
		{"the command's own", url, []string{"run", randomKey(), "--", "sh", "-c", "exit 42"}, 42, ""},
		{"without dashes", url, []string{"run", randomKey(), "sh", "-c", "exit 43"}, 43, ""},
		{"held", url, []string{"run", held, "--", "true"}, 75, "held elsewhere"},
		{"held, other code", url, []string{"run", "--conflict-exit-code", "9", held, "--", "true"}, 9, "held elsewhere"},
		{"held and that is fine", url, []string{"run", "--conflict-ok", held, "--", "true"}, 0, ""},
		{"held, after waiting", url, []string{"run", "--wait", "60ms", held, "--", "true"}, 75, "held elsewhere"},
		{"command not found", url, []string{"run", held, "--", "no-such-command-anywhere"}, 127, "not found"},
		{"command not executable", url, []string{"run", held, "--", plain}, 126, "permission denied"},
		{"killed by a signal", url, []string{"run", randomKey(), "--", "sh", "-c", "kill -KILL $$"}, 128 + 9, ""},
		{"store failure", closedPort, []string{"run", randomKey(), "--", "true"}, 69, "connection refused"},
		{"no command", url, []string{"run", "key"}, 64, "needs a command"},
		{"no command behind the dashes", url, []string{"run", "key", "--"}, 64, "needs a command"},
		{"no key", url, []string{"run"}, 64, "needs a key"},
		{"empty key", url, []string{"run", "", "--", "true"}, 64, "empty key"},
		{"unknown flag", url, []string{"run", "--frobnicate", "key", "--", "true"}, 64, "unknown flag"},
		{"unknown subcommand", url, []string{"walk"}, 64, "unknown command"},
		{"bad duration", url, []string{"run", "--wait", "soon", "key", "--", "true"}, 64, "--wait"},
		{"negative wait", url, []string{"run", "--wait", "-1s", "key", "--", "true"}, 64, "--wait"},
		{"bad on-loss", url, []string{"run", "--on-loss", "explode", "key", "--", "true"}, 64, "--on-loss"},
		{"ttl too short", url, []string{"run", "--ttl", "1us", "key", "--", "true"}, 64, "1ms"},
		{"no store", "", []string{"run", "key", "--", "true"}, 64, "LEASEKIT_STORE"},
		{"no URL", "localhost", []string{"run", "key", "--", "true"}, 64, "begin with one of"},
		{"unknown scheme", "zookeeper://host", []string{"run", "key", "--", "true"}, 64, "unknown scheme"},
		{"no master", "redis+sentinel://host", []string{"run", "key", "--", "true"}, 64, "master_name"},
		{"bad port", "redis://u:secret@host:port", []string{"run", "key", "--", "true"}, 64, "invalid port"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := run(t, test.url, test.args...)
			if code != test.code {
				t.Errorf("exit code %d, want %d; it said: %s", code, test.code, stderr)
			}
			if !strings.Contains(stderr, test.says) {
				t.Errorf("it said %q, want something with %q", stderr, test.says)
			}
			if stdout != "" {
				t.Errorf("standard output is the command's, but has %q", stdout)
			}
			if strings.Contains(stderr, "secret") {
				t.Errorf("a password got out: %s", stderr)
			}
		})
	}
}

func TestConflictOKIsSilent(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	hold(t, url, key, "")
	if code, stdout, stderr := run(t, url, "run", "--conflict-ok", key, "--", "true"); code != 0 || stdout+stderr != "" {
		t.Errorf("exit code %d, output %q; a cron job must not send mail", code, stdout+stderr)
	}
}

func TestCommandNeverStartsWithoutTheLease(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	hold(t, url, key, "")
	mark := filepath.Join(t.TempDir(), "mark")
	for _, args := range [][]string{{"run"}, {"run", "--wait", "100ms"}, {"run", "--store", "redis://127.0.0.1:1"}} {
		run(t, url, append(args, key, "--", "touch", mark)...)
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("the command ran")
	}
}

func TestCommandGetsKeyTokenAndStreams(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	var last int64
	for range 2 {
		p := leasekit(t, url, "run", key, "--", "sh", "-c", `cat; echo "$LEASEKIT_KEY"; echo "$LEASEKIT_TOKEN"; echo problem >&2`)
		p.Stdin = strings.NewReader("input\n")
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		if code := p.end(t); code != 0 {
			t.Fatalf("exit code %d: %s", code, p.err)
		}
		lines := strings.Split(strings.TrimSpace(p.out.String()), "\n")
		if len(lines) != 3 || lines[0] != "input" || lines[1] != key {
			t.Fatalf("output %q", lines)
		}
		token, err := strconv.ParseInt(lines[2], 10, 64)
		if err != nil || token <= last {
			t.Errorf("token %q after %d", lines[2], last)
		}
		last = token
		if !strings.Contains(p.err.String(), "problem") {
			t.Errorf("standard error %q", p.err)
		}
	}
}

// A command of two leasekits sees the key and the token of the inner one.
func TestNestedLeasekit(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	outer, inner := randomKey(), randomKey()
	p := begin(t, url, "run", outer, "--", "sh", "-c", `echo "outer $LEASEKIT_TOKEN"; exec "$@"`, "-",
		"env", beLeasekit+"=1", exe, "run", "--quiet", inner, "--", "env")
	if code := p.end(t); code != 0 {
		t.Fatalf("exit code %d, %s", code, p.err)
	}
	var token string
	seen := map[string][]string{}
	for line := range strings.Lines(p.out.String()) {
		line = strings.TrimSpace(line)
		if after, ok := strings.CutPrefix(line, "outer "); ok {
			token = after
		}
		if name, value, ok := strings.Cut(line, "="); ok && strings.HasPrefix(name, "LEASEKIT_") {
			seen[name] = append(seen[name], value)
		}
	}
	if got := seen["LEASEKIT_KEY"]; len(got) != 1 || got[0] != inner {
		t.Errorf("the command has the keys %q, want %q", got, inner)
	}
	if got := seen["LEASEKIT_TOKEN"]; len(got) != 1 || got[0] <= token {
		t.Errorf("the command has the tokens %q, want one of after %q", got, token)
	}
}

func TestWaitGetsTheKeyWhenItIsReleased(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	for _, wait := range []string{"1m", "forever"} {
		key := randomKey()
		lease := hold(t, url, key, "")
		p := begin(t, url, "run", "--wait", wait, key, "--", "echo", "mine")
		if err := lease.Release(); err != nil {
			t.Fatal(err)
		}
		if code := p.end(t); code != 0 || p.out.String() != "mine\n" {
			t.Errorf("--wait %s: exit code %d, output %q, %s", wait, code, p.out, p.err)
		}
	}
}

func TestSignalWhileWaitingEndsLeasekit(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	hold(t, url, key, "")
	// The first process tells, by failing, that the second has begun to wait:
	// there is nothing else to see from outside. A signal that comes before
	// leasekit listens ends it just the same, as it does every process.
	p := begin(t, url, "run", "--wait", "forever", key, "--", "true")
	run(t, url, "run", key, "--", "true")
	p.signal(t, syscall.SIGTERM)
	err := p.Wait()
	status, _ := p.ProcessState.Sys().(syscall.WaitStatus)
	if code := p.ProcessState.ExitCode(); code != 128+int(syscall.SIGTERM) && status.Signal() != syscall.SIGTERM {
		t.Errorf("exit code %d, %v, %s", code, err, p.err)
	}
}

// The try that is on its way when the signal comes may be granted: its lease must
// not stay for the ttl.
func TestSignalDuringTheAcquireLeavesNoLease(t *testing.T) {
	t.Parallel()
	server := testserver.Redis(t)
	proxy, err := faults.Listen(server.Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	// The try is waited for, but not for long: on a machine that stands still
	// for that time the next may do.
	for range 3 {
		key := randomKey()
		acquire := proxy.HoldRequest(key)
		p := begin(t, strings.Replace(server.URL, server.Addr, proxy.Addr(), 1), "run", "--ttl", "1h", key, "--", "true")
		<-acquire.Sprung()
		p.signal(t, syscall.SIGTERM)
		time.Sleep(100 * time.Millisecond) // for what is wrong to happen
		acquire.Deliver()
		if code := p.end(t); code != 128+int(syscall.SIGTERM) {
			t.Fatalf("exit code %d, %s", code, p.err)
		}
		if code, _, _ := run(t, server.URL, "run", key, "--", "true"); code == exitOK {
			return
		}
	}
	t.Error("the key stays locked by a leasekit that has gone")
}

// nohup, and a script for its background jobs, have signals ignored.
func TestIgnoredSignalStaysIgnored(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			p := leasekit(t, url, "run", randomKey(), "--", "sh", "-c", "trap 'echo over; exit 4' TERM; echo ready; while :; do sleep 0.05; done")
			p.Path, p.Args = "/bin/sh", append([]string{"sh", "-c", fmt.Sprintf(`trap '' %d; exec "$@"`, int(sig)), "-"}, p.Args...)
			if err := p.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Process.Kill() })
			p.out.await(t, "ready")
			p.signal(t, sig)
			p.signal(t, syscall.SIGTERM)
			if code := p.end(t); code != 4 {
				t.Errorf("exit code %d, %s", code, p.err)
			}
		})
	}
}

func TestSignalsArePassedOn(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGQUIT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			key := randomKey()
			p := begin(t, url, "run", key, "--", "sh", "-c",
				fmt.Sprintf("trap 'echo caught; exit 5' %d; echo ready; while :; do sleep 0.05; done", int(sig)))
			p.out.await(t, "ready")
			p.signal(t, sig)
			if code := p.end(t); code != 5 || !strings.Contains(p.out.String(), "caught") {
				t.Errorf("exit code %d, output %q", code, p.out)
			}
			free(t, url, key)
		})
	}
}

// The command's children get the signal as well: they are in its group.
func TestSignalReachesTheWholeGroup(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	p := begin(t, url, "run", randomKey(), "--", "sh", "-c",
		`trap : TERM; sh -c 'trap "echo grandchild; exit" TERM; echo ready; while :; do sleep 0.05; done'; echo over; exit 3`)
	p.out.await(t, "ready")
	p.signal(t, syscall.SIGTERM)
	if code := p.end(t); code != 3 || !strings.Contains(p.out.String(), "grandchild\nover") {
		t.Errorf("exit code %d, output %q, %s", code, p.out, p.err)
	}
}

// A server that is stopped is what a cut network looks like: no error, nothing.
func TestLossEndsTheCommand(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		grace  string
		script string
		says   string
	}{
		{"by SIGTERM", "30s", `trap 'echo winding down; exit 0' TERM; echo ready; while :; do sleep 0.05; done`, "winding down"},
		{"by SIGKILL after the grace", "2s", `trap 'echo no' TERM; echo ready; while :; do sleep 0.05; done`, "no"},
		{"also one that is stopped", "30s", `trap 'echo winding down; exit 0' TERM; echo ready; kill -STOP $$; while :; do sleep 0.05; done`, "winding down"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			server := testserver.StartRedis(t)
			p := begin(t, server.URL, "run", "--ttl", "3s", "--grace", test.grace, randomKey(), "--", "sh", "-c", test.script)
			p.out.await(t, "ready")
			server.Pause(t)
			defer server.Resume(t)
			if code := p.end(t); code != exitLost {
				t.Errorf("exit code %d, want %d; %s", code, exitLost, p.err)
			}
			if !strings.Contains(p.out.String(), test.says) {
				t.Errorf("output %q, want %q", p.out, test.says)
			}
			if !strings.Contains(p.err.String(), "lease lost") {
				t.Errorf("it did not say why: %s", p.err)
			}
		})
	}
}

func TestLossWithWarnLetsTheCommandEnd(t *testing.T) {
	t.Parallel()
	server := testserver.StartRedis(t)
	dir := t.TempDir()
	p := begin(t, server.URL, "run", "--ttl", "3s", "--on-loss", "warn", randomKey(), "--", "sh", "-c",
		`echo ready; until [ -e `+dir+`/go ]; do sleep 0.05; done; exit 4`)
	p.out.await(t, "ready")
	server.Pause(t)
	p.err.await(t, "goes on without its lease")
	server.Resume(t)
	if err := os.WriteFile(dir+"/go", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if code := p.end(t); code != 4 {
		t.Errorf("exit code %d, want the command's own, 4; %s", code, p.err)
	}
}

func TestMaxHoldCountsAsLoss(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	code, _, stderr := run(t, url, "run", "--max-hold", "300ms", "--grace", "0s", key, "--", "sleep", "600")
	if code != exitLost || !strings.Contains(stderr, "MaxHold") {
		t.Errorf("exit code %d, %s", code, stderr)
	}
	free(t, url, key)
}

func TestMinHoldKeepsTheKey(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	if code, _, stderr := run(t, url, "run", "--min-hold", "10m", key, "--", "true"); code != 0 {
		t.Fatalf("exit code %d, %s", code, stderr)
	}
	if code, _, stderr := run(t, url, "run", key, "--", "true"); code != exitHeld {
		t.Errorf("exit code %d after a short job with --min-hold, want %d; %s", code, exitHeld, stderr)
	}
}

// What the command leaves in the background lives on, without the lease.
func TestBackgroundProcessDoesNotHoldTheKey(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	p := begin(t, url, "run", key, "--", "sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")
	if code := p.end(t); code != 0 {
		t.Fatalf("exit code %d, %s", code, p.err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(p.out.String()))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("the background process did not live on: %v", err)
	}
	free(t, url, key)
}

func TestSlowStoreDoesNotHoldUpTheExit(t *testing.T) {
	t.Parallel()
	server := testserver.StartRedis(t)
	dir := t.TempDir()
	// With a ttl of an hour nothing but the exit's own patience can end this.
	p := begin(t, server.URL, "run", "--ttl", "1h", randomKey(), "--", "sh", "-c",
		`echo ready; until [ -e `+dir+`/go ]; do sleep 0.05; done; exit 6`)
	p.out.await(t, "ready")
	server.Pause(t)
	defer server.Resume(t)
	if err := os.WriteFile(dir+"/go", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if code := p.end(t); code != 6 || !strings.Contains(p.err.String(), "the store is slow") {
		t.Errorf("exit code %d, %s", code, p.err)
	}
}

func TestFullDiskOnStandardOutput(t *testing.T) {
	t.Parallel()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full here: ", err)
	}
	defer full.Close()
	url := testserver.Redis(t).URL
	key := randomKey()
	hold(t, url, key, "")
	for _, test := range []struct {
		args []string
		code int
	}{
		{[]string{"run", randomKey(), "--", "sh", "-c", "echo lost || exit 8"}, 8}, // the command's affair
		{[]string{"list"}, exitFailure},
		{[]string{"show", "--json", key}, exitFailure},
		{[]string{"version"}, exitFailure},
	} {
		p := leasekit(t, url, test.args...)
		p.Stdout = full
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		if code := p.end(t); code != test.code {
			t.Errorf("%v: exit code %d, want %d; %s", test.args, code, test.code, p.err)
		}
	}
}

func TestPasswordStaysSecret(t *testing.T) {
	t.Parallel()
	const password = "p%40ss/w0rd"
	file := filepath.Join(t.TempDir(), "store")
	if err := os.WriteFile(file, []byte("redis://user:p%40ss%2Fw0rd@127.0.0.1:1/0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{
		"redis://user:" + password + "@127.0.0.1:1/0",
		"redis://user:" + password + "@127.0.0.1:x/0",
		"etcd://user:" + password + "@/",
		"postgres://user:" + password + "@127.0.0.1:1/db?sslmode=odd",
		"postgres://127.0.0.1:1/db?user=me&password=" + password,
		"mongodb://user:" + password + "@127.0.0.1:x/",
		"nonsense://user:" + password + "@host",
		"redis://user:sek?w0rd@127.0.0.1:1",
		"redis://user:sek#w0rd@127.0.0.1:1",
		"redis://user:55/w0rd@127.0.0.1:1",
		"etcd://user:w0rd?x@127.0.0.1:1",
		"redis:/user:w0rd@127.0.0.1:1",
		"rediss//user:w0rd@127.0.0.1:1",
		"user:w0rd@127.0.0.1:1",
	} {
		for _, args := range [][]string{{"run", "key", "--", "true"}, {"run", "--json", "key", "--", "true"}} {
			code, stdout, stderr := run(t, url, args...)
			if code == 0 {
				t.Errorf("%s: exit code 0", url)
			}
			for _, secret := range []string{password, "p@ss/w0rd", "w0rd"} {
				if strings.Contains(stdout+stderr, secret) {
					t.Errorf("%v: the password got out:\n%s", args, stderr)
				}
			}
		}
	}
	// A short one is part of many words: to mask those would tell it.
	if _, _, stderr := run(t, "nonsense://u:e@host", "run", "key", "--", "true"); strings.Contains(stderr, "e@") || strings.Contains(stderr, "nons***") {
		t.Errorf("a password of one letter: %s", stderr)
	}
	if code, _, stderr := run(t, "", "run", "--store-file", file, "key", "--", "true"); code != exitStore || strings.Contains(stderr, "w0rd") {
		t.Errorf("--store-file: exit code %d, %s", code, stderr)
	}
}

func TestJSONLogs(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	_, _, stderr := run(t, url, "run", "--json", key, "--", "true")
	if !strings.HasPrefix(stderr, "{") || !strings.Contains(stderr, `"key":"`+key+`"`) {
		t.Errorf("log %q", stderr)
	}
	if _, _, stderr := run(t, url, "run", "--quiet", key, "--", "true"); stderr != "" {
		t.Errorf("--quiet said %q", stderr)
	}
}

// The lease is renewed for as long as the command runs.
func TestLeaseOutlivesItsTTL(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	// Long enough for a server that stands still for some seconds.
	p := begin(t, url, "run", "--ttl", "6s", key, "--", "sh", "-c", "echo ready; sleep 14; exit 9")
	p.out.await(t, "ready")
	deadline := time.Now().Add(13 * time.Second)
	for ; time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if code, _, _ := run(t, url, "run", key, "--", "true"); code != exitHeld && p.ProcessState == nil && time.Now().Before(deadline) {
			t.Fatalf("the key was free while the command ran: exit code %d", code)
		}
	}
	if code := p.end(t); code != 9 {
		t.Errorf("exit code %d, %s", code, p.err)
	}
}
