package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// healthy is a repository in small: a root module, a library that needs it, a
// command that needs both, a module that is not published.
var healthy = map[string]string{
	"go.work":               "go 1.26\n\nuse (\n\t.\n\t./benchmarks\n\t./cmd/tool\n\t./lib\n)\n",
	"go.mod":                "module example.com/kit\n\ngo 1.26\n",
	"core/core.go":          "package core\n\nconst Answer = 42\n",
	"internal/x/x.go":       "package x\n",
	"lib/go.mod":            "module example.com/kit/lib\n\ngo 1.26\n\nrequire example.com/kit v0.2.0\n\nreplace example.com/kit => ..\n",
	"lib/lib.go":            "package lib\n\nimport \"example.com/kit/core\"\n\nconst Answer = core.Answer\n",
	"cmd/tool/go.mod":       "module example.com/kit/cmd/tool\n\ngo 1.26\n\nrequire (\n\texample.com/kit/lib v0.2.0\n\texample.com/kit v0.2.0 // indirect\n)\n",
	"cmd/tool/main.go":      "package main\n\nimport \"example.com/kit/lib\"\n\nfunc main() { println(lib.Answer) }\n",
	"benchmarks/go.mod":     "module example.com/kit/benchmarks\n\ngo 1.26\n",
	"benchmarks/benches.go": "package benchmarks\n",
}

func TestReleaseCheck(t *testing.T) {
	// Everything comes from the repository, so nothing may be asked elsewhere.
	t.Setenv("GOPROXY", "off")
	t.Setenv("GOFLAGS", "")
	for _, tt := range []struct {
		name   string
		change map[string]string
		want   string // part of the error; "" for none
	}{
		{"healthy", nil, ""},
		{
			"two versions",
			map[string]string{"lib/go.mod": strings.ReplaceAll(healthy["lib/go.mod"], "v0.2.0", "v0.1.9")},
			"share one version",
		},
		{
			"needs a module that is not published",
			map[string]string{"lib/go.mod": healthy["lib/go.mod"] + "\nrequire example.com/kit/benchmarks v0.2.0\n"},
			"not published",
		},
		{
			"replace in the command",
			map[string]string{"cmd/tool/go.mod": healthy["cmd/tool/go.mod"] + "\nreplace example.com/kit => ../..\n"},
			"replace",
		},
		{
			"package only in the workspace",
			map[string]string{"lib/lib.go": "package lib\n\nimport _ \"example.com/kit/benchmarks\"\n"},
			"example.com/kit/benchmarks",
		},
		{
			"library without a package",
			map[string]string{"lib/lib.go": ""},
			"example.com/kit/lib",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := run(repository(t, tt.change))
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("got error %v, want none", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("got error %v, want one about %q", err, tt.want)
			}
		})
	}
}

// repository commits the healthy files, changed, in a new repository. A file
// changed to nothing is left out.
func repository(t *testing.T, change map[string]string) string {
	t.Helper()
	top := t.TempDir()
	for name, text := range healthy {
		if changed, ok := change[name]; ok {
			text = changed
		}
		if text == "" {
			continue
		}
		name = filepath.Join(top, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{
		{"init", "-q"},
		{"add", "."},
		{"-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-q", "-m", "all"},
	} {
		cmd := exec.Command("git", args...)
		cmd.Dir = top
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v\n%s", args[0], err, out)
		}
	}
	return top
}
