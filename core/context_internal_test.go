package core

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// boundedPair is a boundedCtx and the standard library's context that it has to
// behave like, both with parents that do the same.
type boundedPair struct {
	ctx           [2]context.Context
	stop, release [2]context.CancelFunc
	parent        [2]context.CancelCauseFunc
	fired         [2]atomic.Int32 // by context.AfterFunc
}

var errParent = errors.New("parent's cause")

func newBoundedPair(root context.Context, parentBound, bound time.Duration) *boundedPair {
	p := &boundedPair{}
	for i := range 2 {
		outer, cancel := context.WithCancelCause(root)
		p.parent[i] = cancel
		parent, release := context.WithTimeout(outer, parentBound)
		p.release[i] = release
		if i == 0 {
			p.ctx[i], p.stop[i] = context.WithTimeout(parent, bound)
		} else {
			b := &boundedCtx{parent: parent, deadline: time.Now().Add(bound)}
			p.ctx[i], p.stop[i] = b, b.stop
		}
	}
	return p
}

// boundedSteps are what can happen to a context, and what can be seen of it.
var boundedSteps = map[string]func(p *boundedPair, i int) any{
	"sleep":         func(*boundedPair, int) any { return nil },
	"stop":          func(p *boundedPair, i int) any { p.stop[i](); return nil },
	"parent cancel": func(p *boundedPair, i int) any { p.parent[i](errParent); return nil },
	"Err":           func(p *boundedPair, i int) any { return p.ctx[i].Err() },
	"Cause":         func(p *boundedPair, i int) any { return context.Cause(p.ctx[i]) },
	"Done": func(p *boundedPair, i int) any {
		select {
		case <-p.ctx[i].Done():
			return "closed"
		default:
			return "open"
		}
	},
	"Deadline": func(p *boundedPair, i int) any { d, ok := p.ctx[i].Deadline(); return fmt.Sprint(d, ok) },
	"child": func(p *boundedPair, i int) any {
		child, cancel := context.WithCancel(p.ctx[i])
		defer cancel()
		return fmt.Sprint(child.Err(), context.Cause(child))
	},
	"value": func(p *boundedPair, i int) any {
		child := context.WithValue(p.ctx[i], boundedStepKey{}, 1)
		return fmt.Sprint(child.Err(), context.Cause(child), p.ctx[i].Value(boundedStepKey{}))
	},
	"detached": func(p *boundedPair, i int) any { return context.WithoutCancel(p.ctx[i]).Err() },
	"AfterFunc": func(p *boundedPair, i int) any {
		context.AfterFunc(p.ctx[i], func() { p.fired[i].Add(1) })
		return nil
	},
	"fired": func(p *boundedPair, i int) any { return p.fired[i].Load() },
}

type boundedStepKey struct{}

// TestBoundedCtxIsLikeTheStandardLibrarys does the same, at random, to a
// boundedCtx and to a context of context.WithTimeout, and compares all that can
// be seen. What differs by intention is left out: the very first Err does not
// read the clock, and a deadline that passed unseen is not remembered when the
// context then ends in another way. So Err is looked at after every step.
func TestBoundedCtxIsLikeTheStandardLibrarys(t *testing.T) {
	t.Parallel()
	var names []string
	for name := range boundedSteps {
		names = append(names, name)
	}
	for seed := range uint64(1000) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			bounds := []time.Duration{time.Second, 2 * time.Second, time.Hour}
			parentBound, bound := bounds[r.IntN(3)], bounds[r.IntN(3)]
			if parentBound == bound {
				return // which of the two comes first is nobody's promise
			}
			p := newBoundedPair(t.Context(), parentBound, bound)
			history := []string{fmt.Sprint("parent ", parentBound, ", bound ", bound)}
			if p.ctx[1].Err() != nil {
				t.Error("ended from the beginning")
			}
			for range 8 {
				name := names[r.IntN(len(names))]
				history = append(history, name)
				if name == "sleep" {
					time.Sleep(time.Duration(1+r.IntN(3))*time.Second - time.Second/2)
				}
				want, got := boundedSteps[name](p, 0), boundedSteps[name](p, 1)
				synctest.Wait()
				if want == got {
					want, got = p.ctx[0].Err(), p.ctx[1].Err()
				}
				if want != got {
					t.Fatalf("seed %d, %s: got %v, want %v", seed, strings.Join(history, "; "), got, want)
				}
			}
			for i := range 2 {
				p.stop[i]()
				p.release[i]()
				p.parent[i](nil)
			}
		})
	}
}

// Children are linked to it without a goroutine that waits for Done.
func TestBoundedCtxChildrenNeedNoGoroutine(t *testing.T) {
	b := &boundedCtx{parent: t.Context(), deadline: time.Now().Add(time.Hour)}
	defer b.stop()
	before := runtime.NumGoroutine()
	var children []context.Context
	for range 100 {
		child, cancel := context.WithCancel(b)
		defer cancel()
		children = append(children, child)
	}
	if after := runtime.NumGoroutine(); after != before {
		t.Errorf("%d goroutines for 100 children", after-before)
	}
	b.stop()
	for _, child := range children {
		if child.Err() == nil {
			t.Fatal("a child lives on")
		}
	}
}

func TestBoundedCtxFreesItsTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, look := range []bool{true, false} {
			b := &boundedCtx{parent: t.Context(), deadline: time.Now().Add(time.Second)}
			if look {
				_ = b.Done()
			}
			b.stop()
			time.Sleep(time.Minute)
			<-b.Done()
			if b.Err() != context.Canceled || context.Cause(b) != context.Canceled { //nolint:errorlint // unwrapped
				t.Errorf("stopped before its deadline, it says %v, cause %v", b.Err(), context.Cause(b))
			}
		}
	})
}

// Everything at once, for the race detector; Err and Done must agree whatever
// came first.
func TestBoundedCtxIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	for range 300 {
		parent, cancel := context.WithCancelCause(t.Context())
		b := &boundedCtx{parent: parent, deadline: time.Now().Add(time.Millisecond)}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				child, cancelChild := context.WithCancel(b)
				defer cancelChild()
				<-child.Done()
				if b.Err() == nil || child.Err() != b.Err() { //nolint:errorlint // unwrapped
					t.Errorf("child says %v, it says %v", child.Err(), b.Err())
				}
			})
			wg.Go(func() {
				for b.Err() == nil {
					_, _ = b.Deadline()
					_ = b.Value(boundedStepKey{})
					runtime.Gosched()
				}
				first, cause := b.Err(), context.Cause(b)
				<-b.Done()
				if b.Err() != first || context.Cause(b) != cause { //nolint:errorlint // unwrapped
					t.Errorf("it said %v, cause %v, now %v, cause %v", first, cause, b.Err(), context.Cause(b))
				}
			})
		}
		wg.Go(b.stop)
		wg.Go(func() { cancel(errParent) })
		wg.Wait()
	}
}
