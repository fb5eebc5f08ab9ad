package conformance

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/leasekit/leasekit/internal/testdoc"
)

const docFile = "../docs/conformance.md"

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
	testdoc.Check(t, docFile, "rules", b.String())
}

// TestMutantTable runs every rule on every mutant: what each mistake breaks
// beside its own rule, and that the other rules see nothing where there is
// nothing. A mistake may break a rule, or not, by a chance of one in some
// hundred: a row that is not in the document is made again, up to twice.
func TestMutantTable(t *testing.T) {
	text, err := os.ReadFile(docFile)
	if err != nil {
		t.Fatal(err)
	}
	rows := make([]string, len(mutants))
	var mu sync.Mutex
	broke := make(map[string]bool) // rules
	row := func(t *testing.T, m mutant) string {
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
		return fmt.Sprintf("| %s | %s | **%s** | %s |\n", m.name, m.story, m.rule, strings.Join(others, ", "))
	}
	t.Run("mutants", func(t *testing.T) {
		for i, m := range mutants {
			t.Run(m.name, func(t *testing.T) {
				t.Parallel()
				for range 3 {
					rows[i] = row(t, m)
					if strings.Contains(string(text), rows[i]) {
						return
					}
					t.Logf("not in %s: %s", docFile, rows[i])
				}
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
	testdoc.Check(t, docFile, "mutants", "| mutant | a store that … | is caught by | and also fails |\n|---|---|---|---|\n"+strings.Join(rows, ""))
}
