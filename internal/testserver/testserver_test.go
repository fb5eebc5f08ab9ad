package testserver

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("TESTSERVER_CHILD"); role != "" {
		os.Exit(child(m, role))
	}
	Main(m)
}

// server is a kind of server with a way to write one record and to look for it.
type server struct {
	name   string
	shared func(testing.TB) *Server
	start  func(testing.TB, ...string) *Server
	args   []string // make it keep what it acknowledged
	put    func(*Server) error
	has    func(*Server) (bool, error)
}

var servers = []server{
	{"redis", Redis, StartRedis, []string{"--appendonly", "yes", "--appendfsync", "always"}, redisPut, redisHas},
	{"etcd", Etcd, StartEtcd, nil, etcdPut, etcdHas},
	{"postgres", Postgres, StartPostgres, nil, postgresPut, postgresHas},
	{"mongo", Mongo, StartMongo, nil, mongoPut, mongoHas},
}

func TestSharedServerIsOneServer(t *testing.T) {
	t.Parallel()
	for _, sv := range servers {
		t.Run(sv.name, func(t *testing.T) {
			t.Parallel()
			a, b := sv.shared(t), sv.shared(t)
			if a != b {
				t.Errorf("two calls gave two servers, %s and %s", a, b)
			}
			if a.Version == "" || a.Version == "unknown" {
				t.Errorf("version is %q", a.Version)
			}
			if want := []string{"LEASEKIT_TEST_" + strings.ToUpper(sv.name) + "=" + a.URL}; a.Env()[0] != want[0] {
				t.Errorf("Env() = %q, want %q", a.Env(), want)
			}
			if err := sv.put(a); err != nil {
				t.Errorf("write: %v", err)
			}
		})
	}
}

func TestDataSurviveStopAndKill(t *testing.T) {
	t.Parallel()
	for _, sv := range servers {
		t.Run(sv.name, func(t *testing.T) {
			t.Parallel()
			s := sv.start(t, sv.args...)
			if err := sv.put(s); err != nil {
				t.Fatalf("write: %v", err)
			}
			for _, end := range []struct {
				name string
				fn   func(testing.TB)
			}{{"Stop", s.Stop}, {"Kill", s.Kill}} {
				addr := s.Addr
				end.fn(t)
				if conn, err := net.Dial("tcp", addr); err == nil {
					conn.Close()
					t.Errorf("after %s somebody answers at %s", end.name, addr)
				}
				s.Start(t)
				if s.Addr != addr {
					t.Errorf("after %s and Start at %s, want %s", end.name, s.Addr, addr)
				}
				if ok, err := sv.has(s); err != nil || !ok {
					t.Errorf("after %s and Start: record there: %v, %v", end.name, ok, err)
				}
			}
		})
	}
}

func TestPausedServerIsSilent(t *testing.T) {
	t.Parallel()
	for _, sv := range servers {
		t.Run(sv.name, func(t *testing.T) {
			t.Parallel()
			s := sv.start(t)
			if err := sv.put(s); err != nil {
				t.Fatalf("write: %v", err)
			}
			s.Pause(t)
			answer := make(chan error, 1)
			go func() {
				_, err := sv.has(s)
				answer <- err
			}()
			select {
			case err := <-answer:
				t.Errorf("a paused server answered (error: %v)", err)
			case <-time.After(200 * time.Millisecond):
			}
			s.Resume(t)
			if err := <-answer; err != nil {
				t.Errorf("after Resume: %v", err)
			}
			s.Pause(t)
			s.Kill(t) // must not wait for a resume
		})
	}
}

// An open connection of PostgreSQL is served by a process that is not in the
// server's process group.
func TestPauseReachesPostgresBackends(t *testing.T) {
	t.Parallel()
	s := StartPostgres(t)
	pg, err := pgConnect(s)
	if err != nil {
		t.Fatal(err)
	}
	defer pg.Close()
	s.Pause(t)
	if err := pg.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := pg.query("SELECT 1"); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a backend of a paused server answered (error: %v)", err)
	}
	children := descendants(s.running().pid)
	if len(children) < 2 {
		t.Errorf("PostgreSQL has %d children, want at least a few", len(children))
	}
	s.Kill(t)
	for _, pid := range children {
		if exists(pid) {
			t.Errorf("child %d is alive after Kill", pid)
		}
	}
}

