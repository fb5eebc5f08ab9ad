package testserver

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

var postgresKind = &kind{
	name:  "postgres",
	hint:  "run `make servers` (Debian: apt-get install postgresql)",
	user:  true,
	find:  findPostgres,
	setup: initPostgres,
	flags: func(s *Server) []string {
		return []string{
			"-D", filepath.Join(s.Dir, "data"), "-h", "127.0.0.1", "-p", strconv.Itoa(s.ports[0]),
			// No Unix socket: its path may be too long for the system.
			"-c", "unix_socket_directories=",
			// A killed server leaves its shared memory behind. In its folder
			// that is deleted with it; see also removeDir.
			"-c", "dynamic_shared_memory_type=mmap",
			"-c", "max_connections=400",
			"-c", "log_timezone=UTC", "-c", "timezone=UTC",
		}
	},
	ready: postgresReady,
	url: func(s *Server) string {
		return "postgres://postgres@" + s.Addr + "/postgres?sslmode=disable"
	},
	stop: syscall.SIGINT,  // "fast": SIGTERM would wait for the clients
	quit: syscall.SIGQUIT, // "immediate"; SIGKILL would leave shared memory behind
}

// findPostgres finds a postgres that has its initdb beside it: Debian keeps
// both off PATH, and some machines have a link to one of them there.
func findPostgres() (program, bool) {
	var dirs []string
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin", "/usr/local/pgsql/bin"} {
		found, _ := filepath.Glob(pattern)
		slices.SortFunc(found, func(a, b string) int { return cmp.Compare(majorVersion(b), majorVersion(a)) })
		dirs = append(dirs, found...)
	}
	p, ok := findProgram("postgres", dirs, "bin")
	if !ok {
		return program{}, false
	}
	if path, err := filepath.EvalSymlinks(p.path); err == nil {
		p.path = path
	}
	_, err := exec.LookPath(filepath.Join(filepath.Dir(p.path), "initdb"))
	return p, err == nil
}

// majorVersion is the number in a path such as /usr/lib/postgresql/15/bin.
func majorVersion(path string) int {
	digits := strings.Map(func(r rune) rune {
		if r < '0' || r > '9' {
			return -1
		}
		return r
	}, path)
	n, _ := strconv.Atoi(digits)
	return n
}

// initPostgres makes the data folder, unless it is there.
func initPostgres(s *Server) error {
	data := filepath.Join(s.Dir, "data")
	if _, err := os.Stat(data); err == nil {
		return nil
	}
	return s.postgresTool("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C",
		"--no-sync") // of the empty database; the server syncs what it commits
}

// postgresTool runs a program that comes with the server, as the user that the
// server runs as.
func (s *Server) postgresTool(name string, args ...string) error {
	cmd := exec.Command(filepath.Join(filepath.Dir(s.prog.path), name), args...)
	cmd.Dir, cmd.Env = s.Dir, cleanEnv()
	owner, err := unprivileged()
	if err != nil {
		return err
	}
	setAttributes(cmd, syscall.SIGKILL, owner)
	var out []byte
	onSpawner(func() { out, err = cmd.CombinedOutput() })
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return nil
}

// StartPostgresStandby starts a hot standby, for this test alone, of the server
// that it reaches at addr, host:port.
func StartPostgresStandby(t testing.TB, addr string) *Server {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	// A server like any other, whose data folder is then replaced.
	s := StartPostgres(t)
	const tool = "pg_basebackup"
	if _, err := exec.LookPath(filepath.Join(filepath.Dir(s.prog.path), tool)); err != nil {
		t.Skipf("no %s beside %s: %s", tool, s.prog.path, postgresKind.hint)
	}
	s.Stop(t)
	data := filepath.Join(s.Dir, "data")
	if err := os.RemoveAll(data); err != nil {
		t.Fatal(err)
	}
	if err := s.postgresTool(tool, "-h", host, "-p", port, "-U", "postgres", "-D", data,
		"--checkpoint=fast", "--no-sync", "--write-recovery-conf"); err != nil {
		t.Fatal(err)
	}
	s.Start(t)
	return s
}

