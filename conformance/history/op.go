package history

import (
	"fmt"
	"strings"
	"time"
)

// Kind is the method of a store that was called.
type Kind string

// The methods of core.LockStore.
const (
	Acquire Kind = "acquire"
	Renew   Kind = "renew"
	Release Kind = "release"
)

// Op is one call of a store and its answer.
type Op struct {
	// Client that made the call, 0 or more. A client may make several calls
	// at once.
	Client int `json:"client"`
	// Key of the call.
	Key string `json:"key"`
	// Kind of the call.
	Kind Kind `json:"kind"`
	// Owner stands for the owner of the call, which is a secret: the owners of
	// each key are numbered from 1.
	Owner int `json:"owner"`
	// TTL asked for, in nanoseconds. 0 for Release.
	TTL time.Duration `json:"ttl_ns,omitempty"`

	// Call and Return are the times, in nanoseconds since the history began,
	// just before the call and just after it. No two times of a history are
	// the same. Return is 0 while the call runs.
	Call   time.Duration `json:"call_ns"`
	Return time.Duration `json:"return_ns,omitempty"`

	// Yes is the answer: acquired, renewed, or, for Release, no error.
	Yes bool `json:"yes"`
	// Token of the lease, if one was acquired.
	Token int64 `json:"token,omitempty"`
	// Err is the error; the outcome is unknown then.
	Err string `json:"error,omitempty"`
}

// Unknown reports whether the outcome of the call is unknown: it returned an
// error, or has not returned.
func (o Op) Unknown() bool { return o.Err != "" || o.Return == 0 }

// String describes the call and its answer: "acquire(owner 3, 400ms) = token 17".
func (o Op) String() string { return o.call() + " = " + o.answer() }

func (o Op) call() string {
	if o.Kind == Release {
		return fmt.Sprintf("release(owner %d)", o.Owner)
	}
	return fmt.Sprintf("%s(owner %d, %v)", o.Kind, o.Owner, o.TTL)
}

func (o Op) answer() string {
	switch {
	case o.Return == 0:
		return "no answer yet"
	case o.Err != "":
		return "unknown: " + o.Err
	case o.Kind == Acquire && o.Yes:
		return fmt.Sprintf("token %d", o.Token)
	case o.Kind == Acquire:
		return "held"
	case o.Kind == Release:
		return "ok"
	default:
		return fmt.Sprint(o.Yes)
	}
}

// FaultSpan says that something was broken on purpose for some time.
type FaultSpan struct {
	// Name as it appears in pictures.
	Name string `json:"name"`
	// Breaks says that connections broke, so that a client library may have
	// sent again what was on its way, although the caller got one answer.
	Breaks bool `json:"breaks,omitempty"`
	// Clients whose calls are affected. Empty: all.
	Clients []int `json:"clients,omitempty"`
	// Begin and End, like the times of an [Op]. End is 0 while it lasts.
	Begin time.Duration `json:"begin_ns"`
	End   time.Duration `json:"end_ns,omitempty"`
}

// History is what clients did and were told, and what was broken meanwhile.
type History struct {
	// Ops in the order in which they began.
	Ops []Op `json:"ops"`
	// Faults in the order in which they began.
	Faults []FaultSpan `json:"faults,omitempty"`
}

// table writes the calls from..to, one a line.
func (h History) table(from, to int) string {
	var b strings.Builder
	for n, op := range h.Ops[from:to] {
		fmt.Fprintf(&b, "  #%-3d client %-2d %s  %s\n", from+n+1, op.Client, span(op), op)
	}
	return b.String()
}

func span(op Op) string {
	if op.Return == 0 {
		return fmt.Sprintf("%s – …", seconds(op.Call))
	}
	return fmt.Sprintf("%s – %s", seconds(op.Call), seconds(op.Return))
}

// seconds formats a time of a history: fixed decimals, so that columns align
// and the eye can subtract.
func seconds(d time.Duration) string { return fmt.Sprintf("%.6fs", d.Seconds()) }
