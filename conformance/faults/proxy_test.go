package faults_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/leasekit/leasekit/conformance/faults"
)

// patience bounds what must happen; it is spent only by a test that fails.
const patience = 20 * time.Second

// moment is how long a test watches that something does not happen. A machine
// that is slow can only hide a mistake, never invent one.
const moment = 60 * time.Millisecond

// server answers every line with "ok " and the line.
type server struct {
	net.Listener
	mu    sync.Mutex
	lines []string
	news  chan struct{} // closed and replaced when a line arrives
	ended chan error    // how each connection ended
}

func newServer(t *testing.T) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{Listener: l, news: make(chan struct{}), ended: make(chan error, 100)}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			wg.Go(func() {
				defer stop()
				defer conn.Close()
				s.serve(conn)
			})
		}
	})
	t.Cleanup(func() { cancel(); l.Close(); wg.Wait() })
	return s
}

func (s *server) serve(conn net.Conn) {
	in := bufio.NewReader(conn)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			select {
			case s.ended <- err:
			default: // a test that opens hundreds does not ask
			}
			return
		}
		line = strings.TrimSuffix(line, "\n")
		s.mu.Lock()
		s.lines = append(s.lines, line)
		close(s.news)
		s.news = make(chan struct{})
		s.mu.Unlock()
		fmt.Fprintf(conn, "ok %s\n", line)
	}
}

// await waits until the server has heard line.
func (s *server) await(t *testing.T, line string) {
	t.Helper()
	timeout := time.After(patience)
	for {
		s.mu.Lock()
		heard, news := slices.Contains(s.lines, line), s.news
		s.mu.Unlock()
		if heard {
			return
		}
		select {
		case <-news:
		case <-timeout:
			t.Fatalf("the server never heard %q", line)
		}
	}
}

func (s *server) heard(line string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.lines, line)
}

// client is a connection through the proxy.
type client struct {
	t *testing.T
	*net.TCPConn
	in *bufio.Reader
}

func dial(t *testing.T, addr string) *client {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	return &client{t, conn.(*net.TCPConn), bufio.NewReader(conn)}
}

func (c *client) send(line string) {
	c.t.Helper()
	if _, err := fmt.Fprintln(c, line); err != nil {
		c.t.Fatalf("send %q: %v", line, err)
	}
}

// expect reads the answer to line.
func (c *client) expect(line string) {
	c.t.Helper()
	got, err := c.in.ReadString('\n')
	if want := "ok " + line + "\n"; got != want || err != nil {
		c.t.Fatalf("got %q, %v, want %q", got, err, want)
	}
}

func (c *client) ask(line string) { c.t.Helper(); c.send(line); c.expect(line) }

// expectSilence watches for a moment that nothing arrives.
func (c *client) expectSilence() {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(moment))
	b, err := c.in.ReadByte()
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		c.t.Fatalf("got %q, %v, want silence", b, err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
}

func (c *client) expectReset() {
	c.t.Helper()
	b, err := c.in.ReadByte()
	if !errors.Is(err, syscall.ECONNRESET) {
		c.t.Fatalf("got %q, %v, want a reset", b, err)
	}
}

func setup(t *testing.T) (*server, *faults.Proxy) {
	t.Helper()
	s := newServer(t)
	return s, faults.NewProxy(t, s.Addr().String())
}

func TestProxyPassesBytes(t *testing.T) {
	s, p := setup(t)
	c := dial(t, p.Addr())
	c.ask("hello")

	// Much more than what is read at once, both ways at the same time.
	var lines []string
	for i := range 20_000 {
		lines = append(lines, fmt.Sprintf("line %d", i))
	}
	go fmt.Fprintln(c, strings.Join(lines, "\n"))
	for _, line := range lines {
		c.expect(line)
	}

	// The client's end reaches the server, the answers before it the client.
	c.send("last")
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	c.expect("last")
	if err := <-s.ended; !errors.Is(err, io.EOF) {
		t.Errorf("the server's connection ended with %v, want EOF", err)
	}
	if b, err := c.in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("got %q, %v, want EOF", b, err)
	}
	stats := p.Stats()
	if stats.Accepted != 1 || stats.Requests == 0 || stats.Replies <= stats.Requests || stats.LostReplies+stats.LostRequests != 0 || stats.Reset != 0 {
		t.Errorf("stats %+v", stats)
	}
}

