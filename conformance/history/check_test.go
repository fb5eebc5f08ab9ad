package history

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

const slack = 20 * time.Millisecond

// parse reads a history, one call a line, times in milliseconds:
//
//	client call-return method owner [ttl] = answer
//
// and faults, "fault begin-end". An answer is a token, "held", "yes", "no", "ok",
// or "?" for an error; a return of "…" is none.
func parse(t *testing.T, text string) History {
	t.Helper()
	var h History
	var stamps time.Duration // makes all times different
	at := func(s string) time.Duration {
		var ms float64
		if _, err := fmt.Sscan(s, &ms); err != nil {
			t.Fatalf("time %q: %v", s, err)
		}
		stamps++
		return time.Duration(ms*float64(time.Millisecond)) + stamps
	}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		begin, end, _ := strings.Cut(f[1], "-")
		if f[0] == "fault" {
			h.Faults = append(h.Faults, FaultSpan{Name: "fault", Breaks: true, Begin: at(begin), End: at(end)})
			continue
		}
		op := Op{Key: "k", Kind: Kind(f[2]), Call: at(begin)}
		if end != "…" {
			op.Return = at(end)
		}
		if _, err := fmt.Sscan(f[0], &op.Client); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(f[3], &op.Owner); err != nil {
			t.Fatal(err)
		}
		if f[4] != "=" {
			op.TTL = at(f[4]).Truncate(time.Millisecond)
		}
		switch answer := f[len(f)-1]; answer {
		case "held", "no":
		case "yes", "ok":
			op.Yes = true
		case "?":
			op.Err = "lost"
		default:
			op.Yes = true
			if _, err := fmt.Sscan(answer, &op.Token); err != nil {
				t.Fatal(err)
			}
		}
		h.Ops = append(h.Ops, op)
	}
	return h
}

func TestCheckAccepts(t *testing.T) {
	for name, text := range map[string]string{
		"nothing": ``,
		"one after the other": `
			0 0-1 acquire 1 100 = 7
			1 2-3 acquire 2 100 = held
			0 4-5 renew 1 100 = yes
			0 6-7 release 1 = ok
			0 8-9 renew 1 100 = no
			1 10-11 acquire 2 100 = 8`,
		"a race, in the order that fits": `
			0 0-10 acquire 1 100 = 8
			1 0-10 acquire 2 100 = 7
			1 2-3 release 2 = ok`,
		"refused by a lease that is granted meanwhile": `
			0 0-10 acquire 1 100 = 7
			1 1-2 acquire 2 100 = held`,
		"expiry, at the earliest": `
			0 0-1 acquire 1 100 = 7
			1 98-99.5 acquire 2 100 = 8`,
		"expiry, at the latest": `
			0 0-1 acquire 1 100 = 7
			1 121-122 acquire 2 100 = held
			1 123-124 acquire 2 100 = 8`,
		"a slow answer says nothing about when the lease began": `
			0 0-90 acquire 1 100 = 7
			1 99-100 acquire 2 100 = 8`,
		"a stranger changes nothing": `
			0 0-1 acquire 1 100 = 7
			1 2-3 renew 2 100 = no
			1 4-5 release 2 = ok
			0 6-7 renew 1 100 = yes
			1 100-101 acquire 2 100 = held`,
		"a renewal pushes the end": `
			0 0-1 acquire 1 100 = 7
			0 50-51 renew 1 100 = yes
			1 140-141 acquire 2 100 = held
			1 160-161 acquire 2 100 = 8`,
		"a renewal makes it shorter": `
			0 0-1 acquire 1 1000 = 7
			0 50-51 renew 1 10 = yes
			1 60-61 acquire 2 100 = 8`,
		"an unknown acquire that was executed": `
			0 0-10 acquire 1 100 = ?
			1 20-21 acquire 2 100 = held
			1 95-110 acquire 2 100 = 8`,
		"an unknown acquire that was not": `
			0 0-10 acquire 1 100 = ?
			1 11-12 acquire 2 100 = 8`,
		"an unknown acquire that is renewed": `
			0 0-10 acquire 1 100 = ?
			0 11-12 renew 1 100 = yes
			1 20-21 acquire 2 100 = held`,
		"an unknown acquire that is undone": `
			0 0-10 acquire 1 100 = ?
			1 11-12 acquire 2 100 = held
			0 13-14 release 1 = ok
			1 15-16 acquire 2 100 = 8`,
		"an unknown acquire that takes effect late": `
			0 0-10 acquire 1 100 = ?
			0 11-12 release 1 = ok
			1 20-21 acquire 2 100 = 7
			1 30-31 release 2 = ok
			1 200-201 acquire 3 100 = held
			1 310-311 acquire 4 100 = 9`,
		"an unknown acquire that takes effect twice": `
			0 0-10 acquire 1 100 = ?
			1 11-12 acquire 2 100 = held
			0 13-14 release 1 = ok
			1 15-16 acquire 2 100 = held
			1 120-121 acquire 2 100 = 8`,
		"an unknown acquire in flight": `
			0 0-… acquire 1 100 = ?
			1 11-12 acquire 2 100 = held`,
		"an unknown release, late": `
			0 0-1 acquire 1 1000 = 7
			0 2-3 release 1 = ?
			1 4-5 acquire 2 100 = held
			1 6-7 acquire 2 100 = 8`,
		"an unknown renewal, late": `
			0 0-1 acquire 1 100 = 7
			0 2-3 renew 1 100 = ?
			1 130-131 acquire 2 100 = held
			1 180-181 acquire 2 100 = held`,
		"an unknown renewal that ends the lease sooner": `
			0 0-1 acquire 1 1000 = 7
			0 2-3 renew 1 10 = ?
			1 20-21 acquire 2 100 = 8`,
		"a broken connection delivers again what was answered": `
			fault 0-30
			0 0-1 acquire 1 100 = 7
			0 2-3 release 1 = ok
			1 4-5 acquire 2 100 = held`,
		"two leases at once, of two keys": `
			0 0-1 acquire 1 100 = 7
			1 2-3 acquire 2 100 = 7`,
	} {
		t.Run(name, func(t *testing.T) {
			h := parse(t, text)
			if name == "two leases at once, of two keys" {
				h.Ops[1].Key = "other"
			}
			r := Check(h, Options{Slack: slack})
			if !r.OK() {
				t.Error(r)
			}
			if r.Calls != len(h.Ops) {
				t.Errorf("%d calls were checked, of %d", r.Calls, len(h.Ops))
			}
		})
	}
}

