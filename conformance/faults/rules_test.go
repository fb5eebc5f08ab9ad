package faults_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testdoc"
	"github.com/leasekit/leasekit/stores/memory"
)

// The rules of the group Faults are proven here and not beside the others,
// because they need a network: a store on a TCP server of its own, and stores
// on it that make one mistake each.

// toyServer keeps leases in a memory store and answers one JSON object a line.
type toyServer struct {
	mistake string
	leases  *memory.Store

	mu     sync.Mutex
	tokens map[string]int64  // of calls that won, by nonce
	owners map[string]string // of keys
}

type request struct {
	Op, Key, Owner, Nonce string
	TTL                   time.Duration
}

type reply struct {
	Yes   bool
	Token int64
	Left  time.Duration
}

// serve starts a toyServer and returns its address.
func serve(t *testing.T, mistake string) string {
	t.Helper()
	leases, err := memory.New(memory.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s := &toyServer{mistake: mistake, leases: leases, tokens: make(map[string]int64), owners: make(map[string]string)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
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
				s.serve(ctx, conn)
			})
		}
	})
	t.Cleanup(func() { cancel(); l.Close(); wg.Wait() })
	return l.Addr().String()
}

func (s *toyServer) serve(ctx context.Context, conn net.Conn) {
	in, out := json.NewDecoder(bufio.NewReader(conn)), json.NewEncoder(conn)
	held := make(map[string]string) // acquired on this connection
	for {
		var r request
		if err := in.Decode(&r); err != nil {
			break
		}
		if r.Op == "acquire" {
			held[r.Key] = r.Owner
		}
		if out.Encode(s.execute(ctx, r)) != nil {
			break
		}
	}
	if s.mistake == "LeaseEndsWithConnection" {
		for key, owner := range held {
			_ = s.leases.Release(ctx, key, owner)
		}
	}
}

func (s *toyServer) execute(ctx context.Context, r request) reply {
	s.mu.Lock()
	defer s.mu.Unlock()
	owner := r.Owner
	switch r.Op {
	case "acquire":
		id := r.Nonce
		if s.mistake == "ResendKnownByOwner" {
			id = r.Owner
		}
		if token := s.tokens[id]; token != 0 && s.mistake != "ResendMeetsItself" {
			if yes, _ := s.leases.Renew(ctx, r.Key, owner, r.TTL); yes {
				return reply{Yes: true, Token: token}
			}
		}
		g, _ := s.leases.Acquire(ctx, r.Key, owner, r.TTL)
		if g.Acquired {
			s.tokens[id], s.owners[r.Key] = g.Token, owner
		}
		return reply{Yes: g.Acquired, Token: g.Token, Left: g.Left}
	case "renew":
		yes, _ := s.leases.Renew(ctx, r.Key, owner, r.TTL)
		if yes && s.mistake == "ResentRenewalIsRefused" {
			yes = s.tokens[r.Nonce] == 0
			s.tokens[r.Nonce] = 1
		}
		return reply{Yes: yes}
	default:
		if s.mistake == "ReleaseByKey" {
			owner = s.owners[r.Key]
		}
		_ = s.leases.Release(ctx, r.Key, owner)
		return reply{Yes: true}
	}
}

// toyStore is a client of a toyServer. Like most client libraries it keeps a
// pool of connections, and sends a call again when its connection broke.
type toyStore struct {
	addr    string
	mistake string

	mu     sync.Mutex
	idle   []*toyConn
	won    map[string]bool // owners
	closed bool
	broken bool
	nonces int
}

type toyConn struct {
	net.Conn
	in *json.Decoder
}

func openToy(t testing.TB, addr, mistake string) *toyStore {
	t.Helper()
	s := &toyStore{addr: addr, mistake: mistake, won: make(map[string]bool)}
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.closed = true
		for _, c := range s.idle {
			c.Close()
		}
	})
	return s
}

func (s *toyStore) is(mistake string) bool { return s.mistake == mistake }

