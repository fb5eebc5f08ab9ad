package testdoc

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// failure is a test that notes its failure.
type failure struct {
	testing.TB
	text string
}

func (f *failure) Helper()                   {}
func (f *failure) Name() string              { return "TestTable" }
func (f *failure) Errorf(s string, _ ...any) { f.text += s }
func (f *failure) Fatalf(s string, _ ...any) { panic(s) }

func TestCheck(t *testing.T) {
	file := filepath.Join(t.TempDir(), "doc.md")
	const old = "text\n<!-- begin things -->\n| a |\n<!-- end things -->\nmore\n"
	if err := os.WriteFile(file, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	Check(t, file, "things", "| a |\n")

	f := &failure{}
	Check(f, file, "things", "| b |\n")
	if !strings.Contains(f.text, "lacks") || !strings.Contains(f.text, "out of date") {
		t.Errorf("another table: %q", f.text)
	}
	f = &failure{}
	Check(f, file, "things", "")
	if !strings.Contains(f.text, "out of date") {
		t.Errorf("a line too many: %q", f.text)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no failure without marks")
			}
		}()
		Check(&failure{}, file, "other things", "| a |\n")
	}()

	*update = true
	defer func() { *update = false }()
	Check(t, file, "things", "| b |\n")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Replace(old, "| a |", "| b |", 1); string(text) != want {
		t.Errorf("written: %q, want %q", text, want)
	}
}