func TestPgBouncer(t *testing.T) {
	t.Parallel()
	pg := StartPostgres(t)
	for _, mode := range []string{"session", "transaction"} {
		b := StartPgBouncer(t, pg, mode)
		if err := postgresPut(b); err != nil {
			t.Errorf("%s: write: %v", mode, err)
		}
		if ok, err := postgresHas(pg); err != nil || !ok {
			t.Errorf("%s: what was written through PgBouncer is not in PostgreSQL: %v", mode, err)
		}
		if b.Version == pg.Version {
			t.Errorf("PgBouncer's version %s is PostgreSQL's", b.Version)
		}
	}
}

func TestEtcdClusterOutlivesAMember(t *testing.T) {
	t.Parallel()
	members := StartEtcdCluster(t, 3)
	eventually(t, "a record is written", func() bool { return etcdPut(members[0]) == nil })
	members[0].Kill(t)
	eventually(t, "the other members have it", func() bool { ok, err := etcdHas(members[1]); return ok && err == nil })
	members[0].Start(t)
	eventually(t, "the member that came back has it", func() bool { ok, err := etcdHas(members[0]); return ok && err == nil })
}

// eventually waits until f, which is going to be true soon: a cluster may elect a
// leader at any time.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !f(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func TestEtcdNetworkIsCut(t *testing.T) {
	t.Parallel()
	members, network := StartEtcdOnNetwork(t, 3)
	eventually(t, "a record is written", func() bool { return etcdPut(members[0]) == nil })
	network.Isolate(members[0])
	eventually(t, "the majority goes on", func() bool { ok, err := etcdHas(members[1]); return ok && err == nil })
	eventually(t, "the isolated member answers, and cannot read", func() bool { _, err := etcdHas(members[0]); return err != nil })
	network.Heal()
	eventually(t, "all read", func() bool {
		for _, m := range members {
			if ok, err := etcdHas(m); !ok || err != nil {
				return false
			}
		}
		return true
	})
}

// Somebody who speaks the protocol holds the port that was chosen: the server
// must get another one, and the answer of the other must not count.
func TestPortTakenBySomebodyElse(t *testing.T) {
	t.Parallel()
	other := StartRedis(t)
	for _, k := range []*kind{redisKind, etcdKind, postgresKind, mongoKind} {
		t.Run(k.name, func(t *testing.T) {
			tries := 0
			pick := func() int {
				if tries++; tries <= max(k.ports, 1) {
					return other.ports[0]
				}
				return freePort()
			}
			if k == etcdKind { // its two ports must differ
				pick = func() int {
					if tries++; tries == 1 {
						return other.ports[0]
					}
					return freePort()
				}
			}
			s, err := launch(k, nil, pick)
			if errors.Is(err, errMissing) {
				giveUp(t, k, err)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.remove()
			if s.ports[0] == other.ports[0] {
				t.Errorf("the server claims port %d, which another one holds", s.ports[0])
			}
		})
	}
}

func TestRestartTakesItsPortBack(t *testing.T) {
	t.Parallel()
	s := StartRedis(t)
	s.Stop(t)
	squatter, err := net.Listen("tcp", s.Addr)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(300*time.Millisecond, func() { squatter.Close() })
	s.Start(t)
	if _, err := redisHas(s); err != nil {
		t.Error(err)
	}
}

func TestFailedStartShowsTheLog(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		kind *kind
		args []string
		want string
	}{
		{redisKind, []string{"--no-such-directive", "1"}, "no-such-directive"},
		{etcdKind, []string{"--no-such-flag"}, "no-such-flag"},
		{postgresKind, []string{"-c", "no_such_parameter=1"}, "no_such_parameter"},
		{mongoKind, []string{"--no-such-flag"}, "no-such-flag"},
	} {
		t.Run(tt.kind.name, func(t *testing.T) {
			s, err := launch(tt.kind, tt.args, freePort)
			if errors.Is(err, errMissing) {
				giveUp(t, tt.kind, err)
			}
			if err == nil {
				s.remove()
				t.Fatal("started")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error does not show what the server said, %q: %v", tt.want, err)
			}
		})
	}
}

func TestFolderIsGoneAfterTheTest(t *testing.T) {
	t.Parallel()
	var dir string
	t.Run("inner", func(t *testing.T) { dir = StartRedis(t).Dir })
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v, want it deleted", dir, err)
	}
}

