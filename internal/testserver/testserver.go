// Package testserver finds or starts the servers that tests need.
//
// A test asks for a server by name and gets one that answers:
//
//	func TestMain(m *testing.M) { testserver.Main(m) }
//
//	func TestStore(t *testing.T) {
//		client := connect(t, testserver.Redis(t).URL)
//		…
//	}
//
// [Redis], [Etcd], [Postgres] and [Mongo] return the one server of that kind
// that all tests of the process share; tests keep apart by using random keys.
// It is, in this order,
//
//   - the server named by $LEASEKIT_TEST_REDIS ($LEASEKIT_TEST_ETCD, …), a URL;
//   - a program on PATH;
//   - a program in a well-known place, or in the tool cache, $LEASEKIT_TOOLS,
//     by default leasekit in the user's cache folder ("make servers" fills it).
//
// A program is started with a private data folder on a free port of 127.0.0.1.
// [Main] stops what was started; should the test process be killed, Linux
// kills the servers with it. Where no server can be had the test is skipped,
// and says how to get one. $LEASEKIT_TEST_REQUIRE, a comma-separated list such
// as "redis,etcd,postgres,pgbouncer,mongo", turns that skip into a failure.
//
// [StartRedis] and its siblings start a server for one test alone, which may
// stop, kill, pause and restart it.
//
// Main appends what ran on which server, and what was skipped, to the file
// named by $LEASEKIT_TEST_SUMMARY, one JSON object a line.
//
// The package uses the standard library only, so that it can serve every module
// of the repository. The wire protocols are spoken just far enough to learn
// that a server is ready, and which version it is.
package testserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// How long a server may take to answer after its start, and to end after it was
// told to. Both are far more than needed: a loaded machine must not fail tests.
const (
	startTimeout = 60 * time.Second
	stopTimeout  = 60 * time.Second
)

// Server is a running server. Its methods that stop or pause it work on servers
// of Start… functions only: a shared server belongs to all tests.
//
// A Server is safe for concurrent use, but stopping it in one goroutine while
// another starts it has no sensible result.
type Server struct {
	// URL is what a client connects to: redis://127.0.0.1:P/0,
	// http://127.0.0.1:P, postgres://postgres@127.0.0.1:P/postgres?sslmode=disable
	// or mongodb://127.0.0.1:P/?directConnection=true.
	URL string
	// Addr is host:port of the URL.
	Addr string
	// Name of the program, such as "redis-server" or, where no mongod was
	// found, "secantusd-rs"; of a server given by its URL, the kind.
	Name string
	// Version as the server tells it, "unknown" if it does not.
	Version string
	// Dir is the private folder of a started server: data, configuration, log.
	// Empty for a server given by its URL.
	Dir string
	// LogFile is where a started server's output goes.
	LogFile string

	kind  *kind
	prog  program
	ports []int
	args  []string // appended to the command line
	peers string   // etcd's --initial-cluster, of a cluster
	// peerHost is where etcd's peers reach it, if not on 127.0.0.1.
	peerHost string
	env      []string // beside this process's
	onRemove []func()
	shared   bool
	lock     *os.File // tells other processes that Dir is in use

	mu   sync.Mutex
	proc *process // nil when not running
}

// kind is what the package knows about one sort of server.
type kind struct {
	name  string // in LEASEKIT_TEST_REQUIRE and, in upper case, LEASEKIT_TEST_…
	hint  string // how to get one
	ports int    // how many a server needs; the first is the clients'
	user  bool   // refuses to run as root

	find  func() (program, bool)
	setup func(s *Server) error                                // fills Dir, once; may be nil
	flags func(s *Server) []string                             // command line
	ready func(ctx context.Context, s *Server) (string, error) // one look; returns the version
	url   func(s *Server) string

	stop syscall.Signal // asks for an orderly end
	quit syscall.Signal // ends it at once, leaving nothing behind outside Dir
}

// env is the variable that names a server of this kind.
func (k *kind) env() string { return "LEASEKIT_TEST_" + strings.ToUpper(k.name) }

// Redis returns the shared Redis (or Valkey) server. It persists nothing.
func Redis(t testing.TB) *Server { t.Helper(); return use(t, redisKind) }

// Etcd returns the shared etcd server, a cluster of one. It syncs every write
// to disk, as by default.
func Etcd(t testing.TB) *Server { t.Helper(); return use(t, etcdKind) }

