package testserver

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a started program.
type process struct {
	pid      int
	logStart int64         // where its output begins in the log
	done     chan struct{} // closed when it has ended
	err      error         // how it ended; read after done
}

// spawn starts a program whose output is appended to logFile, with env beside
// this process's environment. The system ends it when this process dies.
func spawn(path string, args, env []string, dir, logFile string, k *kind) (*process, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the child has its own copy
	cmd := exec.Command(path, args...)
	cmd.Dir = dir
	cmd.Env = append(cleanEnv(), env...)
	cmd.Stdout, cmd.Stderr = log, log
	var owner *account
	if k.user {
		if owner, err = unprivileged(); err != nil {
			return nil, err
		}
	}
	setAttributes(cmd, k.quit, owner)
	p := &process{logStart: logSize(logFile), done: make(chan struct{})}
	onSpawner(func() { err = cmd.Start() })
	if err != nil {
		return nil, err
	}
	p.pid = cmd.Process.Pid
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// onSpawner calls fn on the one thread that starts servers, and returns when fn
// has. Linux sends the signal that a child asked for at its parent's death when
// the *thread* that made the child ends, so that thread has to live as long as
// this process.
func onSpawner(fn func()) {
	done := make(chan struct{})
	spawner() <- func() { fn(); close(done) }
	<-done
}

var spawner = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for fn := range work {
			fn()
		}
	}()
	return work
})

// cleanEnv is this process's environment without what would change how a server
// behaves.
func cleanEnv() []string {
	var env []string
	for _, e := range os.Environ() {
		switch {
		case strings.HasPrefix(e, "PG"), strings.HasPrefix(e, "ETCD_"), strings.HasPrefix(e, "SECANTUS_"),
			strings.HasPrefix(e, "LC_"), strings.HasPrefix(e, "LANG"):
		default:
			env = append(env, e)
		}
	}
	return append(env, "LC_ALL=C")
}

func (p *process) alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// end sends a signal and waits. It reports whether the process ended by that
// signal; if not within stopTimeout, it was killed.
func (p *process) end(sig syscall.Signal) bool {
	_ = p.resume() // a paused process would not see the signal
	_ = signal(p.pid, sig)
	select {
	case <-p.done:
		return true
	case <-time.After(stopTimeout):
		p.kill()
		return false
	}
}

// kill ends the process and its descendants, and waits for that.
func (p *process) kill() {
	_ = signal(p.pid, sigStop) // so that it makes no more children
	children := descendants(p.pid)
	_ = signal(p.pid, syscall.SIGKILL)
	for _, pid := range children {
		_ = signal(pid, syscall.SIGKILL)
	}
	<-p.done
	for _, pid := range children {
		for exists(pid) {
			time.Sleep(time.Millisecond)
		}
	}
}

// pause stops the process and its descendants. (A process group would not do:
// PostgreSQL gives each of its children a group of its own.)
func (p *process) pause() error {
	if err := signal(p.pid, sigStop); err != nil {
		return err
	}
	for _, pid := range descendants(p.pid) {
		_ = signal(pid, sigStop) // it may have ended
	}
	return nil
}

// resume lets the process and its descendants go on.
func (p *process) resume() error {
	for _, pid := range descendants(p.pid) {
		_ = signal(pid, sigCont)
	}
	return signal(p.pid, sigCont)
}

// account is the user that a server runs as when the tests run as root and the
// server refuses to.
type account struct{ uid, gid uint32 }

// unprivileged returns that account, nil when the tests do not run as root.
func unprivileged() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &account{uid: uint32(uid), gid: uint32(gid)}, nil
		}
	}
	return nil, fmt.Errorf("it refuses to run as root, and there is neither a user postgres nor nobody")
}

// makeDir makes the server's folder.
func (s *Server) makeDir() error {
	sweepOnce()
	var owner *account
	base := os.TempDir()
	if s.kind.user {
		var err error
		if owner, err = unprivileged(); err != nil {
			return err
		}
		if owner != nil && !open(base) {
			base = "/tmp"
		}
	}
	dir, err := os.MkdirTemp(base, "leasekit-"+s.kind.name+"-")
	if err != nil {
		return err
	}
	lock, err := lockDir(dir)
	if err == nil && owner != nil {
		err = os.Chown(dir, int(owner.uid), int(owner.gid))
	}
	if err != nil {
		os.RemoveAll(dir)
		return err
	}
	s.Dir, s.LogFile, s.lock = dir, filepath.Join(dir, "log"), lock
	return nil
}

// open reports whether every user may enter a folder.
func open(dir string) bool {
	for ; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
	}
}

// lockDir marks dir as used by this process, until the file is closed or the
// process ends. The file appears under its name when it is locked already, so
// that sweep never sees a folder in use without its lock.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Create(filepath.Join(dir, "lock.new"))
	if err != nil {
		return nil, err
	}
	if err := tryLock(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, os.Rename(f.Name(), filepath.Join(dir, "lock"))
}

// sweepOnce deletes the folders that killed test processes left behind.
var sweepOnce = sync.OnceFunc(func() {
	locks, _ := filepath.Glob(filepath.Join(os.TempDir(), "leasekit-*-*", "lock"))
	for _, name := range locks {
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		if tryLock(f) == nil {
			removeDir(filepath.Dir(name))
		}
		f.Close()
	}
})

// removeDir deletes a server's folder.
func removeDir(dir string) {
	// A PostgreSQL that was killed leaves a shared memory segment, named in the
	// seventh line of its pid file; the system allows a few thousand.
	if pidFile, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid")); err == nil {
		if lines := strings.Split(string(pidFile), "\n"); len(lines) > 6 {
			if ids := strings.Fields(lines[6]); len(ids) == 2 {
				_ = exec.Command("ipcrm", "-m", ids[1]).Run()
			}
		}
	}
	_ = os.RemoveAll(dir)
}
