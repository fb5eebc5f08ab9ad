package history

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
)

// doubled is a history with a double grant, under a fault, and more after it.
func doubled(t *testing.T) History {
	t.Helper()
	return parse(t, `
		fault 3-5
		0 0-1 acquire 1 100 = 7
		1 2-3 acquire 2 100 = held
		1 4-5 acquire 2 100 = 8
		2 4-9 acquire 3 100 = held
		0 6-7 renew 1 100 = no`)
}

func TestWriteFiles(t *testing.T) {
	h := doubled(t)
	v := Check(h, Options{Slack: slack, Deliveries: 1}).Violation
	if v == nil {
		t.Fatal("no violation")
	}
	dir := filepath.Join(t.TempDir(), "new", "folder")
	page, data, err := v.WriteFiles(dir)
	if err != nil {
		t.Fatal(err)
	}
	html, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<html", "#1 acquire(owner 1, 100ms) = token 7", "#3: rule 1 (Exclusion)", "no answer yet", "held by owner 1", "client 2, 0.004"} {
		if !strings.Contains(string(html), want) {
			t.Errorf("%s lacks %q", page, want)
		}
	}
	if strings.Contains(string(html), "#5 ") {
		t.Errorf("%s shows what came after the violation", page)
	}

	// Whoever has the file can check it again.
	text, err := os.ReadFile(data)
	if err != nil {
		t.Fatal(err)
	}
	var read exported
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	again := Check(read.History, Options{Slack: read.Slack, Deliveries: read.Deliveries}).Violation
	if again == nil || again.Call != v.Call || read.Violation != v.Error() {
		t.Errorf("read from %s: %v, want %v", data, again, v)
	}
	if _, _, err := v.WriteFiles(data); err == nil {
		t.Error("a file was taken for a folder")
	}
}

func TestFileNameIsHarmless(t *testing.T) {
	for key, want := range map[string]string{
		"history:ABCDEFGH": "ABCDEFGH",
		"../../../etc/x":   "___etc_x",
		"k":                "k",
		"a b":              "a_b",
	} {
		if got := fileName(key); got != want {
			t.Errorf("fileName(%q) = %q, want %q", key, got, want)
		}
	}
}

func TestTable(t *testing.T) {
	v := Check(doubled(t), Options{Slack: slack}).Violation
	if v == nil {
		t.Fatal("no violation")
	}
	if got, want := strings.Count(v.Table(2), "\n"), 2; got != want {
		t.Errorf("Table(2) has %d lines", got)
	}
	all := v.Table(100)
	for _, want := range []string{"#1 ", "acquire(owner 1, 100ms) = token 7", "#4 ", "no answer yet"} {
		if !strings.Contains(all, want) {
			t.Errorf("the table lacks %q:\n%s", want, all)
		}
	}
}

func TestCheckGivesUp(t *testing.T) {
	// Refusals that overlap: every set of them is looked at, in vain.
	var lines strings.Builder
	lines.WriteString("0 0-1 acquire 1 1000 = 7\n")
	for i := range 40 {
		fmt.Fprintf(&lines, "%d 2-3 acquire %d 1000 = held\n", i, i+2)
	}
	if r := Check(parse(t, lines.String()), Options{}); !r.OK() {
		t.Fatal(r)
	}
	lines.WriteString("0 4-5 acquire 99 1000 = 8\n")
	r := Check(parse(t, lines.String()), Options{Timeout: time.Millisecond})
	if r.OK() || r.Violation != nil || len(r.Undecided) != 1 || !strings.Contains(r.String(), "could not be decided") {
		t.Errorf("got %v, want undecided", r)
	}
}

func TestCheckNamesTheFirstViolation(t *testing.T) {
	h := doubled(t)
	for _, op := range doubled(t).Ops {
		op.Key = "a later key"
		op.Call += time.Second
		op.Return += time.Second
		h.Ops = append(h.Ops, op)
	}
	r := Check(h, Options{Slack: slack})
	if r.Violation == nil || r.Violation.Op.Key != "k" || r.Keys != 2 || r.Calls != 10 {
		t.Errorf("got %v", r)
	}
}

// failing tells the child process of the next test what to do.
const failing = "HISTORY_TEST_FAIL"

// grantsAll is a store without any exclusion.
type grantsAll struct{}

func (grantsAll) Acquire(context.Context, string, string, time.Duration) (core.Grant, error) {
	return core.Grant{Acquired: true, Token: time.Now().UnixMicro()}, nil
}
func (grantsAll) Renew(context.Context, string, string, time.Duration) (bool, error) {
	return true, nil
}
func (grantsAll) Release(context.Context, string, string) error { return nil }

// A violation must fail the test of whoever calls Run, say why, and leave the
// files where go test -artifacts keeps them.
func TestRunFailsOnViolation(t *testing.T) {
	config := conformance.Config{Open: func(testing.TB) core.LockStore { return grantsAll{} }}
	if os.Getenv(failing) != "" {
		Run(t, config)
		return
	}
	for _, keep := range []bool{true, false} {
		dir := t.TempDir()
		args := []string{"-test.run=^TestRunFailsOnViolation$", "-test.outputdir=" + dir}
		if keep {
			args = append(args, "-test.artifacts")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
		cmd.Env = append(os.Environ(), failing+"=1")
		out, err := cmd.CombinedOutput()
		if err == nil {
			t.Fatalf("the test passed:\n%s", out)
		}
		for _, want := range []string{"--- FAIL: TestRunFailsOnViolation", "is broken by call #", "the last calls on the key:", "picture: "} {
			if !strings.Contains(string(out), want) {
				t.Errorf("the output lacks %q:\n%s", want, out)
			}
		}
		if hint := "with -artifacts"; strings.Contains(string(out), hint) == keep {
			t.Errorf("%q in the output: %v, with files kept: %v:\n%s", hint, !keep, keep, out)
		}
		pages, err := filepath.Glob(filepath.Join(dir, "_artifacts", "*", "*.html"))
		if err != nil {
			t.Fatal(err)
		}
		more, _ := filepath.Glob(filepath.Join(dir, "_artifacts", "*", "*", "*.html"))
		if kept := len(pages)+len(more) == 1; kept != keep {
			t.Errorf("%d pages were kept with -artifacts %v", len(pages)+len(more), keep)
		}
	}
}