func TestLatencyDelaysButKeepsOrder(t *testing.T) {
	_, p := setup(t)
	c := dial(t, p.Addr())
	const delay = 20 * time.Millisecond
	p.Set(faults.Latency(delay, delay))
	start := time.Now()
	for i := range 20 {
		c.send(fmt.Sprint(i))
		time.Sleep(time.Millisecond)
	}
	for i := range 20 {
		c.expect(fmt.Sprint(i))
		if took := time.Since(start); took < 2*delay {
			t.Errorf("answer %d after %v, want at least %v", i, took, 2*delay)
		}
	}
	// A pipe, not a queue at a counter: 20 requests do not take 20 delays.
	p.Clear()
	c.ask("fast")
}

func TestOneDirectionIsDelayed(t *testing.T) {
	s, p := setup(t)
	c := dial(t, p.Addr())
	p.Set(faults.Fault{Replies: faults.Flow{Delay: 200 * time.Millisecond}})
	start := time.Now()
	c.send("a")
	s.await(t, "a")
	arrived := time.Since(start)
	c.expect("a")
	if answered := time.Since(start); answered < 200*time.Millisecond || answered <= arrived {
		t.Errorf("arrived after %v, answered after %v", arrived, answered)
	}
}

// lost waits until a proxy has lost just these bytes.
func lost(t *testing.T, what, bytes string, count func() int64) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		switch n := count(); {
		case n == int64(len(bytes)):
			return
		case n > int64(len(bytes)) || time.Now().After(deadline):
			t.Fatalf("%d bytes of %s lost, want those of %q", n, what, bytes)
		}
	}
}

func TestHalfOpen(t *testing.T) {
	s, p := setup(t)
	c := dial(t, p.Addr())
	c.ask("before")
	p.Set(faults.HalfOpen())
	c.send("acted on")
	s.await(t, "acted on")
	c.expectSilence()
	fresh := dial(t, p.Addr()) // one that begins in the fault
	fresh.send("fresh")
	s.await(t, "fresh")
	fresh.expectSilence()
	// A stream with a hole must not go on.
	lost(t, "replies", "ok acted on\nok fresh\n", func() int64 { return p.Stats().LostReplies })
	p.Clear()
	c.expectReset()
	fresh.expectReset()
	dial(t, p.Addr()).ask("after")
}

func TestConnectionWithoutLossSurvivesTheFault(t *testing.T) {
	_, p := setup(t)
	c := dial(t, p.Addr())
	c.ask("before")
	p.Set(faults.Blackhole())
	p.Clear()
	c.ask("after")
}

func TestDropRequests(t *testing.T) {
	s, p := setup(t)
	c := dial(t, p.Addr())
	c.ask("before")
	p.Set(faults.DropRequests())
	c.send("lost")
	c.expectSilence()
	lost(t, "requests", "lost\n", func() int64 { return p.Stats().LostRequests })
	p.Clear()
	c.expectReset()
	if s.heard("lost") {
		t.Error("the server heard a lost request")
	}
}

func TestBlackhole(t *testing.T) {
	s, p := setup(t)
	p.Set(faults.Blackhole())
	c := dial(t, p.Addr())
	c.send("lost")
	c.expectSilence()
	lost(t, "requests", "lost\n", func() int64 { return p.Stats().LostRequests })
	c.Close() // nobody learns of that either
	p.Set(faults.Fault{})
	dial(t, p.Addr()).ask("after")
	if s.heard("lost") {
		t.Error("the server heard a lost request")
	}
}

func TestSilenceDeliversLate(t *testing.T) {
	s, p := setup(t)
	patient, gone := dial(t, p.Addr()), dial(t, p.Addr())
	patient.ask("before")
	gone.ask("before too")
	p.Set(faults.Silence())
	patient.send("one")
	patient.send("two")
	gone.send("late")
	gone.Close() // its request is on its way all the same
	patient.expectSilence()
	if s.heard("one") || s.heard("late") {
		t.Fatal("a held request arrived")
	}
	p.Clear()
	patient.expect("one")
	patient.expect("two")
	s.await(t, "late")
	if stats := p.Stats(); stats.LostRequests+stats.LostReplies != 0 {
		t.Errorf("stats %+v", stats)
	}
}

