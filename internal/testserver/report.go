package testserver

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

// Record is one line of the file named by $LEASEKIT_TEST_SUMMARY: what the tests
// of one package ran on, or skipped.
type Record struct {
	Package string `json:"package"`
	// Kind is "redis", "etcd", "postgres", "mongo" or "pgbouncer".
	Kind string `json:"kind"`
	// Name, Version and From of the server, and Addr of the last one.
	Name    string `json:"name,omitempty"`
	Version string `json:"version,omitempty"`
	From    string `json:"from,omitempty"`
	Addr    string `json:"addr,omitempty"`
	// Tests counts how often tests asked for such a server and got it.
	Tests int `json:"tests,omitempty"`
	// Skipped counts the tests that wanted one in vain; Hint says how to get it.
	Skipped int    `json:"skipped,omitempty"`
	Hint    string `json:"hint,omitempty"`
}

// note adds to the report.
func note(r Record) {
	state.Lock()
	defer state.Unlock()
	if state.report == nil {
		state.report = map[string]*Record{}
	}
	key := r.Kind + " " + r.Name + " " + r.Version + " " + r.From
	if old := state.report[key]; old != nil {
		r.Tests += old.Tests
		r.Skipped += old.Skipped
	}
	state.report[key] = &r
}

// Main runs the tests of a package, stops the shared servers, reports what was
// used and exits. It is the body of TestMain.
func Main(m *testing.M) {
	os.Exit(runTests(m.Run))
}

// runTests is Main without its end.
func runTests(run func() int) (code int) {
	if err := checkRequired(); err != nil {
		fmt.Fprintln(os.Stderr, "testserver:", err)
		return 2
	}
	state.Lock()
	state.inMain = true
	state.Unlock()
	defer func() {
		for _, ss := range state.shared {
			if ss.server != nil {
				ss.server.remove()
			}
		}
		if err := report(); err != nil {
			fmt.Fprintln(os.Stderr, "testserver: summary:", err)
			code = max(code, 1)
		}
	}()
	return run()
}

// report prints one line for each server that was used or missed, and appends
// them to $LEASEKIT_TEST_SUMMARY.
func report() error {
	var lines []byte
	for _, key := range slices.Sorted(maps.Keys(state.report)) {
		r := state.report[key]
		r.Package = packagePath()
		fmt.Println("testserver:", r)
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		lines = append(append(lines, line...), '\n')
	}
	name := os.Getenv("LEASEKIT_TEST_SUMMARY")
	if name == "" || lines == nil {
		return nil
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	// One write, so that packages tested at the same time do not mix lines.
	_, err = f.Write(lines)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}

// String is the record as Main prints it.
func (r *Record) String() string {
	if r.Skipped > 0 {
		return fmt.Sprintf("%s: %d tests skipped: %s", r.Kind, r.Skipped, r.Hint)
	}
	name := r.Kind
	if r.Name != "" && r.Name != r.Kind {
		name += ": " + r.Name
	}
	return fmt.Sprintf("%s %s (%s) at %s", name, r.Version, r.From, r.Addr)
}

// packagePath is the import path of the package under test.
func packagePath() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Path != "" {
		return strings.TrimSuffix(info.Path, ".test")
	}
	return os.Args[0]
}
