package conformance

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	// maxParallel bounds the rules that run at once. They mostly wait for
	// leases to end, so that it need not be the number of cores, which is why
	// the suite does not use t.Parallel.
	maxParallel = 12
	// maxAttempts bounds how often a rule is tried that could not be judged.
	maxAttempts = 6
)

// status is the outcome of one rule.
type status int

const (
	filtered     status = iota // by -run or -skip
	passed                     //
	broken                     // the store is wrong
	failed                     // something else is: Open called t.Fatal
	notJudged                  // the machine was too slow every time
	skipped                    // Open called t.Skip
	notSupported               // not run
	knownFailing               // broken, as Config.KnownFailing says
)

// outcome is what became of a rule, and what there is to say about it.
type outcome struct {
	rule   Rule
	status status
	text   string
	over   chan struct{} // closed when the rule has run, or will not
}

func run(t *testing.T, c Config) {
	t.Helper()
	rules, err := c.prepare()
	if err != nil {
		t.Fatal(err)
	}
	if isWorker() {
		runWorker(t, &c)
		return
	}
	c.around()(t, func(t *testing.T) {
		t.Helper()
		c.probe(t)
	})
	text := summary(runRules(t, &c, rules))
	t.Log(text)
	if !testing.Verbose() {
		// Log is silent when all is well, and what was not checked is the part
		// that one has to see then.
		fmt.Printf("%s: %s\n", t.Name(), text)
	}
}

// prepare checks c, fills in its defaults, and returns the rules to run.
func (c *Config) prepare() ([]Rule, error) {
	if c.Open == nil {
		return nil, fmt.Errorf("conformance: Config.Open is nil")
	}
	if c.TTL < 0 || c.Slack < 0 || c.HandOvers < 0 {
		return nil, fmt.Errorf("conformance: negative Config.TTL, Slack or HandOvers")
	}
	c.TTL = cmp.Or(c.TTL, DefaultTTL)
	c.Slack = cmp.Or(c.Slack, DefaultSlack)
	c.HandOvers = cmp.Or(c.HandOvers, DefaultHandOvers)

	rules := slices.Concat(Rules(), c.Rules)
	names := make(map[string]bool)
	for _, r := range rules {
		if names[r.Name] {
			return nil, fmt.Errorf("conformance: two rules are called %s", r.Name)
		}
		names[r.Name] = true
	}
	for _, r := range rules {
		names[r.Group] = true
	}
	c.NotSupported, c.KnownFailing = bare(c.NotSupported, rules), bare(c.KnownFailing, rules)
	// A name that was mistyped, or whose rule was renamed, must not switch off
	// nothing and look as if it did.
	for name := range c.NotSupported {
		if !names[name] {
			return nil, fmt.Errorf("conformance: Config.NotSupported: there is no rule or group %q", name)
		}
	}
	for name := range c.KnownFailing {
		if !slices.ContainsFunc(rules, func(r Rule) bool { return r.Name == name }) {
			return nil, fmt.Errorf("conformance: Config.KnownFailing: there is no rule %q", name)
		}
	}
	return rules, nil
}

// bare is m with the names of rules alone, where they were given as they are
// printed, with their group.
func bare(m map[string]string, rules []Rule) map[string]string {
	short := maps.Clone(m)
	for _, r := range rules {
		if reason, ok := short[r.Group+"/"+r.Name]; ok {
			delete(short, r.Group+"/"+r.Name)
			short[r.Name] = reason
		}
	}
	return short
}

// why tells why r is not run, or "".
func (c *Config) why(r *Rule) string {
	if reason := cmp.Or(c.NotSupported[r.Name], c.NotSupported[r.Group]); reason != "" {
		return reason
	}
	if r.Needs == nil {
		return ""
	}
	return r.Needs(c)
}

// runRules runs each rule as a subtest of its group's subtest, all at once
// except those that must be alone, which come after the others.
func runRules(t *testing.T, c *Config, rules []Rule) []*outcome {
	t.Helper()
	outcomes := make([]*outcome, len(rules))
	groups := make(map[string][]*outcome)
	var order []string // of the groups
	// The rules that run at once, first the quiet and then the busy ones, and
	// those that run one by one.
	var quiet, busy, queue []*outcome
	for i, r := range rules {
		o := &outcome{rule: r, over: make(chan struct{})}
		outcomes[i] = o
		if groups[r.Group] == nil {
			order = append(order, r.Group)
		}
		groups[r.Group] = append(groups[r.Group], o)
		switch {
		case r.Alone:
			queue = append(queue, o)
		case r.Busy:
			busy = append(busy, o)
		default:
			quiet = append(quiet, o)
		}
	}
	// A restart cuts connections, also those of the functions in Config.
	slices.SortStableFunc(queue, func(a, b *outcome) int {
		switch {
		case a.rule.Last == b.rule.Last:
			return 0
		case a.rule.Last:
			return 1
		}
		return -1
	})
	gate := make(chan struct{}, maxParallel)

	runOne := func(t *testing.T, o *outcome) {
		defer close(o.over)
		var before []*outcome
		switch {
		case o.rule.Alone:
			before = slices.Concat(quiet, busy, queue[:slices.Index(queue, o)])
		case o.rule.Busy:
			before = quiet
		}
		for _, other := range before {
			<-other.over
		}
		gate <- struct{}{}
		defer func() { <-gate }()
		t.Run(o.rule.Name, func(t *testing.T) { report(t, c, o) })
	}
	// T.Run may be called from several goroutines, as long as all calls return
	// before the test does.
	var wg sync.WaitGroup
	for _, name := range order {
		wg.Go(func() {
			selected := false
			t.Run(name, func(t *testing.T) {
				selected = true
				var wg sync.WaitGroup
				defer wg.Wait()
				for _, o := range groups[name] {
					wg.Go(func() { runOne(t, o) })
				}
			})
			if !selected { // by -run: nobody else says that its rules are over
				for _, o := range groups[name] {
					close(o.over)
				}
			}
		})
	}
	wg.Wait()
	return outcomes
}

