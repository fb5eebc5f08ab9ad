package await_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"runtime/pprof"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/internal/await"
)

func TestCallReturnsWhatTheCallReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := await.New("backend")
		defer w.Close()
		wrong := errors.New("wrong")
		for name, ctx := range map[string]context.Context{"endless": context.Background(), "with an end": t.Context()} {
			n, err := await.Call(ctx, w, func() (int, error) { return 7, wrong })
			if n != 7 || !errors.Is(err, wrong) {
				t.Errorf("%s: got %d, %v", name, n, err)
			}
		}
	})
}

func TestCallComesBackWhenTheContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := await.New("backend")
		defer w.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		ended := make(chan time.Duration, 1)
		_, err := await.Call(ctx, w, func() (int, error) {
			time.Sleep(time.Minute)
			ended <- time.Since(began)
			return 7, nil
		})
		if !errors.Is(err, context.DeadlineExceeded) || !strings.HasPrefix(err.Error(), "backend: ") {
			t.Errorf("got %v, want the error of the context", err)
		}
		if took := time.Since(began); took != time.Second {
			t.Errorf("came back after %v, want 1 s", took)
		}
		if after := <-ended; after != time.Minute {
			t.Errorf("the call ended after %v, want 1 min: it is left alone", after)
		}
	})
}

// lateContext has ended when the call that runs under it has been answered, seen
// from the moment when its caller begins to wait.
type lateContext struct {
	context.Context
	asked int
}

func (c *lateContext) Done() <-chan struct{} {
	c.asked++
	if c.asked > 1 {
		synctest.Wait()
	}
	return c.Context.Done()
}

func (c *lateContext) Err() error {
	if c.asked > 1 {
		return context.Canceled
	}
	return nil
}

// What is there already is better than an unknown outcome.
func TestCallPrefersTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := await.New("backend")
		defer w.Close()
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for range 64 {
			n, err := await.Call(&lateContext{Context: ended}, w, func() (int, error) { return 7, nil })
			if n != 7 || err != nil {
				t.Fatalf("got %d, %v, want the answer", n, err)
			}
		}
	})
}

func TestCallDoesNotStartUnderAnEndedContext(t *testing.T) {
	w := await.New("backend")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := await.Call(ctx, w, func() (int, error) { t.Error("called"); return 0, nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A library's hook that ends its goroutine must not leave the caller waiting,
// nor the next.
func TestCallThatEndsItsGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := await.New("backend")
		defer w.Close()
		for range 3 {
			_, err := await.Call(t.Context(), w, func() (int, error) { runtime.Goexit(); return 0, nil })
			if !errors.Is(err, await.ErrNoResult) {
				t.Errorf("got %v, want %v", err, await.ErrNoResult)
			}
			if n, err := await.Call(t.Context(), w, func() (int, error) { return 7, nil }); n != 7 || err != nil {
				t.Errorf("got %d, %v after it", n, err)
			}
		}
	})
}

// panicOf returns what f panics with, nil if it does not.
func panicOf(f func()) (p any) {
	defer func() { p = recover() }()
	f()
	return nil
}

func hookThatPanics(value any) { panic(value) }

// A library's hook that panics would end the process from a goroutine of ours.
// It has to reach the caller, who may recover, and leave the workers whole.
func TestCallThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := await.New("backend")
		defer w.Close()
		wrong := errors.New("wrong")
		for name, value := range map[string]any{"error": wrong, "text": "wrong", "nil": nil} {
			p := panicOf(func() {
				_, err := await.Call(t.Context(), w, func() (int, error) { hookThatPanics(value); return 7, nil })
				t.Errorf("%s: Call returned the error %v, want a panic", name, err)
			})
			err, ok := p.(*await.PanicError)
			if !ok {
				t.Fatalf("%s: panic with a %T, %v, want a PanicError", name, p, p)
			}
			if _, none := err.Value.(*runtime.PanicNilError); err.Value != value && !none {
				t.Errorf("%s: value %v, want %v", name, err.Value, value)
			}
			if errors.Is(err, wrong) != (name == "error") {
				t.Errorf("%s: errors.Is finds the value: %v", name, errors.Is(err, wrong))
			}
			if text := err.Error(); value != nil && !strings.HasPrefix(text, "wrong\n") || !strings.Contains(text, "hookThatPanics") {
				t.Errorf("%s: text %q, want the value and the stack of the hook", name, text)
			}
			if n, err := await.Call(t.Context(), w, func() (int, error) { return 7, nil }); n != 7 || err != nil {
				t.Errorf("%s: got %d, %v after it", name, n, err)
			}
		}
	})
}

// Without a goroutine between there is nothing to tell about one.
func TestCallThatPanicsOnItsCaller(t *testing.T) {
	w := await.New("backend")
	for name, try := range map[string]func(fn func() (int, error)){
		"endless": func(fn func() (int, error)) { _, _ = await.Call(context.Background(), w, fn) },
		"inline":  func(fn func() (int, error)) { _, _ = await.Call(t.Context(), await.Inline("backend"), fn) },
	} {
		if p := panicOf(func() { try(func() (int, error) { panic("wrong") }) }); p != "wrong" {
			t.Errorf("%s: panic with %v, want the value itself", name, p)
		}
	}
}

// Nobody is there to recover it.
func TestCallThatPanicsAfterItsCallerHasGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := await.New("backend")
		defer w.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		panicked := false
		_, err := await.Call(ctx, w, func() (int, error) {
			time.Sleep(time.Minute)
			panicked = true
			panic("wrong")
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the error of the context", err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !panicked {
			t.Error("the call has not come to its panic")
		}
		if n, err := await.Call(t.Context(), w, func() (int, error) { return 7, nil }); n != 7 || err != nil {
			t.Errorf("got %d, %v after it", n, err)
		}
	})
}

// A goroutine for each call that runs at the same time, none for each call that
// there ever was, and none after Close.
func TestWorkersEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		want := func(n int, when string) {
			t.Helper()
			synctest.Wait()
			var b bytes.Buffer
			if err := pprof.Lookup("goroutine").WriteTo(&b, 2); err != nil {
				t.Fatal(err)
			}
			if got := strings.Count(b.String(), "await.(*Workers).work("); got != n {
				t.Errorf("%d goroutines %s, want %d", got, when, n)
			}
		}
		w := await.New("backend")
		one := func() {
			t.Helper()
			if _, err := await.Call(t.Context(), w, func() (int, error) { return 0, nil }); err != nil {
				t.Error(err)
			}
			synctest.Wait()
		}
		for range 100 {
			one()
		}
		want(1, "after 100 calls in a row")
		time.Sleep(await.Idle / 2)
		one()
		time.Sleep(await.Idle * 3 / 4)
		want(1, "before the last call is Idle ago")
		time.Sleep(await.Idle)
		want(0, "long after the last call")
		one()
		w.Close()
		want(0, "after Close")
		one()
		want(0, "after a call after Close")
		w.Close()
	})
}

func BenchmarkCall(b *testing.B) {
	w := await.New("backend")
	defer w.Close()
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := await.Call(ctx, w, func() (int64, error) { return 7, nil }); err != nil {
			b.Fatal(err)
		}
	}
}
