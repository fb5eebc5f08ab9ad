package faults

import (
	"bytes"
	"slices"
)

type action int

const (
	loseReply action = iota
	loseRequest
	holdRequest
)

// Trap waits for the first request that contains a text, on whatever
// connection, and does to it what its maker is named after. What else happens
// on the connection shares its fate; other connections go on.
//
// The text must cross the wire as it is: not compressed, not encrypted. Random
// keys make good texts. A pipelining or multiplexing client may have other
// replies on their way, so a lost reply does not prove that the server has
// executed the request: look from another connection.
type Trap struct {
	p      *Proxy
	action action
	text   []byte
	sprung chan struct{}
	isOver bool  // sprung is closed
	pipe   *pipe // that is held
}

// LoseReply lets the request through and loses every reply on its connection
// from then on: the server acts, and the client waits. The trap has sprung when
// the first bytes of a reply are lost.
func (p *Proxy) LoseReply(text string) *Trap { return p.addTrap(loseReply, text) }

// LoseRequest loses the request. The trap has sprung when that has happened.
func (p *Proxy) LoseRequest(text string) *Trap { return p.addTrap(loseRequest, text) }

// HoldRequest holds the request until [Trap.Deliver] or [Proxy.Clear], also if
// the client closes its connection meanwhile. The trap has sprung when the
// request has arrived.
func (p *Proxy) HoldRequest(text string) *Trap { return p.addTrap(holdRequest, text) }

func (p *Proxy) addTrap(a action, text string) *Trap {
	t := &Trap{p: p, action: a, text: []byte(text), sprung: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.traps = append(p.traps, t)
	return t
}

// Sprung returns a channel that is closed when the trap has sprung.
func (t *Trap) Sprung() <-chan struct{} { return t.sprung }

// Deliver lets a held request through. A trap that has not sprung is removed.
func (t *Trap) Deliver() {
	t.p.mu.Lock()
	defer t.p.mu.Unlock()
	t.p.removeTrapLocked(t)
	if t.pipe != nil && t.pipe.trap == t {
		t.pipe.trap = nil
	}
	t.p.changedLocked()
}

func (t *Trap) springLocked() {
	if !t.isOver {
		t.isOver = true
		close(t.sprung)
	}
}

func (p *Proxy) removeTrapLocked(t *Trap) {
	p.traps = slices.DeleteFunc(p.traps, func(other *Trap) bool { return other == t })
}

// springLocked looks for the texts of traps in what the client has just sent.
// It runs before the bytes are queued, so that they are subject to the trap.
func (l *link) springLocked(sent []byte) {
	seen := slices.Concat(l.up.tail, sent) // a text may come in two pieces
	longest := 0
	for _, t := range slices.Clone(l.p.traps) {
		longest = max(longest, len(t.text))
		if !bytes.Contains(seen, t.text) {
			continue
		}
		l.p.removeTrapLocked(t)
		switch t.action {
		case loseReply:
			l.down.lost = true
			l.down.trap = t
		case loseRequest:
			l.up.lost = true
			l.up.trap = t
		case holdRequest:
			l.up.trap = t
			t.pipe = &l.up
			t.springLocked()
		}
	}
	keep := min(len(seen), max(longest-1, 0))
	l.up.tail = slices.Clone(seen[len(seen)-keep:])
}
