package conformance

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// recorder is the testing.TB of one attempt at one rule. It keeps what happened
// to itself, so that the suite can decide what it means: an attempt that could
// not be judged is made again, and a rule known to fail must fail. Everything
// that is not about the outcome goes to the test behind it.
type recorder struct {
	testing.TB
	ctx    context.Context
	cancel context.CancelFunc
	limit  time.Duration

	mu       sync.Mutex
	failed   bool   // by anything, a broken rule included
	broken   bool   // by Broken: the store is wrong, not its set-up
	skipped  bool   // by Open
	again    string // why the attempt could not be judged
	lines    []string
	cleanups []func()
}

// newRecorder returns a recorder whose context ends after limit, so that a
// store that hangs is an error of the rule and not the end of the whole test.
func newRecorder(tb testing.TB, limit time.Duration) *recorder {
	r := &recorder{TB: tb, limit: limit}
	r.ctx, r.cancel = context.WithTimeout(tb.Context(), limit)
	return r
}

// do runs f as testing runs a test: in a goroutine of its own, which FailNow
// may end, and then the cleanups, last first.
func (r *recorder) do(f func()) {
	r.protect(f)
	r.cancel()
	r.cleanup()
}

func (r *recorder) cleanup() {
	for {
		r.mu.Lock()
		n := len(r.cleanups)
		if n == 0 {
			r.mu.Unlock()
			return
		}
		f := r.cleanups[n-1]
		r.cleanups = r.cleanups[:n-1]
		r.mu.Unlock()
		r.protect(f)
	}
}

// protect calls f in a new goroutine and waits for it. A panic is a failure of
// this rule only.
func (r *recorder) protect(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				r.fail(fmt.Sprintf("panic: %v\n%s", p, debug.Stack()))
			}
		}()
		f()
	}()
	<-done
}

func (r *recorder) fail(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
	r.lines = append(r.lines, line)
}

func (r *recorder) setBroken(line string) {
	r.fail(line)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.broken = true
}

func (r *recorder) setAgain(why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.again = why
}

// over reports whether the outcome of the attempt is known.
func (r *recorder) over() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed || r.skipped || r.again != ""
}

func (r *recorder) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(slices.Clone(r.lines), "\n")
}

func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

// scope is a part of an attempt with cleanups of its own.
type scope struct {
	testing.TB
	cleanups recorder
}

func (s *scope) Cleanup(f func()) { s.cleanups.Cleanup(f) }

// close runs the cleanups so far.
func (s *scope) close() {
	s.cleanups.cleanup()
	if s.cleanups.failed {
		s.TB.Error(s.cleanups.text())
	}
}

func (r *recorder) Context() context.Context { return r.ctx }

func (r *recorder) Log(args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
}
func (r *recorder) Logf(format string, args ...any) { r.Log(fmt.Sprintf(format, args...)) }

func (r *recorder) Fail() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
}
func (r *recorder) FailNow()                          { r.Fail(); runtime.Goexit() }
func (r *recorder) Error(args ...any)                 { r.Log(args...); r.Fail() }
func (r *recorder) Errorf(format string, args ...any) { r.Logf(format, args...); r.Fail() }
func (r *recorder) Fatal(args ...any)                 { r.Log(args...); r.FailNow() }
func (r *recorder) Fatalf(format string, args ...any) { r.Logf(format, args...); r.FailNow() }
func (r *recorder) Skip(args ...any)                  { r.Log(args...); r.SkipNow() }
func (r *recorder) Skipf(format string, args ...any)  { r.Logf(format, args...); r.SkipNow() }
func (r *recorder) Failed() bool                      { r.mu.Lock(); defer r.mu.Unlock(); return r.failed }
func (r *recorder) Skipped() bool                     { r.mu.Lock(); defer r.mu.Unlock(); return r.skipped }
func (r *recorder) SkipNow() {
	r.mu.Lock()
	r.skipped = true
	r.mu.Unlock()
	runtime.Goexit()
}