// The tests below run this test binary again, as a process of its own with
// another environment or another end.

// child is what such a process does.
func child(m *testing.M, role string) int {
	switch role {
	case "tests": // those named by -test.run
		return runTests(m.Run)
	case "die": // start servers, name them, wait to be killed
		for _, k := range []*kind{redisKind, etcdKind, postgresKind, mongoKind} {
			s, err := launch(k, nil, freePort)
			if errors.Is(err, errMissing) {
				continue
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			if os.Getenv("TESTSERVER_PAUSED") != "" {
				if err := s.running().pause(); err != nil {
					fmt.Fprintln(os.Stderr, err)
					return 1
				}
			}
			fmt.Printf("%d %s\n", s.running().pid, s.Dir)
		}
		fmt.Println("done")
		select {}
	}
	return 2
}

func childCommand(t *testing.T, role, run string, env ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-test.v", "-test.run=^"+run+"$")
	cmd.Env = append(os.Environ(), "TESTSERVER_CHILD="+role)
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

// TestChildUsesRedis is what the tests below run in a child process; on its own
// it is a test of the shared server.
func TestChildUsesRedis(t *testing.T) {
	s := Redis(t)
	if err := redisPut(s); err != nil {
		t.Error(err)
	}
	t.Logf("folder %q", s.Dir)
}

func TestServerGivenByURL(t *testing.T) {
	t.Parallel()
	s := StartRedis(t)
	out, err := childCommand(t, "tests", "TestChildUsesRedis", s.Env()...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if ok, err := redisHas(s); err != nil || !ok {
		t.Errorf("the child did not use the server of its environment: %v\n%s", err, out)
	}
	if want := "redis " + s.Version + " ($LEASEKIT_TEST_REDIS) at " + s.Addr; !strings.Contains(string(out), want) {
		t.Errorf("output lacks %q:\n%s", want, out)
	}
}

func TestMissingServer(t *testing.T) {
	t.Parallel()
	// Nothing can be found: no PATH, an empty cache, and no server in the
	// well-known places, which hold for redis on this machine only by accident.
	empty := t.TempDir()
	for _, dir := range []string{"/usr/local/bin", "/opt/homebrew/bin"} {
		if _, err := os.Stat(filepath.Join(dir, "redis-server")); err == nil {
			t.Skipf("%s has a redis-server", dir)
		}
	}
	for _, tt := range []struct {
		require string
		fails   bool
		want    string
	}{
		{"", false, "--- SKIP"},
		{"etcd, mongo", false, "--- SKIP"},
		{"etcd, redis", true, "--- FAIL"},
	} {
		t.Run("require="+tt.require, func(t *testing.T) {
			summary := filepath.Join(t.TempDir(), "summary")
			out, err := childCommand(t, "tests", "TestChildUsesRedis",
				"PATH="+empty, "LEASEKIT_TOOLS="+empty, "LEASEKIT_TEST_REDIS=",
				"LEASEKIT_TEST_REQUIRE="+tt.require, "LEASEKIT_TEST_SUMMARY="+summary).CombinedOutput()
			if (err != nil) != tt.fails {
				t.Errorf("error %v, want one: %v", err, tt.fails)
			}
			for _, want := range []string{tt.want, "make servers", "LEASEKIT_TEST_REDIS=URL"} {
				if !strings.Contains(string(out), want) {
					t.Errorf("output lacks %q:\n%s", want, out)
				}
			}
			var r Record
			text, err := os.ReadFile(summary)
			if err == nil {
				err = json.Unmarshal(text, &r)
			}
			if err != nil || r.Kind != "redis" || r.Skipped != 1 || r.Hint == "" {
				t.Errorf("summary %s (%v), want one skip of redis with a hint", text, err)
			}
		})
	}
}

func TestSummaryNamesTheServer(t *testing.T) {
	t.Parallel()
	Redis(t) // skips where there is none
	summary := filepath.Join(t.TempDir(), "summary")
	for range 2 {
		out, err := childCommand(t, "tests", "TestChildUsesRedis", "LEASEKIT_TEST_SUMMARY="+summary).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if dir := folderIn(string(out)); dir != "" {
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: %v, want it deleted by Main", dir, err)
			}
		}
	}
	text, err := os.ReadFile(summary)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	if len(lines) != 2 {
		t.Fatalf("%d lines, want one for each run:\n%s", len(lines), text)
	}
	for _, line := range lines {
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		if r.Kind != "redis" || r.Version == "" || r.Tests != 1 || !strings.HasSuffix(r.Package, "internal/testserver") {
			t.Errorf("record %+v", r)
		}
	}
}

// folderIn returns the folder that TestChildUsesRedis logged.
func folderIn(out string) string {
	_, rest, _ := strings.Cut(out, "folder \"")
	dir, _, _ := strings.Cut(rest, "\"")
	return dir
}

func TestServersDieWithTheTestProcess(t *testing.T) {
	t.Parallel()
	if listens(os.Getpid(), 0) {
		t.Skip("only Linux can tie the life of a process to another's")
	}
	for _, paused := range []string{"", "yes"} {
		t.Run("paused="+paused, func(t *testing.T) {
			cmd := childCommand(t, "die", "none", "TESTSERVER_PAUSED="+paused)
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var dirs []string
			var pids []int
			for scan := bufio.NewScanner(out); scan.Scan() && scan.Text() != "done"; {
				pid, dir, _ := strings.Cut(scan.Text(), " ")
				n, err := strconv.Atoi(pid)
				if err != nil {
					t.Fatalf("child said %q", scan.Text())
				}
				pids, dirs = append(append(pids, n), descendants(n)...), append(dirs, dir)
			}
			if len(pids) == 0 {
				t.Skip("no servers on this machine")
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			for deadline := time.Now().Add(20 * time.Second); len(pids) > 0; time.Sleep(5 * time.Millisecond) {
				if !exists(pids[0]) {
					pids = pids[1:]
				} else if time.Now().After(deadline) {
					t.Fatalf("processes %v outlive the test process that started them", pids)
				}
			}
			// The next test process clears up.
			if out, err := childCommand(t, "tests", "TestChildUsesRedis").CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, dir := range dirs {
				// Another test process may be about to do so.
				eventually(t, dir+" is deleted", func() bool {
					_, err := os.Stat(dir)
					return errors.Is(err, os.ErrNotExist)
				})
			}
		})
	}
}

func TestSweepSparesFoldersInUse(t *testing.T) {
	t.Parallel()
	s := StartRedis(t)
	if out, err := childCommand(t, "tests", "TestChildUsesRedis").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, err := os.Stat(s.LogFile); err != nil {
		t.Errorf("another test process deleted the folder of a running server: %v", err)
	}
}

func TestRequireNamesAnUnknownServer(t *testing.T) {
	t.Parallel()
	out, err := childCommand(t, "tests", "TestChildUsesRedis", "LEASEKIT_TEST_REQUIRE=redis,postgress").CombinedOutput()
	if err == nil || !strings.Contains(string(out), `"postgress"`) {
		t.Errorf("error %v, want one that names the slip; output:\n%s", err, out)
	}
}

func TestBSON(t *testing.T) {
	t.Parallel()
	doc := bsonDoc{
		{"s", "text"}, {"empty", ""}, {"n", int32(-7)},
		{"d", bsonDoc{{"x", "y"}}}, {"a", bsonArray{{{"x", "y"}}, {}}}, {"last", "!"},
	}
	encoded := doc.append([]byte("before"))[len("before"):]
	got, err := parseBSON(encoded)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{"s": "text", "empty": "", "n": int32(-7), "d": nil, "last": "!"} {
		if got[key] != want {
			t.Errorf("%s: got %v, want %v", key, got[key], want)
		}
	}
	for cut := range len(encoded) - 1 {
		_, _ = parseBSON(encoded[:cut]) // must not panic
	}
}

func FuzzParseBSON(f *testing.F) {
	f.Add(bsonDoc{{"a", "b"}, {"c", bsonDoc{{"d", int32(1)}}}}.append(nil))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = parseBSON(b) })
}

func TestMajorVersion(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]int{"/usr/lib/postgresql/15/bin": 15, "/usr/lib/postgresql/9/bin": 9, "/usr/local/pgsql/bin": 0} {
		if got := majorVersion(path); got != want {
			t.Errorf("%s: got %d, want %d", path, got, want)
		}
	}
}

