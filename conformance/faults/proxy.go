package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"
)

// dialTimeout is how long the proxy waits for the server to take a connection.
// A server on the same machine that does not is stopped or overloaded; then the
// client's connection is reset.
const dialTimeout = 10 * time.Second

// Proxy passes TCP connections on to a server, and fails as it is told. Make it
// with [NewProxy] or [Listen]. All methods are safe for concurrent use.
type Proxy struct {
	target   string
	listener net.Listener
	ctx      context.Context // ends when the proxy is closed
	cancel   context.CancelFunc
	wg       sync.WaitGroup // accept, and the goroutines of all links

	mu      sync.Mutex
	closed  bool
	fault   Fault // of connections to come
	links   map[*link]struct{}
	traps   []*Trap
	stats   Stats
	changed chan struct{} // closed and replaced whenever a held byte may have become free
}

// Stats counts what a [Proxy] has done so far.
type Stats struct {
	// Accepted counts connections, Open those that are open now; Refused and
	// Reset those that the proxy ended, at once or later.
	Accepted, Open, Refused, Reset int
	// Requests and Replies are bytes that were delivered, LostRequests and
	// LostReplies bytes that were lost.
	Requests, Replies, LostRequests, LostReplies int64
}

// NewProxy starts a proxy for the server at target, "host:port". It is closed,
// with all its connections, when the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p, err := Listen(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// Listen is [NewProxy] for programs: the caller has to call Close. The server
// need not be up: each connection dials it.
func Listen(target string) (*Proxy, error) {
	ctx, cancel := context.WithCancel(context.Background())
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		cancel()
		return nil, fmt.Errorf("faults: %w", err)
	}
	p := &Proxy{
		target:   target,
		listener: listener,
		ctx:      ctx,
		cancel:   cancel,
		links:    make(map[*link]struct{}),
		changed:  make(chan struct{}),
	}
	p.wg.Go(p.accept)
	return p, nil
}

// Addr is where clients connect to, "127.0.0.1:port".
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Close ends all connections and returns when no goroutine of the proxy is
// left. It may be called more than once.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.cancel()
	p.listener.Close()
	for l := range p.links {
		l.resetLocked()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// Set makes f the fault of all connections, those that are open and those to
// come. What was on its way when Set is called may still get through; what is
// sent after it has returned is subject to f.
//
// Connections that lost bytes, by the fault before or a [Trap], are reset,
// unless f goes on losing them.
func (p *Proxy) Set(f Fault) { p.set(f, true, true) }

// SetOpen is [Proxy.Set] for the connections that are open.
func (p *Proxy) SetOpen(f Fault) { p.set(f, true, false) }

// SetNew is [Proxy.Set] for the connections to come.
func (p *Proxy) SetNew(f Fault) { p.set(f, false, true) }

// Clear ends all faults and all traps.
func (p *Proxy) Clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.traps = nil
	for l := range p.links {
		l.up.trap = nil // what it held may go; what it lost is lost
	}
	p.setLocked(Fault{}, true, true)
}

func (p *Proxy) set(f Fault, open, coming bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setLocked(f, open, coming)
}

func (p *Proxy) setLocked(f Fault, open, coming bool) {
	if coming {
		p.fault = f
	}
	if open {
		for l := range p.links {
			l.fault = f
			if l.up.lost && !f.Requests.Drop || l.down.lost && !f.Replies.Drop {
				l.resetLocked()
			}
		}
	}
	p.changedLocked()
}

// Reset resets all open connections, both ends of them, and returns how many
// that were. Bytes on their way, held ones too, are lost.
func (p *Proxy) Reset() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for l := range p.links {
		if l.resetLocked() {
			n++
		}
	}
	return n
}

// Stats returns the counts so far.
func (p *Proxy) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Open = len(p.links)
	return s
}

// changedLocked wakes those who wait for a fault to end.
func (p *Proxy) changedLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			if p.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of file descriptors, perhaps: give others time to close some.
			select {
			case <-p.ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		p.mu.Lock()
		switch {
		case p.closed:
			reset(conn)
		case p.fault.Refuse:
			p.stats.Refused++
			reset(conn)
		default:
			p.stats.Accepted++
			l := newLink(p, conn)
			p.links[l] = struct{}{}
			p.wg.Go(l.run)
		}
		p.mu.Unlock()
	}
}

// reset closes conn so that the other side gets a reset, not an orderly end.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // else it is closed in order, which is no harm
	}
	conn.Close()
}
