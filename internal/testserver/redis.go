package testserver

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
)

var redisKind = &kind{
	name: "redis",
	hint: "run `make servers` (Debian: apt-get install redis-server)",
	find: func() (program, bool) {
		dirs := []string{"/usr/local/bin", "/opt/homebrew/bin"}
		if p, ok := findProgram("redis-server", dirs, "bin"); ok {
			return p, true
		}
		return findProgram("valkey-server", dirs, "bin")
	},
	flags: func(s *Server) []string {
		return []string{
			"--bind", "127.0.0.1", "--port", strconv.Itoa(s.ports[0]),
			"--dir", s.Dir, "--save", "", "--appendonly", "no", "--daemonize", "no",
		}
	},
	ready: redisReady,
	url:   func(s *Server) string { return "redis://" + s.Addr + "/0" },
	stop:  syscall.SIGTERM,
	quit:  syscall.SIGKILL,
}

// redisReady asks for INFO. A server that wants a password is ready too.
func redisReady(ctx context.Context, s *Server) (string, error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "PING\r\nINFO server\r\n"); err != nil {
		return "", err
	}
	r := bufio.NewReader(conn)
	switch line, err := r.ReadString('\n'); {
	case err != nil:
		return "", err
	case strings.HasPrefix(line, "-NOAUTH"):
		return "", nil
	case line != "+PONG\r\n":
		return "", fmt.Errorf("PING: %q", line) // -LOADING, for one
	}
	head, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	size, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(head, "$")))
	if err != nil {
		return "", fmt.Errorf("INFO: %w", err)
	}
	info := make([]byte, size)
	if _, err := io.ReadFull(r, info); err != nil {
		return "", err
	}
	version := ""
	for line := range strings.Lines(string(info)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		// Valkey tells both, the first for the sake of old clients.
		if name == "redis_version" && version == "" || name == "valkey_version" {
			version = value
		}
	}
	return version, nil
}
