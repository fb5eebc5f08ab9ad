package faults

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Fault is what happens to the bytes of a connection. The zero value delivers
// them.
type Fault struct {
	// Requests flow from the client to the server, Replies back.
	Requests, Replies Flow
	// Refuse resets new connections as soon as they are accepted. Open ones
	// are not affected.
	Refuse bool
}

// Flow is what happens to the bytes of one direction.
type Flow struct {
	// Delay is how long bytes are on their way, Jitter the most that is added
	// to it at random. Bytes never overtake one another.
	Delay, Jitter time.Duration
	// Chunk, if not 0, is the number of bytes that get through every Every.
	Chunk int
	Every time.Duration
	// Hold keeps the bytes, and delivers them when it ends.
	Hold bool
	// Drop loses the bytes. A connection that lost some is silent in this
	// direction from then on, and is reset when Drop ends.
	Drop bool
}

// Latency delays both directions by d and up to jitter more.
func Latency(d, jitter time.Duration) Fault {
	f := Flow{Delay: d, Jitter: jitter}
	return Fault{Requests: f, Replies: f}
}

// SlowDrip lets n bytes through every so often, in both directions.
func SlowDrip(n int, every time.Duration) Fault {
	f := Flow{Chunk: n, Every: every}
	return Fault{Requests: f, Replies: f}
}

// Silence holds the bytes of both directions: a cable that is pulled out and
// put in again. Requests that were sent meanwhile are executed when it ends.
func Silence() Fault { return Fault{Requests: Flow{Hold: true}, Replies: Flow{Hold: true}} }

// Blackhole loses the bytes of both directions: a firewall that drops packets.
func Blackhole() Fault { return Fault{Requests: Flow{Drop: true}, Replies: Flow{Drop: true}} }

// HalfOpen loses the replies: the server acts, and the client does not learn
// of it.
func HalfOpen() Fault { return Fault{Replies: Flow{Drop: true}} }

// DropRequests loses the requests: the server hears nothing.
func DropRequests() Fault { return Fault{Requests: Flow{Drop: true}} }

// Refuse resets new connections, as a server does that is down; together with
// [Proxy.Reset] nothing gets through.
func Refuse() Fault { return Fault{Refuse: true} }

// String describes f in a few words.
func (f Fault) String() string {
	var parts []string
	add := func(what string, w Flow) {
		if s := w.String(); s != "" {
			parts = append(parts, what+" "+s)
		}
	}
	if f.Requests == f.Replies {
		add("both directions", f.Requests)
	} else {
		add("requests", f.Requests)
		add("replies", f.Replies)
	}
	if f.Refuse {
		parts = append(parts, "new connections refused")
	}
	if len(parts) == 0 {
		return "no fault"
	}
	return strings.Join(parts, ", ")
}

// String describes w, "" if it delivers everything at once.
func (w Flow) String() string {
	switch {
	case w.Drop:
		return "dropped"
	case w.Hold:
		return "held"
	case w.Chunk > 0:
		return fmt.Sprintf("%d bytes every %v", w.Chunk, w.Every)
	case w.Jitter > 0:
		return fmt.Sprintf("delayed by %v to %v", w.Delay, w.Delay+w.Jitter)
	case w.Delay > 0:
		return fmt.Sprintf("delayed by %v", w.Delay)
	}
	return ""
}

// delay draws how long a piece of the flow is on its way.
func (w Flow) delay() time.Duration {
	if w.Jitter <= 0 {
		return w.Delay
	}
	return w.Delay + rand.N(w.Jitter)
}
