package testserver

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
)

// program is a server's executable.
type program struct {
	path string
	// from says where it was found: "PATH", a folder, "tool cache".
	from string
	// version asks the program; nil if the server itself tells.
	version func() string
}

// toolCache is where "make servers" puts what it builds: $LEASEKIT_TOOLS, by
// default leasekit in $XDG_CACHE_HOME, by default ~/.cache.
func toolCache() string {
	if dir := os.Getenv("LEASEKIT_TOOLS"); dir != "" {
		return dir
	}
	cache := os.Getenv("XDG_CACHE_HOME")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		cache = filepath.Join(home, ".cache")
	}
	return filepath.Join(cache, "leasekit")
}

// findProgram looks for name on PATH, then in dirs, then in the named folders
// of the tool cache.
func findProgram(name string, dirs []string, cacheDirs ...string) (program, bool) {
	if path, err := exec.LookPath(name); err == nil {
		return program{path: path, from: "PATH"}, true
	}
	for _, dir := range dirs {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return program{path: path, from: dir}, true
		}
	}
	if cache := toolCache(); cache != "" {
		for _, dir := range cacheDirs {
			if path, err := exec.LookPath(filepath.Join(cache, dir, name)); err == nil {
				return program{path: path, from: "tool cache"}, true
			}
		}
	}
	return program{}, false
}

// freePort returns a port of 127.0.0.1 that was free a moment ago. It lies
// below the ports that systems give to outgoing connections (Linux from 32768,
// others from 49152), so that a server which is stopped for a while finds its
// port free when it comes back: a client that dials a closed port again and
// again would otherwise connect to itself sooner or later, and keep the port.
func freePort() int {
	for {
		port := 20000 + rand.IntN(12000)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		l.Close()
		return port
	}
}

// fileTail is how much of a server's log a failed test shows, in bytes.
const fileTail = 4 << 10

// logSize returns the size of a log, 0 if there is none.
func logSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// logTail returns the end of what was written to a log after offset begin.
func logTail(path string, begin int64) string {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Sprintf("(%v)", err)
	}
	defer f.Close()
	size := logSize(path)
	begin = max(begin, size-fileTail)
	if begin >= size {
		return "(nothing)"
	}
	text := make([]byte, size-begin)
	n, _ := f.ReadAt(text, begin)
	return string(text[:n])
}
