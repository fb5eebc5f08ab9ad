package faults

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

const (
	// pieceSize is how much is read at once, and queueLen how many pieces one
	// direction keeps before the sender has to wait, as it would for a network
	// whose buffers are full.
	pieceSize = 32 << 10
	queueLen  = 64
)

// link is one connection through the proxy.
type link struct {
	p      *Proxy
	client net.Conn
	done   chan struct{} // closed when the link is over
	up     pipe          // requests
	down   pipe          // replies

	// Guarded by p.mu.
	fault  Fault
	server net.Conn // nil while it is dialled
	over   bool
}

// pipe is one direction of a link: a goroutine reads, another one delivers.
type pipe struct {
	l        *link
	src, dst net.Conn
	queue    chan piece

	// Guarded by p.mu.
	lost bool   // bytes are missing: nothing can be delivered any more
	gone bool   // the destination takes no more bytes
	trap *Trap  // holds the bytes, or waits until some are lost
	tail []byte // the end of what was sent, in which the text of a trap may begin
}

// piece is what was read at once; end is set for the last one.
type piece struct {
	bytes []byte
	due   time.Time
	end   error // io.EOF for an orderly end
}

func newLink(p *Proxy, client net.Conn) *link {
	l := &link{p: p, client: client, fault: p.fault, done: make(chan struct{})}
	l.up = pipe{l: l, src: client, queue: make(chan piece, queueLen)}
	l.down = pipe{l: l, dst: client, queue: make(chan piece, queueLen)}
	return l
}

// run connects to the server and passes bytes until both directions have ended.
func (l *link) run() {
	defer l.end()
	dialer := net.Dialer{Timeout: dialTimeout}
	server, err := dialer.DialContext(l.p.ctx, "tcp", l.p.target)
	if err != nil {
		l.reset()
		return
	}
	l.p.mu.Lock()
	if l.over {
		l.p.mu.Unlock()
		reset(server)
		return
	}
	l.server = server
	l.p.mu.Unlock()
	l.up.dst, l.down.src = server, server

	var wg sync.WaitGroup
	for _, d := range []*pipe{&l.up, &l.down} {
		wg.Go(d.read)
		wg.Go(d.deliver)
	}
	wg.Wait()
}

// end closes what is still open, in order.
func (l *link) end() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	delete(l.p.links, l)
	if l.over {
		return
	}
	l.over = true
	close(l.done)
	l.client.Close()
	if l.server != nil {
		l.server.Close()
	}
}

func (l *link) reset() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.resetLocked()
}

// resetLocked resets both ends, and returns whether they were open.
func (l *link) resetLocked() bool {
	if l.over {
		return false
	}
	l.over = true
	close(l.done)
	l.p.stats.Reset++
	reset(l.client)
	if l.server != nil {
		reset(l.server)
	}
	return true
}

// flowLocked is what the present fault does to d.
func (d *pipe) flowLocked() Flow {
	if d == &d.l.up {
		return d.l.fault.Requests
	}
	return d.l.fault.Replies
}

// read reads until the source ends, and queues what it read.
func (d *pipe) read() {
	p := d.l.p
	buffer := make([]byte, pieceSize)
	for {
		n, err := d.src.Read(buffer)
		p.mu.Lock()
		next := piece{due: time.Now().Add(d.flowLocked().delay()), end: err}
		if n > 0 {
			next.bytes = slices.Clone(buffer[:n])
			if d == &d.l.up {
				d.l.springLocked(next.bytes)
			}
		}
		p.mu.Unlock()
		select {
		case d.queue <- next:
		case <-d.l.done:
			return
		}
		if err != nil {
			return
		}
	}
}

// deliver writes what was read, as the fault of the moment allows.
func (d *pipe) deliver() {
	for {
		var next piece
		select {
		case next = <-d.queue:
		case <-d.l.done:
			return
		}
		if !d.sleep(time.Until(next.due)) {
			return
		}
		if !d.write(next.bytes) {
			return
		}
		if next.end != nil {
			d.finish(next.end)
			return
		}
	}
}

// write writes b, or as much of it as is not lost; false if the link is over.
func (d *pipe) write(b []byte) bool {
	for len(b) > 0 {
		n, pause, what := d.admit(len(b))
		switch what {
		case over:
			return false
		case lose:
			return true
		}
		n, err := d.dst.Write(b[:n])
		d.delivered(n)
		if err != nil {
			d.failed()
			return true
		}
		b = b[n:]
		if len(b) > 0 && !d.sleep(pause) {
			return false
		}
	}
	return true
}

// verdict is what is to happen to bytes that have arrived at the far end.
type verdict int

const (
	pass verdict = iota
	lose
	over
)

// admit waits until the n bytes that are next may be delivered, and returns how
// many of them at once, and how long to pause after those; or that they are
// lost, or the link is over. n is 0 for the end of the source.
func (d *pipe) admit(n int) (now int, pause time.Duration, what verdict) {
	p := d.l.p
	for {
		p.mu.Lock()
		flow, changed := d.flowLocked(), p.changed
		hold := flow.Hold || d.trap != nil && d.trap.action == holdRequest
		switch {
		case d.l.over:
			p.mu.Unlock()
			return 0, 0, over
		case d.gone:
			p.mu.Unlock()
			return 0, 0, lose
		case flow.Drop || d.lost:
			d.loseLocked(n)
			p.mu.Unlock()
			return 0, 0, lose
		case !hold:
			p.mu.Unlock()
			if flow.Chunk > 0 {
				return min(n, flow.Chunk), flow.Every, pass
			}
			return n, 0, pass
		}
		p.mu.Unlock()
		select {
		case <-changed:
		case <-d.l.done:
		}
	}
}

// delivered counts n bytes.
func (d *pipe) delivered(n int) {
	d.l.p.mu.Lock()
	defer d.l.p.mu.Unlock()
	if d == &d.l.up {
		d.l.p.stats.Requests += int64(n)
	} else {
		d.l.p.stats.Replies += int64(n)
	}
}

// loseLocked counts n bytes that are lost, and tells the trap that waited for
// that.
func (d *pipe) loseLocked(n int) {
	d.lost = true
	if d == &d.l.up {
		d.l.p.stats.LostRequests += int64(n)
	} else {
		d.l.p.stats.LostReplies += int64(n)
	}
	if d.trap != nil && n > 0 {
		d.trap.springLocked()
		d.trap = nil
	}
}

// failed is called when the destination does not take bytes any more. A client
// that has gone must not keep the server from getting what the client sent
// before, however late; without a server nothing is left to do.
func (d *pipe) failed() {
	if d == &d.l.up {
		d.l.reset()
		return
	}
	d.l.p.mu.Lock()
	d.gone = true
	d.l.p.mu.Unlock()
}

// finish passes the end of the source on. Like bytes it is held and lost.
func (d *pipe) finish(end error) {
	if _, _, what := d.admit(0); what != pass {
		return
	}
	if !errors.Is(end, io.EOF) {
		d.l.reset()
		return
	}
	if tcp, ok := d.dst.(*net.TCPConn); ok {
		_ = tcp.CloseWrite() // fails if the other side has gone
	}
}

// sleep sleeps, and returns false if the link is over.
func (d *pipe) sleep(t time.Duration) bool {
	if t <= 0 {
		return true
	}
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-d.l.done:
		return false
	}
}
