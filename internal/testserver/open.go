package testserver

import (
	"errors"
	"fmt"
	"os"
	"slices"
)

// Open returns a server for a program that is no test, such as the benchmarks:
// the one named by $LEASEKIT_TEST_… or one that it starts, and that the caller
// has to [Server.Close]. name is "redis", "etcd", "postgres" or "mongo". Where
// none can be had the error says how to get one, and matches [ErrMissing].
func Open(name string) (*Server, error) {
	i := slices.IndexFunc(kinds(), func(k *kind) bool { return k.name == name })
	if i < 0 {
		return nil, fmt.Errorf("testserver: no kind of server is called %q", name)
	}
	k := kinds()[i]
	if u := os.Getenv(k.env()); u != "" {
		return external(k, u)
	}
	s, err := launch(k, nil, freePort)
	if errors.Is(err, errMissing) {
		return nil, fmt.Errorf("%w: set %s=URL, or %s", err, k.env(), k.hint)
	}
	return s, err
}

// ErrMissing says that no server of a kind can be had on this machine.
var ErrMissing = errMissing

// Origin says where the server comes from: PATH, the tool cache, a variable.
func (s *Server) Origin() string { return s.prog.from }

// Close ends a server that [Open] started. One that was given by its URL is
// left alone.
func (s *Server) Close() { s.remove() }
