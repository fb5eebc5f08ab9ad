// Package testdoc keeps the generated tables of the documentation true: a test
// makes them again and compares, or, with -update, writes them.
package testdoc

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tables of the documentation that the tests make")

// Check fails t unless file has table between the marks "begin name" and "end
// name", which are comments of HTML. With the flag -update it writes it there.
// Only one package may be tested with -update at a time.
func Check(t testing.TB, file, name, table string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Clean(file))
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- begin "+name+" -->\n", "<!-- end "+name+" -->"
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has not the marks %q and %q", file, begin, end)
	}
	want := before + begin + table + end + after
	switch {
	case want == string(text):
		return
	case *update:
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil { //nolint:gosec // a page of the documentation
			t.Fatal(err)
		}
		return
	}
	for line := range strings.Lines(table) {
		if !strings.Contains(string(text), line) {
			t.Errorf("%s lacks, in its table of %s:\n%s", file, name, line)
		}
	}
	t.Errorf("the table of %s in %s is out of date: in the folder of this test, go test -run '^%s$' . -update", name, file, t.Name())
}