func TestReset(t *testing.T) {
	s, p := setup(t)
	a, b := dial(t, p.Addr()), dial(t, p.Addr())
	a.ask("a")
	b.ask("b")
	if n := p.Reset(); n != 2 {
		t.Errorf("Reset() = %d, want 2", n)
	}
	a.expectReset()
	b.expectReset()
	for range 2 {
		if err := <-s.ended; !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the server's connection ended with %v, want a reset", err)
		}
	}
	dial(t, p.Addr()).ask("after")
	if n := p.Stats().Reset; n != 2 {
		t.Errorf("%d resets counted", n)
	}
}

// expectRefused dials. The reset may be quicker than Dial, or come after it.
func expectRefused(t *testing.T, addr string) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		_, err = conn.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
}

func TestRefuse(t *testing.T) {
	_, p := setup(t)
	old := dial(t, p.Addr())
	old.ask("before")
	p.Set(faults.Refuse())
	expectRefused(t, p.Addr())
	old.ask("still")
	p.Clear()
	dial(t, p.Addr()).ask("after")
	if n := p.Stats().Refused; n != 1 {
		t.Errorf("%d refused connections counted", n)
	}
}

func TestServerThatIsDown(t *testing.T) {
	s, p := setup(t)
	s.Close()
	expectRefused(t, p.Addr())
}

func TestSlowDrip(t *testing.T) {
	s, p := setup(t)
	c := dial(t, p.Addr())
	const every = 5 * time.Millisecond
	p.Set(faults.SlowDrip(2, every))
	start := time.Now()
	c.ask("0123456789") // 11 bytes there: 5 pauses; 14 back: 6
	if took, least := time.Since(start), 11*every; took < least {
		t.Errorf("answered after %v, want at least %v", took, least)
	}
	s.await(t, "0123456789")
	p.Clear()
	c.ask("after")
}

func TestScope(t *testing.T) {
	_, p := setup(t)
	old := dial(t, p.Addr())
	old.ask("a")
	p.SetNew(faults.Silence())
	old.ask("b")
	fresh := dial(t, p.Addr())
	fresh.send("c")
	fresh.expectSilence()
	p.SetNew(faults.Fault{})
	dial(t, p.Addr()).ask("d")
	fresh.expectSilence()
	p.SetOpen(faults.Fault{})
	fresh.expect("c")

	p.SetOpen(faults.Silence())
	old.send("e")
	old.expectSilence()
	dial(t, p.Addr()).ask("f")
	p.Clear()
	old.expect("e")
}

func TestLoseReply(t *testing.T) {
	s, p := setup(t)
	c, other := dial(t, p.Addr()), dial(t, p.Addr())
	trap := p.LoseReply("secret")
	c.ask("something else")
	select {
	case <-trap.Sprung():
		t.Fatal("sprung by another request")
	default:
	}
	c.send("a secret request")
	<-trap.Sprung()
	if !s.heard("a secret request") {
		t.Error("a reply was lost, and the server had not heard the request")
	}
	c.expectSilence()
	other.ask("secret again") // a trap springs once
	p.Reset()
	c.expectReset()
}

func TestTrapSeesTextInTwoPieces(t *testing.T) {
	_, p := setup(t)
	c := dial(t, p.Addr())
	c.ask("before")
	trap := p.LoseReply("secret")
	for piece := range slices.Chunk([]byte("xxsecrexxsecretxx\n"), 2) {
		if _, err := c.Write(piece); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // else the pieces are read as one
	}
	<-trap.Sprung()
}

func TestLoseRequest(t *testing.T) {
	s, p := setup(t)
	c := dial(t, p.Addr())
	c.ask("before")
	trap := p.LoseRequest("secret")
	c.send("secret")
	<-trap.Sprung()
	c.expectSilence()
	p.Clear()
	c.expectReset()
	if s.heard("secret") {
		t.Error("the server heard a lost request")
	}
}

func TestHoldRequest(t *testing.T) {
	for _, end := range []string{"Deliver", "Clear"} {
		t.Run(end, func(t *testing.T) {
			s, p := setup(t)
			c := dial(t, p.Addr())
			c.ask("before")
			trap := p.HoldRequest("secret")
			c.send("secret")
			c.send("behind it")
			<-trap.Sprung()
			c.Close()
			dial(t, p.Addr()).ask("another connection")
			if s.heard("secret") {
				t.Fatal("a held request arrived")
			}
			if end == "Clear" {
				p.Clear()
			} else {
				trap.Deliver()
			}
			s.await(t, "behind it")
		})
	}
}