// Postgres returns the shared PostgreSQL server, with default durability and
// 400 connections. When the tests run as root it runs as user postgres, or
// nobody.
func Postgres(t testing.TB) *Server { t.Helper(); return use(t, postgresKind) }

// Mongo returns the shared MongoDB server: mongod as a replica set of one, or
// else the stand-in secantusd-rs, which syncs every commit. The test's log
// tells which.
func Mongo(t testing.TB) *Server { t.Helper(); return use(t, mongoKind) }

// StartRedis starts a Redis server for this test alone. It persists nothing;
// args such as "--appendonly", "yes" are appended to its command line.
func StartRedis(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, redisKind, args)
}

// StartEtcd starts an etcd server for this test alone; args are appended to its
// command line. With "--cert-file" among them the URL begins with https.
func StartEtcd(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, etcdKind, args)
}

// StartPostgres starts a PostgreSQL server for this test alone; args, such as
// "-c", "max_connections=10", are appended to its command line.
func StartPostgres(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, postgresKind, args)
}

// StartMongo starts a MongoDB server for this test alone, mongod or the
// stand-in; args are appended to its command line.
func StartMongo(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, mongoKind, args)
}

// StartPgBouncer starts a PgBouncer in front of pg for this test alone. poolMode
// is "session", "transaction" or "statement". Its URL is that of a PostgreSQL
// server.
func StartPgBouncer(t testing.TB, pg *Server, poolMode string) *Server {
	t.Helper()
	k := *pgbouncerKind
	k.setup = func(s *Server) error { return writePgBouncerConfig(s, pg, poolMode) }
	return start(t, &k, nil)
}

// process-wide state: what is shared, what Main has to stop and to report.
var state struct {
	sync.Mutex
	inMain bool
	shared map[string]*sharedServer
	report map[string]*Record
}

type sharedServer struct {
	once   sync.Once
	server *Server
	err    error
}

// errMissing says that no server of a kind can be had on this machine.
var errMissing = errors.New("none found")

// use returns the shared server of kind k, started on first use.
func use(t testing.TB, k *kind) *Server {
	t.Helper()
	state.Lock()
	if !state.inMain {
		state.Unlock()
		t.Fatal("testserver: shared servers need: func TestMain(m *testing.M) { testserver.Main(m) }")
	}
	if state.shared == nil {
		state.shared = map[string]*sharedServer{}
	}
	ss := state.shared[k.name]
	if ss == nil {
		ss = &sharedServer{}
		state.shared[k.name] = ss
	}
	state.Unlock()

	ss.once.Do(func() {
		var s *Server
		var err error
		if u := os.Getenv(k.env()); u != "" {
			s, err = external(k, u)
		} else {
			s, err = launch(k, nil, freePort)
		}
		if s != nil {
			s.shared = true
		}
		state.Lock() // Env may look
		ss.server, ss.err = s, err
		state.Unlock()
	})
	if ss.err != nil {
		giveUp(t, k, ss.err)
	}
	announce(t, ss.server)
	return ss.server
}

// start starts a server that ends with the test.
func start(t testing.TB, k *kind, args []string) *Server {
	t.Helper()
	s, err := launch(k, args, freePort)
	if err != nil {
		giveUp(t, k, err)
	}
	// Clean-ups run last in, first out: what the test registers later, its
	// clients for instance, is closed while the server is still there.
	t.Cleanup(s.remove)
	announce(t, s)
	return s
}

// giveUp ends the test: a missing server is a skip, unless it is required, and
// one that does not start is always a failure.
func giveUp(t testing.TB, k *kind, err error) {
	t.Helper()
	if !errors.Is(err, errMissing) {
		t.Fatalf("testserver: %s: %v", k.name, err)
	}
	note(Record{Kind: k.name, Skipped: 1, Hint: k.hint})
	msg := fmt.Sprintf("needs a %s server, and %v: set %s=URL, or %s", k.name, err, k.env(), k.hint)
	if required(k.name) {
		t.Fatalf("%s ($%s names it)", msg, requireEnv)
	}
	t.Skip(msg)
}

// requireEnv names the servers without which tests fail instead of being
// skipped.
const requireEnv = "LEASEKIT_TEST_REQUIRE"

// required reports whether $LEASEKIT_TEST_REQUIRE names a kind.
func required(name string) bool { return slices.Contains(requiredNames(), name) }

func requiredNames() []string {
	names := strings.Split(os.Getenv(requireEnv), ",")
	for i := range names {
		names[i] = strings.TrimSpace(names[i])
	}
	return names
}

