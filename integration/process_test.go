package integration

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// childEnv has the address of the Redis server for [child]; keyEnv, ttlEnv and
// spinnersEnv say what to do.
const (
	childEnv    = "LEASEKIT_TOPOLOGY_REDIS"
	keyEnv      = "LEASEKIT_TOPOLOGY_KEY"
	ttlEnv      = "LEASEKIT_TOPOLOGY_TTL"
	spinnersEnv = "LEASEKIT_TOPOLOGY_SPINNERS"
)

// child holds a key and does as the lines on its standard input say. It answers
// on its standard output, a word and a token a line:
//
//	held      the callback began
//	write     it was told to write, and does not look at its context first, as
//	          code does that was stopped between the look and the write
//	cancelled the callback's context has ended
//	lost      Do has returned ErrLost
//	nil       Do has returned nil
func child(addr string) int {
	ttl, err := time.ParseDuration(os.Getenv(ttlEnv))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	store, err := redisstore.New(client, redisstore.Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	defer store.Close()
	strategy, err := core.NewStrategy(store, core.Options{TTL: ttl, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	var token int64
	var mu sync.Mutex
	say := func(word string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Println(word, token)
	}
	err = strategy.Do(context.Background(), os.Getenv(keyEnv), func(ctx context.Context) error {
		token, _ = core.Token(ctx)
		say("held")
		spinners, _ := strconv.Atoi(os.Getenv(spinnersEnv))
		for range spinners {
			go func() {
				for { //nolint:staticcheck // it is to burn the processor
				}
			}()
		}
		stop := context.AfterFunc(ctx, func() { say("cancelled") })
		defer stop()
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			say(lines.Text())
		}
		// The end of the input is the end of the work.
		return context.Cause(ctx)
	})
	switch {
	case errors.Is(err, core.ErrLost):
		say("lost")
	case err == nil:
		say("nil")
	default:
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// answer is a line of a [child].
type answer struct {
	word  string
	token int64
}

// holder is a running [child].
type holder struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan answer // closed when the process has ended
	early   []answer    // read, and not yet asked for
}

// startChild starts a [child]. It is killed when the test ends.
func startChild(t *testing.T, addr, key string, ttl time.Duration, env ...string) *holder {
	t.Helper()
	program, err := os.Executable()
	check(t, err)
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), childEnv+"="+addr, keyEnv+"="+key, ttlEnv+"="+ttl.String())
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	check(t, err)
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	h := &holder{cmd: cmd, in: in, answers: make(chan answer, 1<<16)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(h.answers)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			word, number, _ := strings.Cut(lines.Text(), " ")
			token, _ := strconv.ParseInt(number, 10, 64)
			h.answers <- answer{word, token}
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
		_ = cmd.Wait()
	})
	return h
}

// expect waits for an answer with that word, and returns its token. Others are
// kept: a callback may be cancelled before or after it writes.
func (h *holder) expect(t *testing.T, word string) int64 {
	t.Helper()
	for {
		if i := slices.IndexFunc(h.early, func(a answer) bool { return a.word == word }); i >= 0 {
			token := h.early[i].token
			h.early = slices.Delete(h.early, i, i+1)
			return token
		}
		a := receive(t, word, h.answers)
		if a.word == "" {
			t.Fatalf("the process ended without %q; before that it said %v", word, h.early)
		}
		h.early = append(h.early, a)
	}
}

