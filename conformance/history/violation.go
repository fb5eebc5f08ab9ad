package history

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// Violation is an answer that no correct lock would have given.
//
//nolint:errname // it is what was found; that it can be handed on as an error is a convenience
type Violation struct {
	// Rule of docs/contract.md that was broken, by its number there, and
	// Sentence, what it says.
	Rule     string
	Sentence string
	// Or has the other rules whose breach would explain the history as well,
	// as "rule 2 (Ownership): a release …".
	Or []string
	// Call is the number, from 1, in the history of its key, of the call whose
	// answer is the first that cannot be explained.
	Call int
	// Op is that call.
	Op Op
	// Before is what was known of the key before it.
	Before string
	// History of the key, up to the answer.
	History History

	options Options
}

// at is when the answer came.
func (v *Violation) at() time.Duration { return v.Op.Return }

// Error says in one sentence which rule was broken, and at which call.
func (v *Violation) Error() string {
	or := ""
	if len(v.Or) > 0 {
		or = " (or " + strings.Join(v.Or, "; or ") + ")"
	}
	return fmt.Sprintf("rule %s is broken by call #%d on key %q, client %d's %s at %s: %s%s; before it the key was %s",
		v.Rule, v.Call, v.Op.Key, v.Op.Client, v.Op, seconds(v.Op.Call), v.Sentence, or, v.Before)
}

// Table lists the last n calls on the key, one a line.
func (v *Violation) Table(n int) string {
	calls := len(v.History.Ops)
	return v.History.table(max(calls-n, 0), calls)
}

// breach is a rule, and the model that breaks it.
type breach struct {
	relax    relaxation
	rule     string
	sentence string
}

// What may be wrong with an answer, in the order in which it is said if several
// breaches explain the history equally well. What is seen comes before what may be behind it: that a live lease
// was not respected before that a stranger's release may have ended it.
var (
	wronglyAcquired = []breach{
		{anyToken, "3 (Fencing)", "tokens of one key strictly increase"},
		{tokenOutOfRange, "3 (Fencing)", "tokens are greater than 0 and less than 2^53"},
		{reentry, "1 (Exclusion)", "a live lease, the same owner's too, means not acquired"},
		{doubleGrant, "1 (Exclusion)", "a live lease means not acquired"},
		{strangerReleases, "2 (Ownership)", "a release acts only on a live lease of its owner"},
		{strangerRenews, "2 (Ownership)", "a renewal acts only on a live lease of its owner"},
		{renewalOtherwise, "6 (Renewal)", "a renewal sets the end of the lease to now + ttl"},
		{earlyExpiry, "5 (Expiry)", "a lease lives at least ttl from the moment the request was sent"},
	}
	wronglyRefused = []breach{
		{releaseKeepsLease, "2 (Ownership)", "a release ends the lease"},
		{lateExpiry, "5 (Expiry)", "a lease ends at most ttl + slack after the answer"},
		{expiredRenews, "5 (Expiry)", "an expired lease cannot be renewed, even if nobody took the key"},
		{renewalOtherwise, "6 (Renewal)", "a renewal sets the end of the lease to now + ttl"},
		{strangerRenews, "2 (Ownership)", "a renewal acts only on a live lease of its owner"},
		{needlessRefusal, "1 (Exclusion)", "without a live lease a try is granted"},
	}
	wronglyRenewed = []breach{
		{releaseKeepsLease, "2 (Ownership)", "a lease that was released cannot be renewed"},
		{expiredRenews, "5 (Expiry)", "an expired lease cannot be renewed, even if nobody took the key"},
		{strangerRenews, "2 (Ownership)", "a renewal acts only on a live lease of its owner"},
		{renewalOtherwise, "6 (Renewal)", "a renewal sets the end of the lease to now + ttl"},
		{doubleGrant, "1 (Exclusion)", "a live lease means not acquired"},
	}
	wronglyNotRenewed = []breach{
		{earlyExpiry, "5 (Expiry)", "a lease lives at least ttl from the moment the request was sent"},
		{needlessRefusal, "6 (Renewal)", "a live lease is renewed"},
		{strangerReleases, "2 (Ownership)", "a release acts only on a live lease of its owner"},
		{strangerRenews, "2 (Ownership)", "a renewal acts only on a live lease of its owner"},
		{renewalOtherwise, "6 (Renewal)", "a renewal sets the end of the lease to now + ttl"},
		{doubleGrant, "1 (Exclusion)", "a live lease means not acquired"},
	}
	// A release says nothing by itself, but its answer may be the last chance
	// for another call, which is still running, to have been executed.
	wronglyReleased = []breach{
		{releaseKeepsLease, "2 (Ownership)", "a release ends the lease"},
		{doubleGrant, "1 (Exclusion)", "a live lease means not acquired"},
	}
)

func breaches(op Op) []breach {
	switch {
	case op.Kind == Acquire && op.Yes:
		return wronglyAcquired
	case op.Kind == Acquire:
		return wronglyRefused
	case op.Kind == Renew && op.Yes:
		return wronglyRenewed
	case op.Kind == Renew:
		return wronglyNotRenewed
	default:
		return wronglyReleased
	}
}