// call sends r and returns the answer, or an error that matches that of ctx.
func (s *toyStore) call(ctx context.Context, r request) (reply, error) {
	if err := ctx.Err(); err != nil {
		return reply{}, err
	}
	s.mu.Lock()
	s.nonces++
	r.Nonce = fmt.Sprintf("%p-%d", s, s.nonces)
	if s.is("NeverConnectsAgain") && s.broken && r.Op == "renew" {
		s.mu.Unlock()
		return reply{}, errors.New("toy: broken pipe")
	}
	s.mu.Unlock()
	var answer reply
	var err error
	for try := range 3 {
		if answer, err = s.once(ctx, r); err == nil {
			return answer, nil
		}
		if ctx.Err() != nil {
			if s.is("OwnErrorForContext") {
				return reply{}, errors.New("toy: " + err.Error())
			}
			return reply{}, ctx.Err()
		}
		if s.is("NeverSendsAgain") {
			break
		}
		select {
		case <-time.After(time.Duration(try+1) * time.Millisecond):
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	s.broken = s.broken || r.Op == "renew"
	s.mu.Unlock()
	return reply{}, fmt.Errorf("toy: %w", err)
}

// once sends r over a connection of the pool, or a new one.
func (s *toyStore) once(ctx context.Context, r request) (reply, error) {
	c, err := s.connection(ctx)
	if err != nil {
		return reply{}, err
	}
	if !s.is("ContextIgnored") {
		stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
		defer stop()
	}
	_ = c.SetDeadline(time.Now().Add(2 * time.Second)) // the library's own
	if ctx.Err() != nil && !s.is("ContextIgnored") {
		c.Close()
		return reply{}, ctx.Err()
	}
	var answer reply
	if err = json.NewEncoder(c).Encode(r); err == nil {
		err = c.in.Decode(&answer)
	}
	if err != nil {
		c.Close()
		return reply{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || ctx.Err() != nil { // its deadline may be set at any moment
		c.Close()
	} else {
		s.idle = append(s.idle, c)
	}
	return answer, nil
}

func (s *toyStore) connection(ctx context.Context) (*toyConn, error) {
	s.mu.Lock()
	if n := len(s.idle); n > 0 {
		c := s.idle[n-1]
		s.idle = s.idle[:n-1]
		s.mu.Unlock()
		return c, nil
	}
	s.mu.Unlock()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.addr)
	if err != nil {
		return nil, err
	}
	return &toyConn{Conn: conn, in: json.NewDecoder(conn)}, nil
}

func (s *toyStore) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	r, err := s.call(ctx, request{Op: "acquire", Key: key, Owner: owner, TTL: ttl})
	if err != nil && s.is("ErrorMeansHeld") {
		return core.Grant{}, nil
	}
	if r.Yes {
		s.mu.Lock()
		s.won[owner] = true
		s.mu.Unlock()
	}
	return core.Grant{Acquired: r.Yes, Token: r.Token, Left: r.Left}, err
}

func (s *toyStore) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	if err := core.CheckAll(key, owner, ttl); err != nil {
		return false, err
	}
	r, err := s.call(ctx, request{Op: "renew", Key: key, Owner: owner, TTL: ttl})
	switch {
	case err != nil && s.is("ErrorMeansRenewed"):
		return true, nil
	case err != nil && s.is("ErrorMeansLost"):
		return false, nil
	}
	return r.Yes, err
}

func (s *toyStore) Release(ctx context.Context, key, owner string) error {
	if err := core.CheckAll(key, owner, core.MinTTL); err != nil {
		return err
	}
	s.mu.Lock()
	known := s.won[owner]
	s.mu.Unlock()
	if s.is("ReleaseOfKnownOnly") && !known {
		return nil
	}
	_, err := s.call(ctx, request{Op: "release", Key: key, Owner: owner})
	if s.is("ErrorMeansReleased") {
		return nil
	}
	return err
}

// faultsOnly is the configuration that runs the group Faults alone on a toy
// server whose store makes a mistake.
func faultsOnly(t *testing.T, mistake string) conformance.Config {
	t.Helper()
	addr := serve(t, mistake)
	c := conformance.Config{
		Open: func(t testing.TB) core.LockStore { t.Helper(); return openToy(t, addr, "") },
		Faults: conformance.Faults{Addr: addr, Open: func(t testing.TB, addr string) core.LockStore {
			t.Helper()
			return openToy(t, addr, mistake)
		}},
		NotSupported: make(map[string]string),
	}
	for _, r := range conformance.Rules() {
		if r.Group != "Faults" {
			c.NotSupported[r.Group] = "another test's"
		}
	}
	return c
}

// atOnce runs subtests, a few at a time: they mostly wait, so that it need not
// be the number of cores, which is why they are not parallel tests.
func atOnce(t *testing.T, tests map[string]func(t *testing.T)) {
	t.Helper()
	gate := make(chan struct{}, 6)
	var wg sync.WaitGroup
	defer wg.Wait()
	for name, test := range tests {
		wg.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			t.Run(name, test)
		})
	}
}