func TestTrapThatIsRemoved(t *testing.T) {
	_, p := setup(t)
	c := dial(t, p.Addr())
	p.HoldRequest("a secret").Deliver()
	c.ask("a secret")
	p.LoseRequest("b secret")
	p.Clear()
	c.ask("b secret")
}

func TestClientThatIsGoneDoesNotStopItsRequests(t *testing.T) {
	s, p := setup(t)
	p.Set(faults.Fault{Requests: faults.Flow{Delay: moment}})
	c := dial(t, p.Addr())
	for i := range 10 {
		c.send(fmt.Sprint("request ", i))
	}
	c.Close() // the replies meet a closed connection
	s.await(t, "request 9")
}

func TestCloseLeavesNothingBehind(t *testing.T) {
	s := newServer(t)
	// Goroutines carry the label of the one that started them.
	ctx := pprof.WithLabels(t.Context(), pprof.Labels("faults-test", t.Name()))
	pprof.SetGoroutineLabels(ctx)
	defer pprof.SetGoroutineLabels(t.Context())
	p, err := faults.Listen(s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	pprof.SetGoroutineLabels(t.Context())
	if labelled(t) == 0 {
		t.Fatal("the test sees no goroutine of an open proxy")
	}
	for _, f := range []faults.Fault{{}, faults.Latency(time.Hour, 0), faults.Silence(), faults.Blackhole(), faults.SlowDrip(1, time.Hour)} {
		p.SetNew(f)
		c := dial(t, p.Addr())
		c.send("a line")
	}
	p.Close()
	p.Close()
	// Close has waited for its goroutines; the runtime may need a moment to
	// take the last of them off its list.
	for deadline := time.Now().Add(patience); labelled(t) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines are left", labelled(t))
		}
	}
	if n := p.Stats().Open; n != 0 {
		t.Errorf("%d connections are open", n)
	}
	if _, err := net.Dial("tcp", p.Addr()); err == nil {
		t.Error("a closed proxy takes connections")
	}
}

// labelled counts the goroutines with the label of t.
func labelled(t *testing.T) int {
	t.Helper()
	var b bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&b, 1); err != nil {
		t.Fatal(err)
	}
	return strings.Count(b.String(), `"faults-test":"`+t.Name()+`"`)
}

func TestFaultsComeAndGoUnderLoad(t *testing.T) {
	_, p := setup(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				conn, err := net.Dial("tcp", p.Addr())
				if err != nil {
					continue
				}
				_ = conn.SetDeadline(time.Now().Add(5 * time.Millisecond))
				in := bufio.NewReader(conn)
				for j := range 20 {
					line := fmt.Sprint("line ", i, j)
					if _, err := fmt.Fprintln(conn, line); err != nil {
						break
					}
					got, err := in.ReadString('\n')
					if err != nil {
						break
					}
					// Late, or not at all, but never something else.
					if got != "ok "+line+"\n" {
						t.Errorf("got %q as the answer to %q", got, line)
					}
				}
				conn.Close()
			}
		})
	}
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			p.Set([]faults.Fault{faults.Silence(), {}, faults.HalfOpen(), faults.Latency(time.Millisecond, time.Millisecond), faults.Blackhole(), faults.SlowDrip(3, time.Millisecond), faults.Refuse()}[i%7])
			time.Sleep(3 * time.Millisecond)
			if i%5 == 0 {
				p.Reset()
			}
		}
	})
	wg.Wait()
	p.Clear()
	dial(t, p.Addr()).ask("after")
}

func TestFaultsDescribeThemselves(t *testing.T) {
	for want, f := range map[string]faults.Fault{
		"no fault":                               {},
		"both directions dropped":                faults.Blackhole(),
		"both directions held":                   faults.Silence(),
		"replies dropped":                        faults.HalfOpen(),
		"requests dropped":                       faults.DropRequests(),
		"new connections refused":                faults.Refuse(),
		"both directions delayed by 1ms to 3ms":  faults.Latency(time.Millisecond, 2*time.Millisecond),
		"both directions 3 bytes every 1ms":      faults.SlowDrip(3, time.Millisecond),
		"requests delayed by 1s, replies held":   {Requests: faults.Flow{Delay: time.Second}, Replies: faults.Flow{Hold: true}},
		"requests held, new connections refused": {Requests: faults.Flow{Hold: true}, Refuse: true},
	} {
		if got := f.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