// report runs one rule and tells t about it.
func report(t *testing.T, c *Config, o *outcome) {
	if reason := c.why(&o.rule); reason != "" {
		o.status, o.text = notSupported, reason
		t.Skip("not supported: " + reason)
	}
	o.status, o.text = runRule(t, c, o.rule)
	if reason, known := c.KnownFailing[o.rule.Name]; known {
		switch o.status {
		case broken:
			t.Logf("known failing: %s\n%s", reason, o.text)
			o.status, o.text = knownFailing, reason
			return
		case passed:
			o.status = failed
			o.text = fmt.Sprintf("%s passes, although Config.KnownFailing lists it (%q): remove the entry", o.rule.Name, reason)
		}
	}
	switch o.status {
	case passed:
		if o.text != "" {
			t.Log(o.text)
		}
	case skipped:
		t.Skip(o.text)
	default:
		t.Error(o.text)
	}
}

// around is Config.Around or its default.
func (c *Config) around() func(t *testing.T, f func(t *testing.T)) {
	if c.Around != nil {
		return c.Around
	}
	return direct
}

func direct(t *testing.T, f func(t *testing.T)) { f(t) }

// runRule tries a rule until it is judged.
func runRule(t *testing.T, c *Config, rule Rule) (s status, text string) {
	around := c.around()
	if rule.Process {
		around = direct
	}
	var reasons []string
	ttl := c.TTL
	for range maxAttempts {
		var rec *recorder
		around(t, func(tb *testing.T) {
			rec = newRecorder(tb, 3*time.Minute+50*ttl)
			tt := &T{TB: rec, Config: c, rule: &rule, rec: rec, ttl: ttl}
			rec.do(func() { rule.Check(tt) })
		})
		switch {
		case rec.broken:
			return broken, rec.text()
		case rec.failed:
			return failed, fmt.Sprintf("%s could not be checked: %s", rule.Name, rec.text())
		case rec.skipped:
			return skipped, rec.text()
		case rec.again == "":
			return passed, rec.text()
		}
		reasons = append(reasons, fmt.Sprintf("with a ttl of %v: %s", ttl, rec.again))
		// A stall that spoiled a short lease is small beside a longer one.
		ttl = min(2*ttl, 16*c.TTL)
	}
	return notJudged, fmt.Sprintf("%s could not be judged, the store or the machine is too slow for Config.TTL:\n  %s",
		rule.Name, strings.Join(reasons, "\n  "))
}

// summary says in words what was checked and what was not.
func summary(outcomes []*outcome) string {
	by := make(map[status][]string)
	reasons := make(map[string][]Rule) // of what is not supported
	sizes := make(map[string]int)      // of the groups
	for _, o := range outcomes {
		sizes[o.rule.Group]++
		name := o.rule.Group + "/" + o.rule.Name
		switch o.status {
		case notSupported:
			reasons[o.text] = append(reasons[o.text], o.rule)
		case knownFailing:
			name += ": " + o.text
		}
		by[o.status] = append(by[o.status], name)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "conformance: %d rules checked", len(by[passed])+len(by[broken]))
	section := func(s status, what string) {
		if len(by[s]) == 0 {
			return
		}
		fmt.Fprintf(&b, "\n  %d %s:", len(by[s]), what)
		for _, name := range by[s] {
			fmt.Fprintf(&b, "\n    %s", name)
		}
	}
	section(broken, "broken")
	section(failed, "failed otherwise")
	section(notJudged, "not judged, the machine was too slow")
	section(knownFailing, "known failing")
	section(skipped, "skipped by Open")
	if n := len(by[notSupported]); n > 0 {
		fmt.Fprintf(&b, "\n  %d not supported:", n)
		for _, reason := range slices.Sorted(maps.Keys(reasons)) {
			fmt.Fprintf(&b, "\n    %s: %s", reason, strings.Join(names(reasons[reason], sizes), ", "))
		}
	}
	if n := len(by[filtered]); n > 0 {
		fmt.Fprintf(&b, "\n  %d not selected by -run or -skip", n)
	}
	return b.String()
}

// names lists rules, and a group that is complete by its own name.
func names(rules []Rule, sizes map[string]int) (names []string) {
	groups := make(map[string]int)
	for _, r := range rules {
		groups[r.Group]++
	}
	for _, r := range rules {
		switch n := groups[r.Group]; {
		case n < sizes[r.Group] || n == 1:
			names = append(names, r.Group+"/"+r.Name)
		case !slices.Contains(names, fmt.Sprintf("%s (all %d)", r.Group, n)):
			names = append(names, fmt.Sprintf("%s (all %d)", r.Group, n))
		}
	}
	return names
}
