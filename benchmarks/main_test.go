package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

// A short run of everything, so that no workload rots. It judges no time.
func TestRunMeasuresEveryStore(t *testing.T) {
	dir := t.TempDir()
	jsonFile, htmlFile := filepath.Join(dir, "r.json"), filepath.Join(dir, "r.html")
	var table, errOut bytes.Buffer
	args := []string{"-duration", "80ms", "-clients", "2", "-keys", "10", "-holds", "20", "-ttl", "3s", "-json", jsonFile, "-html", htmlFile}
	if err := run(t.Context(), args, &table, &errOut); err != nil {
		t.Fatalf("%v\n%s", err, errOut.String())
	}
	content, err := os.ReadFile(jsonFile)
	if err != nil {
		t.Fatal(err)
	}
	var report Report
	if err := json.Unmarshal(content, &report); err != nil {
		t.Fatal(err)
	}
	required := strings.Split(os.Getenv("LEASEKIT_TEST_REQUIRE"), ",")
	for name, why := range report.Environment.LeftOut {
		for _, r := range required {
			if r == name {
				t.Errorf("%s was left out: %s", name, why)
			}
		}
		t.Logf("%s left out: %s", name, why)
	}

	type id struct {
		workload   string
		contenders int
	}
	want := []id{
		{workCycle, 1},
		{workCycle, 2},
		{workHeld, 1},
		{workRenew, 1},
		{workDo, 1},
		{workHandOver, 2},
		{workHandOver, 16},
		{workHandOver, 64},
		{workZipf, 2},
		{workHolds, 20},
	}
	for store := range report.Environment.Servers {
		got := map[id]Result{}
		for _, r := range report.Results {
			if r.Store == store && r.Impl == implOurs {
				got[id{r.Workload, r.Contenders}] = r
			}
		}
		for _, w := range want {
			r, ok := got[w]
			switch {
			case !ok:
				t.Errorf("%s: no result for %v", store, w)
			case r.Count == 0 && w.workload != workHandOver && w.workload != workHolds: // too short for these to be sure
				t.Errorf("%s: %v: nothing measured", store, w)
			case r.Count > 0 && (r.P50 <= 0 || r.P99 < r.P50 || r.Max < r.P99 || r.RatioToFloor <= 0):
				t.Errorf("%s: %v: %+v", store, w, r)
			}
		}
		if r := got[id{workHolds, 20}]; r.Lost > 0 {
			t.Errorf("%s: %d of 20 holds lost", store, r.Lost)
		}
	}

	for line := range strings.Lines(table.String()) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 100 {
			t.Errorf("%d columns, want at most 100: %s", n, line)
		}
	}
	page, err := os.ReadFile(htmlFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"Chart.js", "acquire-release", "hand-over", report.Environment.Command} {
		if !bytes.Contains(page, []byte(text)) {
			t.Errorf("the page does not contain %q", text)
		}
	}
	// Nothing is loaded from elsewhere.
	for _, text := range []string{"<script src", "<link", "@import", "url("} {
		if bytes.Contains(page, []byte(text)) {
			t.Errorf("the page contains %q: it must need no network", text)
		}
	}
}

func TestBadFlagsTouchNothing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.json")
	for _, args := range [][]string{
		{"-stores", "memory,zookeeper"},
		{"-stores", "memory,memory"},
		{"-duration", "0s"},
		{"-clients", "0"},
		{"-keys", "1"},
		{"-ttl", "10ms"},
		{"-frobnicate"},
		{"memory"},
	} {
		if err := run(t.Context(), append([]string{"-json", file}, args...), io.Discard, io.Discard); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("the output file was created")
	}
}
