//go:build unix

package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/leasekit/leasekit/internal/testserver"
)

func TestTortureOfSoundStores(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"memory:", testserver.Redis(t).URL} {
		dir := filepath.Join(t.TempDir(), "found")
		p := begin(t, url, "torture", "--for", "3s", "--dir", dir)
		code := p.end(t)
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: nothing was found, and %s was left", url, dir)
		}
		if code != 0 {
			t.Errorf("%s: exit code %d\n%s%s", url, code, p.out, p.err)
		}
		t.Logf("%s:\n%s", url, p.out)
		if p.out.String() == "" {
			t.Errorf("%s: nothing was reported", url)
		}
	}
}

func TestTortureReportsAStoreThatIsAway(t *testing.T) {
	t.Parallel()
	if code, _, stderr := run(t, "redis://127.0.0.1:1", "torture", "--for", "1s"); code != exitStore {
		t.Errorf("exit code %d, want %d; %s", code, exitStore, stderr)
	}
	if code, _, _ := run(t, "memory:", "torture", "--for", "1s", "--slack", "-1s"); code != exitUsage {
		t.Errorf("negative slack: exit code %d, want %d", code, exitUsage)
	}
	if code, _, _ := run(t, "memory:", "torture", "--for", "0s"); code != exitUsage {
		t.Errorf("--for 0s: exit code %d, want %d", code, exitUsage)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, "memory:", "torture", "--for", "1h", "--dir", file); code != exitUsage || stdout != "" {
		t.Errorf("--dir is a file: exit code %d, want %d before an hour has passed; %s%s", code, exitUsage, stdout, stderr)
	}
}

// A server that loses its data while holders think that they hold is what the
// checker has to find.
func TestTortureFindsALossOfData(t *testing.T) {
	t.Parallel()
	server := testserver.StartRedis(t)
	dir := filepath.Join(t.TempDir(), "found")
	flush := begin(t, server.URL, "run", "--ttl", "1h", "flush-lock", "--", "sh", "-c",
		`command -v redis-cli >/dev/null || exit 3; while :; do redis-cli -u "$LEASEKIT_STORE" FLUSHALL >/dev/null; sleep 0.2; done`)
	code, stdout, stderr := run(t, server.URL, "torture", "--for", "30s", "--no-faults", "--ttl", "2s", "--dir", dir)
	_ = flush.Process.Kill()
	if flush.end(t) == 3 {
		t.Skip("no redis-cli here to flush the server with")
	}
	if code != exitFailure {
		t.Fatalf("exit code %d, want %d\n%s%s", code, exitFailure, stdout, stderr)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Errorf("artifacts %v, %v", files, err)
	}
	if !strings.Contains(stderr, dir) {
		t.Errorf("it did not say where the artifacts are: %s", stderr)
	}
}

func TestProxyable(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ raw, target, by string }{
		{"redis://u:p@host/1", "host:6379", "redis://u:p@1.2.3.4:5/1"},
		{"rediss://host", "", ""},
		{"redis+cluster://host", "", ""},
		{"etcd://a:1,b:2", "", ""},
		{"etcd://a", "a:2379", "etcd://1.2.3.4:5"},
		{"etcd://a?ca=file", "", ""},
		{"postgres://h/db", "", ""}, // TLS is tried first
		{"postgres://h:9/db?sslmode=disable", "h:9", "postgres://1.2.3.4:5/db?sslmode=disable"},
		{"mongodb://h/db", "h:27017", "mongodb://1.2.3.4:5/db?directConnection=true"},
		{"mongodb+srv://h/db", "", ""},
		{"memory:", "", ""},
	} {
		proxied, target, ok := proxyable(test.raw)
		if ok != (test.target != "") || target != test.target {
			t.Errorf("%s: target %q, %v, want %q", test.raw, target, ok, test.target)
			continue
		}
		if ok && proxied("1.2.3.4:5") != test.by {
			t.Errorf("%s: by way of a proxy %s, want %s", test.raw, proxied("1.2.3.4:5"), test.by)
		}
	}
}
