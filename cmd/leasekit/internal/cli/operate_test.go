//go:build unix

package cli

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
)

func TestListShowsWhoHoldsWhat(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	prefix := randomKey() + "/"
	tokens := map[string]int64{}
	for _, name := range []string{"a", "b"} {
		tokens[prefix+name] = hold(t, url, prefix+name, "host-"+name).Token()
	}
	hold(t, url, randomKey(), "elsewhere")

	code, stdout, stderr := run(t, url, "list", "--json", prefix)
	if code != 0 {
		t.Fatalf("exit code %d, %s", code, stderr)
	}
	for text := range strings.Lines(stdout) {
		var l line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if want := tokens[l.Key]; l.Token != want || l.Label != "host-"+strings.TrimPrefix(l.Key, prefix) || l.LeftMS <= 0 {
			t.Errorf("got %+v, want token %d", l, want)
		}
		delete(tokens, l.Key)
	}
	if len(tokens) != 0 {
		t.Errorf("not listed: %v", tokens)
	}

	code, stdout, _ = run(t, url, "list", prefix)
	if lines := strings.Split(strings.TrimSpace(stdout), "\n"); code != 0 || len(lines) != 3 || !strings.HasPrefix(lines[0], "KEY") {
		t.Errorf("exit code %d, table:\n%s", code, stdout)
	}
}

func TestShow(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	if code, _, stderr := run(t, url, "show", key); code != exitFailure || !strings.Contains(stderr, "nobody holds") {
		t.Errorf("free key: exit code %d, %s", code, stderr)
	}
	hold(t, url, key, "me")
	if code, stdout, _ := run(t, url, "show", ""); code != exitUsage || stdout != "" { // an unset variable
		t.Errorf("empty key: exit code %d, %q", code, stdout)
	}
	if code, stdout, stderr := run(t, url, "show", key); code != 0 || !strings.Contains(stdout, "me") {
		t.Errorf("held key: exit code %d, %q, %s", code, stdout, stderr)
	}
}

func TestBreakEndsALease(t *testing.T) {
	t.Parallel()
	url := testserver.Redis(t).URL
	key := randomKey()
	hold(t, url, key, "stuck-host")
	if code, _, stderr := run(t, url, "break", key); code != exitUsage || !strings.Contains(stderr, "--yes") {
		t.Errorf("without --yes: exit code %d, %s", code, stderr)
	}
	if code, _, _ := run(t, url, "run", key, "--", "true"); code != exitHeld {
		t.Error("the lease was broken without --yes")
	}
	code, stdout, stderr := run(t, url, "break", "--yes", key)
	if code != 0 || !strings.Contains(stdout, "stuck-host") {
		t.Errorf("exit code %d, %q, %s", code, stdout, stderr)
	}
	free(t, url, key)
	if code, _, _ := run(t, url, "break", "--yes", key); code != exitFailure {
		t.Errorf("nobody holds the key: exit code %d, want %d", code, exitFailure)
	}
}

func TestOperatorCommandsReportAStoreThatIsAway(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"list"}, {"show", "key"}, {"break", "--yes", "key"}} {
		if code, _, stderr := run(t, "redis://127.0.0.1:1", args...); code != exitStore || stderr == "" {
			t.Errorf("%v: exit code %d, %q", args, code, stderr)
		}
	}
}

func TestInitPreparesTheStore(t *testing.T) {
	t.Parallel()
	url := testserver.StartPostgres(t).URL
	if code, _, stderr := run(t, url, "run", "key", "--", "true"); code != exitStore || !strings.Contains(stderr, "leasekit init") {
		t.Errorf("without a table: exit code %d, %s", code, stderr)
	}
	for range 2 {
		if code, _, stderr := run(t, url, "init"); code != 0 {
			t.Fatalf("init: exit code %d, %s", code, stderr)
		}
	}
	if code, _, stderr := run(t, url, "run", "key", "--", "true"); code != 0 {
		t.Errorf("after init: exit code %d, %s", code, stderr)
	}
}

// A server that takes connections and says nothing. The driver of etcd waits for
// as long as it is let.
func TestCommandsGiveUpOnASilentStore(t *testing.T) {
	t.Parallel()
	silent, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	for _, args := range [][]string{{"list"}, {"show", "key"}, {"break", "--yes", "key"}, {"torture", "--no-faults"}} {
		t.Run(args[0], func(t *testing.T) {
			t.Parallel()
			code, _, stderr := run(t, "etcd://"+silent.Addr().String(), args...)
			if code != exitStore || !strings.Contains(stderr, errSilent.Error()) {
				t.Errorf("exit code %d, %q", code, stderr)
			}
		})
	}
}

func TestTableFitsTheTerminal(t *testing.T) {
	t.Parallel()
	for _, columns := range []int{60, 80, 120} {
		var b strings.Builder
		show, finish := tablePrinter(&b, columns)
		for _, key := range []string{"short", strings.Repeat("long", 100), "line\nbreak", "\x1b[31mred", strings.Repeat("é", 90)} {
			if err := show(core.LeaseInfo{Key: key, Label: strings.Repeat("host", 30), Token: 1795971957798743, Left: 999 * time.Hour}); err != nil {
				t.Fatal(err)
			}
		}
		if err := finish(); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
		if len(lines) != 6 {
			t.Errorf("%d lines:\n%s", len(lines), b.String())
		}
		for _, l := range lines {
			if n := len([]rune(l)); n > columns {
				t.Errorf("%d columns, want at most %d: %s", n, columns, l)
			}
			if strings.Contains(l, "\x1b") {
				t.Errorf("an escape sequence got through: %q", l)
			}
		}
	}
}

func TestManualCompletionAndVersion(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "man")
	if code, _, stderr := run(t, "", "man", dir); code != 0 {
		t.Fatalf("exit code %d, %s", code, stderr)
	}
	page, err := os.ReadFile(filepath.Join(dir, "leasekit-run.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"LEASEKIT_TOKEN", "75", "76", "127", "--conflict-ok", "host:pid"} {
		if !strings.Contains(string(page), text) {
			t.Errorf("leasekit-run.1 does not mention %q", text)
		}
	}
	if host, _ := os.Hostname(); host != "" && strings.Contains(string(page), host+":") {
		t.Error("the manual contains this machine's name")
	}
	for _, args := range [][]string{{"completion"}, {"completion", "nosuch"}} {
		if code, stdout, _ := run(t, "", args...); code != exitUsage || stdout != "" {
			t.Errorf("%v: exit code %d, %q", args, code, stdout)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if code, stdout, _ := run(t, "", "completion", shell); code != 0 || !strings.Contains(stdout, "leasekit") {
			t.Errorf("completion %s: exit code %d", shell, code)
		}
	}
	if code, stdout, _ := run(t, "", "version"); code != 0 || !strings.HasPrefix(stdout, "leasekit ") {
		t.Errorf("version: exit code %d, %q", code, stdout)
	}
}