// checkRequired returns an error if $LEASEKIT_TEST_REQUIRE names an unknown
// kind: a slip there would let a skip pass for a success.
func checkRequired() error {
	for _, name := range requiredNames() {
		known := func(k *kind) bool { return k.name == name }
		if name != "" && !slices.ContainsFunc(kinds(), known) {
			return fmt.Errorf("$%s: unknown server %q", requireEnv, name)
		}
	}
	return nil
}

func kinds() []*kind {
	return []*kind{redisKind, etcdKind, postgresKind, pgbouncerKind, mongoKind}
}

// announce counts the use of a server, names it in the test's log, and has the
// end of the server's own log shown if the test fails.
func announce(t testing.TB, s *Server) {
	t.Helper()
	note(Record{Kind: s.kind.name, Name: s.Name, Version: s.Version, From: s.prog.from, Addr: s.Addr, Tests: 1})
	if _, ok := t.(*testing.B); !ok { // among results it would be noise, and Main names it too
		t.Logf("%s", s)
	}
	if s.LogFile == "" {
		return
	}
	before := logSize(s.LogFile)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of the log of %s:\n%s", s, logTail(s.LogFile, before))
		}
	})
}

// String describes the server in one line.
func (s *Server) String() string {
	name := s.Name
	if name != s.kind.name {
		name = s.kind.name + ": " + name
	}
	return fmt.Sprintf("%s %s (%s) at %s", name, s.Version, s.prog.from, s.Addr)
}

// Env returns the environment entry, LEASEKIT_TEST_…=URL, with which a child
// process reaches this very server.
func (s *Server) Env() []string { return []string{s.kind.env() + "=" + s.URL} }

// Env returns the entries of all shared servers that tests have asked for so
// far, see [Server.Env].
func Env() []string {
	state.Lock()
	defer state.Unlock()
	var env []string
	for _, ss := range state.shared {
		if ss.server != nil {
			env = append(env, ss.server.Env()...)
		}
	}
	slices.Sort(env)
	return env
}

// external is a server that somebody else runs, known by its URL.
func external(k *kind, rawURL string) (*Server, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("$%s: %w", k.env(), err)
	}
	s := &Server{URL: rawURL, Addr: u.Host, Name: k.name, Version: "unknown", kind: k}
	s.prog.from = "$" + k.env()
	// Only to name the version. The server may want TLS or a password, which
	// this package does not speak: then the test's own client will tell.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if v, err := k.ready(ctx, s); err == nil && v != "" {
		s.Version = v
	}
	return s, nil
}

// launch starts a server of kind k in a new folder, on ports from pick.
func launch(k *kind, args []string, pick func() int) (*Server, error) {
	s, err := prepare(k, args)
	if err != nil {
		return nil, err
	}
	// Between the choice of a port and its use by the server somebody else may
	// take it: then another one is tried.
	for range 10 {
		s.ports = s.ports[:0]
		for range max(k.ports, 1) {
			s.ports = append(s.ports, pick())
		}
		s.address()
		if err = s.run(); !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		s.remove()
		return nil, err
	}
	return s, nil
}

// prepare finds the program of kind k and makes the folder of a server that is
// not running yet.
func prepare(k *kind, args []string) (*Server, error) {
	prog, ok := k.find()
	if !ok {
		return nil, errMissing
	}
	s := &Server{Name: filepath.Base(prog.path), kind: k, prog: prog, args: args}
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	return s, nil
}

// address derives Addr and URL from the ports.
func (s *Server) address() {
	s.Addr = fmt.Sprintf("127.0.0.1:%d", s.ports[0])
	s.URL = s.kind.url(s)
}

// run starts the program on s.ports and waits until it answers.
func (s *Server) run() error {
	if err := s.spawn(); err != nil {
		return err
	}
	return s.wait()
}

// spawn starts the program.
func (s *Server) spawn() error {
	if s.kind.setup != nil {
		if err := s.kind.setup(s); err != nil {
			return err
		}
	}
	p, err := spawn(s.prog.path, append(s.kind.flags(s), s.args...), s.env, s.Dir, s.LogFile, s.kind)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()
	return nil
}

// errPortTaken says that the server found its port in use.
var errPortTaken = errors.New("port taken")