func TestLogTail(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(name, []byte(strings.Repeat("x", 2*fileTail)+"end"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := logTail(name, 0); len(got) != fileTail || !strings.HasSuffix(got, "xend") {
		t.Errorf("tail of a long log: %d bytes, want the last %d", len(got), fileTail)
	}
	if got := logTail(name, 2*fileTail); got != "end" {
		t.Errorf("tail from an offset: %q, want %q", got, "end")
	}
	if got := logTail(name, logSize(name)); got != "(nothing)" {
		t.Errorf("tail from the end: %q", got)
	}
}

// Clients, just large enough for one record.

const lookTimeout = 20 * time.Second

func redisDo(s *Server, command string) (string, error) {
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(lookTimeout))
	if _, err := io.WriteString(conn, command+"\r\n"); err != nil {
		return "", err
	}
	return bufio.NewReader(conn).ReadString('\n')
}

func redisPut(s *Server) error {
	reply, err := redisDo(s, "SET testserver 1")
	if err == nil && reply != "+OK\r\n" {
		err = fmt.Errorf("SET: %q", reply)
	}
	return err
}

func redisHas(s *Server) (bool, error) {
	reply, err := redisDo(s, "EXISTS testserver")
	return reply == ":1\r\n", err
}

func etcdDo(s *Server, path, body string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+path, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, text)
	}
	return string(text), err
}