// postgresReady sends a start-up message and reads what the server tells of
// itself.
func postgresReady(ctx context.Context, s *Server) (string, error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	user, database := "postgres", "postgres"
	if u, err := url.Parse(s.URL); err == nil {
		user = cmp.Or(u.User.Username(), user)
		database = cmp.Or(strings.TrimPrefix(u.Path, "/"), user)
	}
	const version3 = 3 << 16
	msg := binary.BigEndian.AppendUint32([]byte{0, 0, 0, 0}, version3)
	for _, s := range []string{"user", user, "database", database, ""} {
		msg = append(append(msg, s...), 0)
	}
	binary.BigEndian.PutUint32(msg, uint32(len(msg)))
	if _, err := conn.Write(msg); err != nil {
		return "", err
	}
	version := ""
	r := bufio.NewReader(conn)
	for {
		tag, body, err := readPostgres(r)
		if err != nil {
			return "", err
		}
		switch tag {
		case 'E':
			return "", fmt.Errorf("%q", body) // "the database system is starting up"
		case 'R':
			if len(body) >= 4 && binary.BigEndian.Uint32(body) != 0 {
				return "", nil // it wants a password: ready, and no more to learn
			}
		case 'S':
			if f := bytes.Split(body, []byte{0}); len(f) > 1 && string(f[0]) == "server_version" {
				version, _, _ = strings.Cut(string(f[1]), " ")
			}
		case 'Z':
			_, err := conn.Write([]byte{'X', 0, 0, 0, 4}) // so that no error is logged
			return version, err
		}
	}
}

// readPostgres reads one message: a type, a length that counts itself, a body.
func readPostgres(r io.Reader) (tag byte, body []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(head[1:])
	if size < 4 || size > 1<<16 {
		return 0, nil, errors.New("not a PostgreSQL server")
	}
	body = make([]byte, size-4)
	_, err = io.ReadFull(r, body)
	return head[0], body, err
}

var pgbouncerKind = &kind{
	name: "pgbouncer",
	hint: "run `make servers` (Debian: apt-get install pgbouncer)",
	user: true,
	find: func() (program, bool) {
		p, ok := findProgram("pgbouncer", []string{"/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"}, "bin")
		path := p.path
		p.version = func() string { return versionOf(path) }
		return p, ok
	},
	flags: func(s *Server) []string { return []string{filepath.Join(s.Dir, "pgbouncer.ini")} },
	ready: postgresReady,
	url:   postgresKind.url,
	stop:  syscall.SIGINT,
	quit:  syscall.SIGKILL,
}

// versionOf returns the first word that begins with a digit of what a program
// prints for --version.
func versionOf(path string) string {
	out, _ := exec.Command(path, "--version").Output()
	for word := range strings.FieldsSeq(string(out)) {
		if word[0] >= '0' && word[0] <= '9' {
			return word
		}
	}
	return ""
}

func writePgBouncerConfig(s, pg *Server, poolMode string) error {
	u, err := url.Parse(pg.URL)
	if err != nil {
		return err
	}
	login := "user=" + cmp.Or(u.User.Username(), "postgres")
	if password, ok := u.User.Password(); ok {
		login += " password=" + password
	}
	ini := fmt.Sprintf(`[databases]
* = host=%s port=%s %s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
; Anybody may connect, and becomes the user above.
auth_type = any
pool_mode = %s
max_client_conn = 400
default_pool_size = 20
ignore_startup_parameters = extra_float_digits
`, u.Hostname(), cmp.Or(u.Port(), "5432"), login, s.ports[0], poolMode)
	return os.WriteFile(filepath.Join(s.Dir, "pgbouncer.ini"), []byte(ini), 0o644)
}