func TestCheckRejects(t *testing.T) {
	for name, test := range map[string]struct {
		call   int
		rule   string
		says   string
		before string
		text   string
	}{
		"double grant": {3, "1 (Exclusion)", "live lease means not acquired", "held by owner 1 until 0.099", `
			0 0-1 acquire 1 100 = 7
			2 2-3 acquire 3 100 = held
			1 4-5 acquire 2 100 = 8
			0 6-7 release 1 = ok`},
		"reentry": {2, "1 (Exclusion)", "same owner's too", "owner 1", `
			0 0-1 acquire 1 100 = 7
			0 2-3 acquire 1 100 = 8`},
		"refused for no reason": {1, "1 (Exclusion)", "is granted", "free", `
			0 0-1 acquire 1 100 = held`},
		"token repeats": {3, "3 (Fencing)", "strictly increase", "last token 7", `
			0 0-1 acquire 1 100 = 7
			0 2-3 release 1 = ok
			0 4-5 acquire 2 100 = 7`},
		"token of a later grant is less": {2, "3 (Fencing)", "strictly increase", "", `
			0 0-10 acquire 1 100 = 8
			0 11-12 release 1 = ok
			1 5-20 acquire 2 100 = 7`},
		"token 0":  {1, "3 (Fencing)", "less than 2^53", "", `0 0-1 acquire 1 100 = 0`},
		"token -1": {1, "3 (Fencing)", "less than 2^53", "", `0 0-1 acquire 1 100 = -1`},
		"token in nanoseconds": {1, "3 (Fencing)", "less than 2^53", "",
			`0 0-1 acquire 1 100 = 9007199254740992`},
		"release by a stranger": {3, "5 (Expiry)", "or rule 2 (Ownership): a release acts only", "", `
			0 0-1 acquire 1 100 = 7
			1 2-3 release 2 = ok
			0 4-5 renew 1 100 = no`},
		"release by a stranger, seen by another": {3, "2 (Ownership)", "a release acts only", "", `
			0 0-1 acquire 1 100 = 7
			1 2-3 release 2 = ok
			1 4-5 acquire 2 100 = 8
			1 6-7 release 1 = ok
			1 8-9 renew 2 100 = no`},
		"renewal by a stranger": {2, "2 (Ownership)", "a renewal acts only", "", `
			0 0-1 acquire 1 100 = 7
			1 2-3 renew 2 100 = yes`},
		"stranger's renewal pushes the end": {3, "5 (Expiry)", "at most ttl + slack", "", `
			0 0-1 acquire 1 100 = 7
			1 50-51 renew 2 100 = no
			1 140-141 acquire 2 100 = held`},
		"lease outlives its release": {3, "2 (Ownership)", "a release ends", "free", `
			0 0-1 acquire 1 100 = 7
			0 2-3 release 1 = ok
			1 4-5 acquire 2 100 = held`},
		"renewed after its release": {3, "2 (Ownership)", "released cannot be renewed", "free", `
			0 0-1 acquire 1 100 = 7
			0 2-3 release 1 = ok
			0 4-5 renew 1 100 = yes`},
		"expired lease is renewed": {2, "5 (Expiry)", "cannot be renewed", "", `
			0 0-1 acquire 1 100 = 7
			0 130-131 renew 1 100 = yes`},
		"expired once, expired for ever": {3, "5 (Expiry)", "cannot be renewed", "", `
			0 0-1 acquire 1 100 = 7
			0 105-106 renew 1 100 = no
			0 107-108 renew 1 100 = yes`},
		"lease outlives its ttl": {2, "5 (Expiry)", "at most ttl + slack", "", `
			0 0-1 acquire 1 100 = 7
			1 123-124 acquire 2 100 = held`},
		"lease is gone before its time": {2, "5 (Expiry)", "at least ttl", "", `
			0 0-1 acquire 1 100 = 7
			0 50-51 renew 1 100 = no`},
		"live lease is not renewed": {2, "6 (Renewal)", "a live lease is renewed", "held by owner 1", `
			0 0-1 acquire 1 100 = 7
			0 50-51 renew 1 100 = no
			1 60-61 acquire 2 100 = held
			0 70-71 renew 1 100 = yes`},
		"stranger's renewal, unanswered, makes it shorter": {3, "1 (Exclusion)", "or rule 2 (Ownership): a renewal acts only", "", `
			0 0-1 acquire 1 1000 = 7
			1 2-3 renew 2 10 = ?
			2 30-31 acquire 3 100 = 8`},
		"stranger's renewal, unanswered, takes the lease": {4, "2 (Ownership)", "a renewal acts only", "", `
			0 0-1 acquire 1 1000 = 7
			1 2-3 renew 2 1000 = ?
			2 30-31 acquire 3 100 = held
			0 40-41 renew 1 100 = no
			1 50-51 renew 2 1000 = yes`},
		"reentry, unanswered, makes it shorter": {3, "1 (Exclusion)", "same owner's too", "", `
			0 0-1 acquire 1 1000 = 7
			0 2-3 acquire 1 10 = ?
			2 30-31 acquire 3 100 = 8`},
		"expired lease is renewed, unanswered": {4, "5 (Expiry)", "cannot be renewed", "", `
			0 0-1 acquire 1 100 = 7
			0 130-131 renew 1 100 = no
			0 132-133 renew 1 100 = ?
			1 134-135 acquire 2 100 = held
			1 280-281 acquire 2 100 = 8`},
		"renewal does nothing": {3, "6 (Renewal)", "now + ttl", "", `
			0 0-1 acquire 1 100 = 7
			0 50-51 renew 1 100 = yes
			1 130-131 acquire 2 100 = 8
			1 132-133 release 2 = ok
			0 134-135 acquire 3 100 = 9
			0 184-185 renew 3 100 = yes
			0 260-261 renew 3 100 = no`},
		"renewal adds, or the lease ends late": {3, "5 (Expiry)", "or rule 6 (Renewal): a renewal sets the end of the lease to now + ttl", "", `
			0 0-1 acquire 1 100 = 7
			0 10-11 renew 1 100 = yes
			1 150-151 acquire 2 100 = held`},
		"ghost that does not end": {6, "5 (Expiry)", "at most ttl + slack", "", `
			0 0-10 acquire 1 100 = ?
			1 11-12 acquire 2 100 = held
			1 135-136 acquire 2 100 = held
			1 300-301 acquire 2 100 = held
			1 500-501 acquire 2 100 = held
			1 700-701 acquire 2 100 = held
			1 900-901 acquire 2 100 = held`},
		"unknown outcome does not let two in": {3, "1 (Exclusion)", "not acquired", "", `
			0 0-10 acquire 1 100 = ?
			1 11-12 acquire 2 100 = 7
			2 13-14 acquire 3 100 = 8`},
		"unknown release of another owner": {3, "1 (Exclusion)", "not acquired", "", `
			0 0-1 acquire 1 100 = 7
			1 2-3 release 2 = ?
			1 4-5 acquire 2 100 = 8`},
		"a broken connection does not let two in": {2, "1 (Exclusion)", "not acquired", "", `
			fault 0-30
			0 0-1 acquire 1 100 = 7
			1 4-5 acquire 2 100 = 8`},
		"after the fault nothing is delivered again": {3, "2 (Ownership)", "a release ends", "", `
			fault 0-30
			0 40-41 acquire 1 100 = 7
			0 42-43 release 1 = ok
			1 44-45 acquire 2 100 = held`},
		"what comes later does not matter": {2, "1 (Exclusion)", "", "", `
			0 0-1 acquire 1 100 = 7
			1 4-5 acquire 2 100 = 8
			2 4-300 acquire 3 100 = ?
			1 400-401 acquire 4 100 = 9`},
	} {
		t.Run(name, func(t *testing.T) {
			r := Check(parse(t, test.text), Options{Slack: slack})
			v := r.Violation
			if v == nil {
				t.Fatalf("got %v, want a violation", r)
			}
			if v.Call != test.call || v.Rule != test.rule || !strings.Contains(v.Error(), test.says) || !strings.Contains(v.Before, test.before) {
				t.Errorf("got call %d, %v\nwant call %d, rule %s, %q, before %q",
					v.Call, v, test.call, test.rule, test.says, test.before)
			}
			for _, part := range []string{v.Rule, v.Sentence, fmt.Sprintf("#%d", v.Call), v.Op.String(), `"k"`} {
				if !strings.Contains(v.Error(), part) {
					t.Errorf("%q lacks %q", v.Error(), part)
				}
			}
		})
	}
}