func etcdPut(s *Server) error {
	_, err := etcdDo(s, "/v3/kv/put", `{"key":"a2V5","value":"MQ=="}`)
	return err
}

func etcdHas(s *Server) (bool, error) {
	reply, err := etcdDo(s, "/v3/kv/range", `{"key":"a2V5"}`)
	return strings.Contains(reply, `"count":"1"`), err
}

type pgConn struct{ net.Conn }

func pgConnect(s *Server) (pgConn, error) {
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		return pgConn{}, err
	}
	_ = conn.SetDeadline(time.Now().Add(lookTimeout))
	msg := []byte("\x00\x00\x00\x00\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00")
	binary.BigEndian.PutUint32(msg, uint32(len(msg)))
	if _, err = conn.Write(msg); err == nil {
		_, err = pgConn{conn}.answer()
	}
	if err != nil {
		conn.Close()
	}
	return pgConn{conn}, err
}

// answer reads until the server is ready again, and returns the bodies of all
// messages.
func (c pgConn) answer() (string, error) {
	var text strings.Builder
	for {
		tag, body, err := readPostgres(c)
		if err != nil {
			return "", err
		}
		text.Write(body)
		switch tag {
		case 'E':
			return "", fmt.Errorf("%q", body)
		case 'Z':
			return text.String(), nil
		}
	}
}

func (c pgConn) query(sql string) (string, error) {
	msg := binary.BigEndian.AppendUint32([]byte{'Q'}, uint32(len(sql)+5))
	if _, err := c.Write(append(append(msg, sql...), 0)); err != nil {
		return "", err
	}
	return c.answer()
}

func postgresDo(s *Server, sql string) (string, error) {
	pg, err := pgConnect(s)
	if err != nil {
		return "", err
	}
	defer pg.Close()
	return pg.query(sql)
}

func postgresPut(s *Server) error {
	_, err := postgresDo(s, "CREATE TABLE IF NOT EXISTS testserver AS SELECT 'here' AS v")
	return err
}

func postgresHas(s *Server) (bool, error) {
	reply, err := postgresDo(s, "SELECT v FROM testserver")
	return strings.Contains(reply, "here"), err
}

func mongoDo(s *Server, cmd bsonDoc) (map[string]any, error) {
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(lookTimeout))
	return mongoCommand(conn, cmd)
}

func mongoPut(s *Server) error {
	_, err := mongoDo(s, bsonDoc{
		{"update", "testserver"},
		{"updates", bsonArray{{{"q", bsonDoc{{"_id", "x"}}}, {"u", bsonDoc{{"_id", "x"}}}, {"upsert", true}}}},
		{"writeConcern", bsonDoc{{"w", "majority"}}},
	})
	return err
}

func mongoHas(s *Server) (bool, error) {
	reply, err := mongoDo(s, bsonDoc{{"count", "testserver"}, {"query", bsonDoc{{"_id", "x"}}}})
	return reply["n"] == int32(1), err
}