// wait returns when the server answers. If it does not, it is ended.
func (s *Server) wait() error {
	p := s.running()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	go func() { // a look at whoever took our port may take long: end it
		select {
		case <-p.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	begin := p.logStart
	for {
		version, err := s.kind.ready(ctx, s)
		if err == nil && !(p.alive() && listens(p.pid, s.ports[0])) {
			err = errors.New("another process answers there")
		}
		if err == nil {
			if s.Version == "" {
				s.Version = s.version(version)
			}
			return nil
		}
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
		}
		s.setProc(nil)
		if !p.alive() {
			tail := logTail(s.LogFile, begin)
			if strings.Contains(strings.ToLower(tail), "in use") {
				return fmt.Errorf("%w: %s\n%s", errPortTaken, s.Addr, tail)
			}
			return fmt.Errorf("%s ended at its start (%w); its log:\n%s", s.prog.path, cmp.Or(p.err, errors.New("exit status 0")), tail)
		}
		p.end(s.kind.quit)
		return fmt.Errorf("%s did not answer at %s for %v (%w); its log:\n%s", s.prog.path, s.Addr, startTimeout, err, logTail(s.LogFile, begin))
	}
}

// version is the answer's, unless the program has to be asked.
func (s *Server) version(answered string) string {
	if s.prog.version != nil {
		answered = s.prog.version()
	}
	if answered == "" {
		return "unknown"
	}
	return answered
}

// remove ends the server and deletes its folder.
func (s *Server) remove() {
	if p := s.running(); p != nil {
		s.setProc(nil)
		p.end(s.kind.quit)
	}
	for _, f := range s.onRemove {
		f()
	}
	if s.Dir != "" {
		removeDir(s.Dir)
		s.lock.Close()
	}
}

// Stop ends the server in an orderly way and waits for its end. Its data stay
// for [Server.Start].
func (s *Server) Stop(t testing.TB) {
	t.Helper()
	p := s.own(t, "Stop")
	s.setProc(nil)
	if !p.end(s.kind.stop) {
		t.Errorf("testserver: %s did not end within %v after signal %v, killed", s, stopTimeout, s.kind.stop)
	}
}

// Kill ends the server at once, as a power cut would end its processes, and
// waits for their end. Its data stay for [Server.Start].
func (s *Server) Kill(t testing.TB) {
	t.Helper()
	p := s.own(t, "Kill")
	s.setProc(nil)
	p.kill()
}

// Start starts a stopped or killed server again, on the same port with the same
// data, and waits until it answers.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	if err := s.Restart(); err != nil {
		t.Fatalf("testserver: start %s again: %v", s, err)
	}
}

// Restart is [Server.Start] for goroutines that must not call t.Fatal.
func (s *Server) Restart() error {
	if s.shared {
		return errors.New("a shared server is always running")
	}
	if s.running() != nil {
		return errors.New("it is running")
	}
	// Freed ports are not handed out to clients (see freePort), but the
	// server's own children may hold one for a moment. That of a cluster's bus
	// may be a client's; the kernel keeps it for 60 s after that has closed.
	deadline := time.Now().Add(90 * time.Second)
	for {
		err := s.run()
		if !errors.Is(err, errPortTaken) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Pause stops all processes of the server with SIGSTOP: connections stay open
// and nobody answers. [Server.Resume] lets them go on.
func (s *Server) Pause(t testing.TB) {
	t.Helper()
	if err := s.own(t, "Pause").pause(); err != nil {
		t.Fatalf("testserver: pause %s: %v", s, err)
	}
}

// Resume ends a [Server.Pause].
func (s *Server) Resume(t testing.TB) {
	t.Helper()
	if err := s.own(t, "Resume").resume(); err != nil {
		t.Fatalf("testserver: resume %s: %v", s, err)
	}
}

// own returns the running process of a server that the test may do with as it
// likes.
func (s *Server) own(t testing.TB, op string) *process {
	t.Helper()
	if s.shared {
		t.Fatalf("testserver: %s of a shared server: other tests use it; start one of your own", op)
	}
	p := s.running()
	if p == nil {
		t.Fatalf("testserver: %s of %s: it is not running", op, s)
	}
	return p
}

func (s *Server) running() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc
}

func (s *Server) setProc(p *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc = p
}

// dial connects to the server for one look at it, which ends when ctx does or
// after 2 s.
func (s *Server) dial(ctx context.Context) (net.Conn, error) {
	const timeout = 2 * time.Second
	conn, err := (&net.Dialer{Timeout: timeout}).DialContext(ctx, "tcp", s.Addr)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(timeout))
	context.AfterFunc(ctx, func() { conn.Close() })
	return conn, nil
}