// A process is stopped for longer than its lease, as by a hypervisor or a long
// collection of garbage, and goes on where it was: with a write.
func TestHolderStopped(t *testing.T) {
	server := testserver.Redis(t)
	client, _ := redisAt(t, server.Addr)
	store := redisStore(t, client)
	key, protected := rand.Text(), new(resource)

	const ttl = 2 * time.Second
	holder := startChild(t, server.Addr, key, ttl)
	first := holder.expect(t, "held")
	if !protected.write(first) {
		t.Fatal("the first write was refused")
	}
	check(t, holder.cmd.Process.Signal(syscall.SIGSTOP))

	strategy, err := core.NewStrategy(store, core.Options{Wait: core.WaitForever})
	check(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	lease, err := strategy.Acquire(ctx, key)
	check(t, err)
	defer lease.Release()
	if lease.Token() <= first {
		t.Fatalf("the successor's token is %d, want more than %d", lease.Token(), first)
	}
	if !protected.write(lease.Token()) {
		t.Error("the successor's write was refused")
	}

	_, err = io.WriteString(holder.in, "write\n")
	check(t, err)
	check(t, holder.cmd.Process.Signal(syscall.SIGCONT))
	late := holder.expect(t, "write")
	if late != first {
		t.Errorf("the late write has token %d, want %d", late, first)
	}
	if protected.write(late) {
		t.Error("the late write was accepted")
	}
	holder.expect(t, "cancelled")
	check(t, holder.in.Close())
	holder.expect(t, "lost")
	if err := lease.Err(); err != nil {
		t.Errorf("the successor lost its lease: %v", err)
	}
	outcome(t, "Redis, holder in a process of its own", "holder stopped (SIGSTOP) past its ttl, then continued",
		"the successor's token is greater; the late write was refused; the holder's context was cancelled and Do returned ErrLost")
}

// A process that hardly gets the processor: one thread of Go code, and many
// goroutines that never yield it. What comes of it depends on the machine; it
// must be one of two things, and a rival must never be without a greater token.
func TestHolderStarved(t *testing.T) {
	for _, spinners := range []int{4, 100} {
		t.Run(fmt.Sprint(spinners), func(t *testing.T) {
			server := testserver.Redis(t)
			client, _ := redisAt(t, server.Addr)
			store := redisStore(t, client)
			key, protected := rand.Text(), new(resource)

			const ttl = time.Second
			holder := startChild(t, server.Addr, key, ttl, spinnersEnv+"="+strconv.Itoa(spinners), "GOMAXPROCS=1")
			first := holder.expect(t, "held")
			if !protected.write(first) {
				t.Fatal("the first write was refused")
			}
			tell := func() {
				_, err := io.WriteString(holder.in, "write\n")
				check(t, err)
			}
			var grant core.Grant
			tries := 0
			for end := time.Now().Add(5 * ttl); !grant.Acquired && time.Now().Before(end); time.Sleep(ttl / 10) {
				grant, _ = acquire(t, store, key, patience)
				if tries++; tries%5 == 0 {
					tell()
				}
			}
			fault := fmt.Sprintf("GOMAXPROCS=1 and %d spinning goroutines, ttl %v", spinners, ttl)
			const topology = "Redis, holder in a process of its own"
			if !grant.Acquired {
				tell()
				if token := holder.expect(t, "write"); !protected.write(token) {
					t.Error("the holder's write was refused, with no other holder about")
				}
				check(t, holder.in.Close())
				// It may lose the lease yet, after the last try.
				a := receive(t, "end", holder.answers)
				for a.word == "write" || a.word == "cancelled" {
					a = receive(t, "end", holder.answers)
				}
				outcome(t, topology, fault, fmt.Sprintf("the lease was kept through %d tries of a rival; Do returned %s", tries, a.word))
				return
			}
			if grant.Token <= first {
				t.Fatalf("the successor's token is %d, want more than %d", grant.Token, first)
			}
			if !protected.write(grant.Token) {
				t.Error("the successor's write was refused")
			}
			// It is told to write once more, and may have been about to before.
			// Its input stays open until it knows of the loss, for a callback
			// that is done before that returns as if nothing had happened.
			tell()
			refused, cancelled, end := 0, false, ""
			for end == "" {
				switch a := receive(t, "end", holder.answers); a.word {
				case "write":
					if protected.write(a.token) {
						t.Error("a late write was accepted")
					}
					refused++
				case "cancelled":
					cancelled = true
				default:
					end = cmp.Or(a.word, "nothing")
				}
				if cancelled && refused > 0 {
					_ = holder.in.Close()
				}
			}
			if end != "lost" {
				t.Errorf("Do returned %s, want lost", end)
			}
			outcome(t, topology, fault, fmt.Sprintf(
				"the lease was lost; the successor's token is greater, %d late writes were refused; the context was cancelled and Do returned ErrLost", refused))
		})
	}
}
