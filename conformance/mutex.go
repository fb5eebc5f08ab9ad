package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

// workerEnv is set for the child processes of MutualExclusionOfProcesses. Its
// value is a job in JSON.
const workerEnv = "LEASEKIT_CONFORMANCE_WORKER"

// job is what one process does: several goroutines add 1 to a counter in a
// file, under the lock.
type job struct {
	Test       string // that started the process
	Key        string
	Counter    string // path
	Result     string // path that the process writes when it is done
	Goroutines int
	Rounds     int
}

// increments is the number that the job adds to the counter.
func (j *job) increments() int { return j.Goroutines * j.Rounds }

// run does the job with the given clients. The lease is a long one: a machine
// that stands still must not look like a store that let two in.
func (j *job) run(ctx context.Context, clients []core.LockStore) error {
	errs := make([]error, j.Goroutines)
	var wg sync.WaitGroup
	for i := range j.Goroutines {
		wg.Go(func() {
			strategy, err := core.NewStrategy(clients[i%len(clients)], core.Options{TTL: time.Minute})
			for range j.Rounds {
				if err == nil {
					err = j.increment(ctx, strategy)
				}
			}
			errs[i] = err
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// increment reads the counter and writes it a moment later, under the lock.
func (j *job) increment(ctx context.Context, strategy *core.Strategy) error {
	for pause := 4 * time.Millisecond; ; pause = min(2*pause, 128*time.Millisecond) {
		ran, err := strategy.TryDo(ctx, j.Key, func(context.Context) error {
			n, err := j.read()
			if err != nil {
				return err
			}
			time.Sleep(rand.N(time.Millisecond)) // for somebody else to get in between
			return j.write(n + 1)
		})
		if ran || err != nil {
			return err
		}
		// Tried again sooner than a strategy that waits would: the more of
		// them meet, the better.
		select {
		case <-time.After(rand.N(pause)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// read returns the counter.
func (j *job) read() (int, error) {
	text, err := os.ReadFile(j.Counter)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// write writes it, always as many bytes and in place, so that nobody reads a
// part of it.
func (j *job) write(n int) (err error) {
	file, err := os.OpenFile(j.Counter, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	_, err = fmt.Fprintf(file, "%10d", n)
	return err
}

// newJob makes the counter.
func newJob(t *T, goroutines, rounds int) *job {
	j := &job{
		Key:        t.Key(),
		Counter:    filepath.Join(t.TempDir(), "counter"),
		Goroutines: goroutines,
		Rounds:     rounds,
	}
	if err := j.write(0); err != nil {
		t.Fatal(err)
	}
	return j
}

// mustCount compares the counter with what all the work has added.
func (j *job) mustCount(t *T, want int) {
	n, err := j.read()
	if err != nil {
		t.Fatal(err)
	}
	if n != want {
		t.Broken(fmt.Sprintf("the counter is at %d after %d increments", n, want), fmt.Sprint(want))
	}
}

func checkMutualExclusion(t *T) {
	j := newJob(t, 8, 20)
	if err := j.run(t.Context(), openSome(t, 2)); err != nil {
		t.stopIfLate()
		t.Broken(fmt.Sprintf("the error %v", err), "increments")
	}
	j.mustCount(t, j.increments())
}

func checkMutualExclusionOfProcesses(t *T) {
	const processes = 3
	j := newJob(t, 3, 15)
	env := t.Config.Env(t.rec)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The child runs the test that called Run, and no other.
	j.Test = strings.TrimSuffix(t.Name(), "/"+t.rule.Group+"/"+t.rule.Name)
	var pattern []string
	for part := range strings.SplitSeq(j.Test, "/") {
		pattern = append(pattern, "^"+regexp.QuoteMeta(part)+"$")
	}
	clients := openSome(t, 1)

	t.Go(processes+1, func(i int) {
		if i == processes { // this process takes part as well
			if err := j.run(t.Context(), clients); err != nil {
				t.Fatal(err)
			}
			return
		}
		mine := *j
		mine.Result = j.Counter + ".done." + strconv.Itoa(i)
		spec, err := json.Marshal(mine)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), exe, "-test.run="+strings.Join(pattern, "/"), "-test.v", "-test.count=1", "-test.timeout=2m")
		cmd.Env = append(append(os.Environ(), env...), workerEnv+"="+string(spec))
		output, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("child process: %v\n%s", err, output)
		}
		// A child that skipped the test, or ran another, is no contender.
		if _, err := os.Stat(mine.Result); err != nil {
			t.Fatalf("a child process ended and had not called conformance.Run in the same test, %s\n%s", j.Test, output)
		}
	})
	j.mustCount(t, (processes+1)*j.increments())
}

// isWorker reports whether this process was started to do a job, in which case
// [Run] does nothing else.
func isWorker() bool { return os.Getenv(workerEnv) != "" }

func runWorker(t *testing.T, c *Config) {
	var j job
	if err := json.Unmarshal([]byte(os.Getenv(workerEnv)), &j); err != nil {
		t.Fatalf("%s: %v", workerEnv, err)
	}
	if t.Name() != j.Test {
		return // one more call of Run in a test that the pattern selects too
	}
	if err := j.run(t.Context(), []core.LockStore{c.Open(t)}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(j.Result, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}