func TestHonestStoresKeepTheRules(t *testing.T) {
	tests := make(map[string]func(t *testing.T))
	for _, quirk := range []string{"", "NeverSendsAgain"} {
		tests["quirk="+quirk] = func(t *testing.T) { conformance.Run(t, faultsOnly(t, quirk)) }
	}
	atOnce(t, tests)
}

// mutants, and all rules that each breaks, its own first.
var mutants = []struct {
	mistake string
	story   string
	breaks  []string
}{
	{"ResendMeetsItself", "tells a resent request that its first delivery holds the key", []string{"DriverResend"}},
	{"ResendKnownByOwner", "takes every try of the same owner for a resend of the first", []string{"DriverResend"}},
	{"ResentRenewalIsRefused", "refuses the second delivery of a renewal", []string{"DriverResend"}},
	{"LeaseEndsWithConnection", "ends the leases of a connection that is closed, as session locks do", []string{"RenewalsSurviveOutage", "DriverResend", "ContextEndsInBlackhole"}},
	{"ErrorMeansHeld", "takes an error of the network for a held key", []string{"UnknownAcquire", "ContextEndsInBlackhole"}},
	{"ReleaseOfKnownOnly", "releases only what it knows that it won", []string{"UnknownAcquire", "ContextEndsInBlackhole"}},
	{"ErrorMeansRenewed", "says true to keep its caller calm while the network is away", []string{"LossOnSilence", "ContextEndsInBlackhole"}},
	{"ErrorMeansLost", "takes an error of the network for a lost lease", []string{"RenewalsSurviveOutage", "LossOnSilence", "ContextEndsInBlackhole"}},
	{"NeverConnectsAgain", "renews over a connection of its own, which it never replaces", []string{"RenewalsSurviveOutage"}},
	{"ReleaseByKey", "releases by key alone", []string{"ReleaseLost"}},
	{"ErrorMeansReleased", "swallows the error of a release", []string{"ReleaseLost", "ContextEndsInBlackhole"}},
	{"ContextIgnored", "waits for the client library's own timeout", []string{"ContextEndsInBlackhole"}},
	{"OwnErrorForContext", "returns the client library's error when ctx has ended", []string{"ContextEndsInBlackhole"}},
}

// Each mutant must break the rules that it is known to break, and no others:
// that is what KnownFailing checks.
func TestMutants(t *testing.T) {
	tests := make(map[string]func(t *testing.T))
	broken := make(map[string]bool)
	for _, m := range mutants {
		for _, rule := range m.breaks {
			broken[rule] = true
		}
		tests[m.mistake] = func(t *testing.T) {
			c := faultsOnly(t, m.mistake)
			c.KnownFailing = make(map[string]string)
			for _, rule := range m.breaks {
				c.KnownFailing[rule] = m.story
			}
			conformance.Run(t, c)
		}
	}
	atOnce(t, tests)
	for _, r := range conformance.Rules() {
		if r.Group == "Faults" && !broken[r.Name] {
			t.Errorf("no mutant breaks %s, which is not proven", r.Name)
		}
	}
}

// The document says what the tests prove.
func TestMutantTable(t *testing.T) {
	var table strings.Builder
	table.WriteString("| mutant | a store that … | is caught by | and also fails |\n|---|---|---|---|\n")
	for _, m := range mutants {
		fmt.Fprintf(&table, "| %s | %s | **%s** | %s |\n", m.mistake, m.story, m.breaks[0], strings.Join(m.breaks[1:], ", "))
	}
	testdoc.Check(t, "../../docs/conformance.md", "fault mutants", table.String())
}
