package conformance

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

var update = flag.Bool("update", false, "write the tables of docs/conformance.md")

const docFile = "../docs/conformance.md"

// replaceBetween puts text between the marks called name in the document.
func replaceBetween(t *testing.T, doc, name, text string) string {
	t.Helper()
	begin, end := "<!-- begin "+name+" -->\n", "<!-- end "+name+" -->"
	before, rest, ok := strings.Cut(doc, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has not the marks %q and %q", docFile, begin, end)
	}
	return before + begin + text + end + after
}

// checkDoc compares a table of the document with what is true, or writes it.
func checkDoc(t *testing.T, name, table string) {
	t.Helper()
	text, err := os.ReadFile(docFile)
	if err != nil {
		t.Fatal(err)
	}
	want := replaceBetween(t, string(text), name, table)
	if want == string(text) {
		return
	}
	if *update {
		if err := os.WriteFile(docFile, []byte(want), 0o644); err != nil { //nolint:gosec // a page of the documentation
			t.Fatal(err)
		}
		return
	}
	for line := range strings.Lines(table) {
		if !strings.Contains(string(text), line) {
			t.Errorf("%s lacks, in its table of %s:\n%s", docFile, name, line)
		}
	}
	t.Errorf("the table of %s in %s is out of date: go test ./conformance -run '%s' -update", name, docFile, t.Name())
}

// needed tells which fields of Config a rule needs.
func needed(r Rule) string {
	if r.Needs == nil {
		return "`Open`"
	}
	var needed []string
	// Without anything, and then with all capabilities.
	for _, c := range []Config{{}, {first: (*client)(nil)}} {
		why := r.Needs(&c)
		if field, ok := strings.CutPrefix(why, "set Config."); ok {
			needed = append(needed, "`"+field+"`")
		} else if name, ok := strings.CutPrefix(why, "the store is no core."); ok {
			needed = append(needed, "a `core."+name+"`")
		}
	}
	return strings.Join(slices.Compact(needed), ", ")
}

func TestRulesTable(t *testing.T) {
	var b strings.Builder
	b.WriteString("| rule | needs | what it checks |\n|---|---|---|\n")
	for _, r := range Rules() {
		fmt.Fprintf(&b, "| %s/**%s** | %s | %s |\n", r.Group, r.Name, needed(r), r.Sentence)
	}
	checkDoc(t, "rules", b.String())
}

// TestMutantTable runs every rule on every mutant: what each mistake breaks
// beside its own rule, and that the other rules see nothing where there is
// nothing.
func TestMutantTable(t *testing.T) {
	rows := make([]string, len(mutants))
	var mu sync.Mutex
	broke := make(map[string]bool) // rules
	t.Run("mutants", func(t *testing.T) {
		for i, m := range mutants {
			t.Run(m.name, func(t *testing.T) {
				t.Parallel()
				var others []string
				for _, o := range failing(t, m.name) {
					if o.status == broken {
						mu.Lock()
						broke[o.rule.Name] = true
						mu.Unlock()
					}
					if o.rule.Name != m.rule && !slices.Contains(m.sometimes, o.rule.Name) {
						others = append(others, o.rule.Name)
					}
				}
				for _, rule := range m.sometimes {
					others = append(others, "at times "+rule)
				}
				rows[i] = fmt.Sprintf("| %s | %s | **%s** | %s |\n", m.name, m.story, m.rule, strings.Join(others, ", "))
			})
		}
	})
	for _, r := range Rules() {
		if r.Group == "Faults" { // needs a network: package faults has its mutants
			continue
		}
		if !broke[r.Name] && r.Name != "MutualExclusionOfProcesses" { // TestRun breaks that
			t.Errorf("no mutant breaks %s, which is not proven", r.Name)
		}
	}
	checkDoc(t, "mutants", "| mutant | a store that … | is caught by | and also fails |\n|---|---|---|---|\n"+strings.Join(rows, ""))
}
