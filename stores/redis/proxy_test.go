package redisstore_test

import (
	"net"
	"sync"
	"testing"
)

// proxy stands between a client and a server and does with what passes what a
// bad network does.
type proxy struct {
	addr     string
	target   string
	listener net.Listener

	accepting, pumps sync.WaitGroup

	mu       sync.Mutex
	changed  chan struct{} // closed when a mode changes
	requests mode
	replies  mode
	conns    map[net.Conn]struct{}
	dials    int
	held     bool // something was held since the last set
}

// mode is what happens to the bytes of one direction.
type mode int

const (
	pass    mode = iota // on they go
	hold                // they wait until the mode changes
	cut                 // the connection is closed instead
	cutOnce             // the same, and the next connection is well
)

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &proxy{
		addr:     listener.Addr().String(),
		target:   target,
		listener: listener,
		changed:  make(chan struct{}),
		conns:    map[net.Conn]struct{}{},
	}
	p.accepting.Go(p.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		p.set(cut, cut)
		p.accepting.Wait()
		p.breakAll()
		p.pumps.Wait()
	})
	return p
}

// set changes what happens to requests and replies from now on.
func (p *proxy) set(requests, replies mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests, p.replies, p.held = requests, replies, false
	close(p.changed)
	p.changed = make(chan struct{})
}

// breakAll closes every connection.
func (p *proxy) breakAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.conns {
		_ = conn.Close()
	}
}

// holding reports whether something has come that is held.
func (p *proxy) holding() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held
}

// dialled returns how many connections there have been.
func (p *proxy) dialled() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dials
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.dials++
		p.conns[client], p.conns[server] = struct{}{}, struct{}{}
		p.mu.Unlock()
		p.pumps.Go(func() { p.pump(client, server, &p.requests) })
		p.pumps.Go(func() { p.pump(server, client, &p.replies) })
	}
}

// pump carries bytes from one side to the other until one is closed. What it
// holds is delivered although the sender has gone meanwhile, as packets are that
// are on their way.
func (p *proxy) pump(from, to net.Conn, current *mode) {
	defer func() {
		_, _ = from.Close(), to.Close()
		p.mu.Lock()
		delete(p.conns, from)
		p.mu.Unlock()
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if p.wait(current) != pass {
				return
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// wait returns the mode as soon as it is not hold.
func (p *proxy) wait(current *mode) mode {
	for {
		p.mu.Lock()
		m, changed := *current, p.changed
		switch m {
		case cutOnce:
			*current = pass
		case hold:
			p.held = true
		}
		p.mu.Unlock()
		if m != hold {
			return m
		}
		<-changed
	}
}