// explain finds the first answer of h that cannot be explained, and the rule.
// It returns nil if the time did not suffice.
func explain(h History, o Options) *Violation {
	at, ok := firstInexplicable(h, o, strict)
	if !ok {
		return nil
	}
	v := &Violation{options: o, History: h.until(at)}
	for n, op := range v.History.Ops {
		if op.Return == at {
			v.Call, v.Op = n+1, op
		}
	}
	// Of the breaches that explain this answer, the one that explains most of
	// what came afterwards: a store makes its mistake more than once.
	v.Rule, v.Sentence = "1 (Exclusion)", "each method is one step, atomic for its key"
	furthest := at
	for _, b := range breaches(v.Op) {
		until := h.end()
		if explicable(h, o, until, b.relax) != porcupine.Ok {
			if until, ok = firstInexplicable(h, o, b.relax); !ok {
				continue
			}
		}
		switch {
		case until > furthest:
			furthest = until
			v.Rule, v.Sentence, v.Or = b.rule, b.sentence, nil
		case until == furthest && until > at:
			v.Or = append(v.Or, fmt.Sprintf("rule %s: %s", b.rule, b.sentence))
		}
	}
	v.Before = v.before()
	return v
}

// until returns h as it was at the time at: calls that had not been answered
// are without an answer.
func (h History) until(at time.Duration) History {
	var part History
	for _, op := range h.Ops {
		if op.Call > at {
			break
		}
		if op.Return > at {
			op.Return, op.Yes, op.Token, op.Err = 0, false, 0, ""
		}
		part.Ops = append(part.Ops, op)
	}
	for _, f := range h.Faults {
		if f.Begin < at {
			part.Faults = append(part.Faults, f)
		}
	}
	return part
}

// search repeats the search that failed, and keeps what it found.
func (v *Violation) search() (porcupine.Model, porcupine.LinearizationInfo) {
	m := (&model{slack: v.options.Slack}).porcupine()
	_, info := porcupine.CheckOperationsVerbose(m, operations(steps(v.History, v.options, v.at())), v.options.Timeout)
	return m, info
}

// before describes the key after the longest order of the calls before the
// violation that makes sense.
func (v *Violation) before() string {
	m, info := v.search()
	best := m.Init()
	length := 0
	for _, partition := range info.PartialLinearizationsOperations() {
		for _, ops := range partition {
			s, without := m.Init(), true
			for _, op := range ops {
				_, s = m.Step(s, op.Input, op.Output)
				without = without && asStep(op.Input).number != v.Call
			}
			if without && len(ops) > length {
				best, length = s, len(ops)
			}
		}
	}
	return m.DescribeState(best)
}

// WriteFiles writes into dir, which it creates if need be, a picture of the
// history, an HTML page of its own, and the history as JSON. They are named
// after the key's last eight bytes.
func (v *Violation) WriteFiles(dir string) (html, data string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", "", fmt.Errorf("history: %w", err)
	}
	name := "history-" + fileName(v.Op.Key)
	html, data = filepath.Join(dir, name+".html"), filepath.Join(dir, name+".json")
	m, info := v.search()
	annotations := []porcupine.Annotation{{
		Tag: "broken", Start: int64(v.Op.Call), End: int64(v.Op.Return),
		Description: fmt.Sprintf("#%d: rule %s", v.Call, v.Rule), Details: v.Error(),
		BackgroundColor: "#ff9191",
	}}
	for _, f := range v.History.Faults {
		end := f.End
		if end == 0 || end > v.at() {
			end = v.at()
		}
		annotations = append(annotations, porcupine.Annotation{
			Tag: "fault", Start: int64(f.Begin), End: int64(end), Description: f.Name, BackgroundColor: "#ffe08a",
		})
	}
	info.AddAnnotations(annotations)
	if err := porcupine.VisualizePath(m, info, html); err != nil {
		return "", "", fmt.Errorf("history: %w", err)
	}
	b, err := json.MarshalIndent(v.export(), "", "\t")
	if err != nil {
		return "", "", fmt.Errorf("history: %w", err)
	}
	if err := os.WriteFile(data, append(b, '\n'), 0o644); err != nil {
		return "", "", fmt.Errorf("history: %w", err)
	}
	return html, data, nil
}

// exported is the content of the JSON file.
type exported struct {
	Violation string        `json:"violation"`
	Rule      string        `json:"rule"`
	Call      int           `json:"call"`
	Slack     time.Duration `json:"slack_ns"`
	// Deliveries as in Options.
	Deliveries int     `json:"deliveries"`
	History    History `json:"history"`
}

func (v *Violation) export() exported {
	return exported{
		Violation: v.Error(), Rule: v.Rule, Call: v.Call,
		Slack: v.options.Slack, Deliveries: v.options.Deliveries, History: v.History,
	}
}

// fileName makes a part of a file's name of the end of key.
func fileName(key string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= '0' && r <= '9', r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r == '-':
			return r
		}
		return '_'
	}, key[max(len(key)-8, 0):])
}
