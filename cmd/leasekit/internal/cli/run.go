package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/leasekit/leasekit/cmd/leasekit/internal/child"
	"github.com/leasekit/leasekit/core"
)

// releasePatience is how long a command that has ended waits for the release
// of its lease.
const releasePatience = time.Second

type runFlags struct {
	ttl, grace, minHold, maxHold time.Duration
	wait, label, onLoss          string
	conflictCode                 int
	conflictOK                   bool
}

func (a *app) runCommand() *cobra.Command {
	var f runFlags
	var codes strings.Builder
	for _, c := range exitCodes {
		fmt.Fprintf(&codes, "  %3d  %s\n", c.code, c.when)
	}
	host, _ := os.Hostname()
	cmd := &cobra.Command{
		Use:   "run [flags] KEY -- COMMAND [ARGUMENT...]",
		Short: "Run a command while holding a lease",
		Long: `run takes a lease on KEY, runs COMMAND, renews the lease while that runs, and
releases it when it has ended. Without the lease COMMAND is never started.

COMMAND finds LEASEKIT_KEY and LEASEKIT_TOKEN in its environment. The token is a
number that grows with every acquisition of the key: hand it to the resource that
the key protects, and let that refuse a lower one than it has seen.

COMMAND has the standard streams and the terminal of leasekit, and a process
group of its own. Signals are passed on to the group, Ctrl-Z stops both. When the
lease is lost the group gets SIGTERM, and whatever is left of it after the grace
period SIGKILL. On Linux COMMAND dies with leasekit, even if that is killed by
SIGKILL; processes that COMMAND has started may live on then.

The lease ends with COMMAND. What COMMAND leaves running in the background is
not protected by it.

Exit codes:

` + codes.String() + `       else the command's own`,
		Example: `  # on every machine's crontab; runs on one of them
  0 3 * * *  leasekit run --conflict-ok --min-hold 10m nightly-report -- /usr/local/bin/report

  # wait for a running deploy, at most 5 minutes
  leasekit run --wait 5m migrate-db -- ./migrate up

  # hand on the fencing token
  leasekit run account-42 -- sh -c 'psql -v fence="$LEASEKIT_TOKEN" -f update.sql'`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usageError("run needs a key and a command: leasekit run KEY -- COMMAND")
			case len(args) == 1:
				return usageError("run needs a command: leasekit run %s -- COMMAND", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[1] == "--" { // pflag stops at KEY, so the dashes are still there
				args = append(args[:1], args[2:]...)
			}
			if len(args) < 2 {
				return usageError("run needs a command: leasekit run %s -- COMMAND", args[0])
			}
			return a.run(cmd.Context(), &f, args[0], args[1:])
		},
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows the command is the command's
	flags.DurationVar(&f.ttl, "ttl", core.DefaultTTL, "length of the lease; it is renewed by a third of that")
	flags.StringVar(&f.wait, "wait", "0", "how long to wait for a held key: 0, a `duration`, or forever")
	flags.StringVar(&f.label, "label", host+":"+strconv.Itoa(os.Getpid()), "who holds the key, for list and show")
	flags.Lookup("label").DefValue = "host:pid"
	flags.DurationVar(&f.grace, "grace", 10*time.Second, "time from SIGTERM to SIGKILL after a loss")
	flags.StringVar(&f.onLoss, "on-loss", "term", "what a loss does to the command: term or warn")
	flags.DurationVar(&f.minHold, "min-hold", 0, "keep the key at least that long, also when the command ends earlier")
	flags.DurationVar(&f.maxHold, "max-hold", 0, "the lease counts as lost after that long; 0: never")
	flags.IntVar(&f.conflictCode, "conflict-exit-code", exitHeld, "exit code when somebody else holds the key")
	flags.BoolVar(&f.conflictOK, "conflict-ok", false, "exit 0, and say nothing, when somebody else holds the key")
	flags.BoolVarP(&a.quiet, "quiet", "q", false, "say only what went wrong")
	flags.BoolVar(&a.jsonLogs, "json", false, "log one JSON object a line")
	_ = cmd.RegisterFlagCompletionFunc("on-loss", cobra.FixedCompletions([]string{"term", "warn"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (f *runFlags) options(log *slog.Logger) (core.Options, error) {
	o := core.Options{TTL: f.ttl, Label: f.label, MinHold: f.minHold, MaxHold: f.maxHold, Logger: log}
	switch {
	case f.onLoss != "term" && f.onLoss != "warn":
		return o, usageError("--on-loss %q: use term or warn", f.onLoss)
	case f.ttl == 0:
		return o, usageError("--ttl 0: use at least 1ms")
	case f.grace < 0:
		return o, usageError("--grace %v: use 0 or more", f.grace)
	case f.conflictCode < 0 || f.conflictCode > 255:
		return o, usageError("--conflict-exit-code %d: use 0 to 255", f.conflictCode)
	case f.wait == "forever":
		o.Wait = core.WaitForever
	case f.wait != "0":
		wait, err := time.ParseDuration(f.wait)
		if err != nil || wait < 0 {
			return o, usageError("--wait %q: use 0, a duration such as 90s, or forever", f.wait)
		}
		o.Wait = wait
	}
	return o, nil
}

func (a *app) run(ctx context.Context, f *runFlags, key string, argv []string) error {
	log := a.logger()
	o, err := f.options(log)
	if err != nil {
		return err
	}
	path, code, err := child.Find(argv[0])
	if err != nil {
		return &codeError{code, err}
	}
	opened, err := a.open()
	if err != nil {
		return err
	}
	store := &tries{LockStore: opened.Store}
	strategy, err := core.NewStrategy(store, o)
	if err != nil {
		return usageError("%w", err)
	}

	signals := make(chan os.Signal, 16)
	for _, sig := range passedOn {
		if !signal.Ignored(sig) { // nohup; a background job of a script
			signal.Notify(signals, sig)
		}
	}
	lease, err := a.acquire(ctx, strategy, store, key, signals)
	switch {
	case core.IsRejection(err) && f.conflictOK:
		return nil
	case core.IsRejection(err):
		return &codeError{f.conflictCode, err}
	case err != nil:
		return err
	}
	log.Info("acquired", slog.String("key", key), slog.Int64("token", lease.Token()))

	code, err = a.supervise(f, lease, path, argv, signals)
	a.release(lease, opened.Close)
	if code != 0 || err != nil {
		return &codeError{code, err}
	}
	return nil
}

// tries is a store whose Acquire can be stopped, without one whose answer nobody
// hears any more: that could leave the key locked for its ttl.
type tries struct {
	core.LockStore

	mu      sync.Mutex
	stopped bool
	running sync.WaitGroup
}

// Unwrap keeps the optional capabilities of the store.
func (t *tries) Unwrap() core.LockStore { return t.LockStore }

func (t *tries) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	t.mu.Lock()
	if t.stopped {
		t.mu.Unlock()
		return core.Grant{}, context.Canceled
	}
	t.running.Add(1)
	t.mu.Unlock()
	defer t.running.Done()
	return t.LockStore.Acquire(ctx, key, owner, ttl)
}

// stop lets no further try begin, and waits for the present one.
func (t *tries) stop(bound time.Duration) {
	t.mu.Lock()
	t.stopped = true
	t.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		t.running.Wait()
	}()
	select {
	case <-done:
	case <-time.After(bound):
	}
}

// acquire takes the lease; a signal ends the waiting.
func (a *app) acquire(ctx context.Context, strategy *core.Strategy, store *tries, key string, signals <-chan os.Signal) (*core.Lease, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		lease *core.Lease
		err   error
	}
	results := make(chan result, 1)
	go func() {
		lease, err := strategy.Acquire(ctx, key)
		results <- result{lease, err}
	}()
	for {
		select {
		case r := <-results:
			switch {
			case r.err == nil || core.IsRejection(r.err):
				return r.lease, r.err
			case errors.Is(r.err, core.ErrInvalid):
				return nil, usageError("%w", r.err)
			default:
				return nil, storeError(r.err)
			}
		case sig := <-signals:
			number, ends := sig.(syscall.Signal)
			if !ends || !endsWaiting(number) {
				continue
			}
			store.stop(releasePatience)
			cancel()
			if r := <-results; r.err == nil {
				a.release(r.lease, func() {}) // granted in the same instant
			}
			return nil, &codeError{child.ExitSignalBase + int(number), fmt.Errorf("%v while waiting for key %q", sig, key)}
		}
	}
}

// environment is that of this process with the key and the token of lease.
func environment(lease *core.Lease) []string {
	const key, token = "LEASEKIT_KEY=", "LEASEKIT_TOKEN="
	// Of a variable that is there twice, of an outer leasekit, the command would
	// see the one or the other.
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, key) || strings.HasPrefix(v, token)
	})
	return append(env, key+lease.Key(), token+strconv.FormatInt(lease.Token(), 10))
}

// supervise runs the command, and returns its exit code, or another one and
// why.
func (a *app) supervise(f *runFlags, lease *core.Lease, path string, argv []string, signals <-chan os.Signal) (int, error) {
	if err := lease.Err(); err != nil {
		return exitLost, err
	}
	command, err := child.Start(path, argv, environment(lease))
	if err != nil {
		return child.ExitNotExecutable, err
	}
	lost := lease.Done()
	var kill <-chan time.Time
	var loss error
	for {
		select {
		case <-command.Done():
			if loss == nil {
				return command.ExitCode(), nil
			}
			if kill != nil {
				command.EndGroup(kill) // what it has started may live on
			}
			return exitLost, loss
		case sig := <-signals:
			if number, ok := sig.(syscall.Signal); ok {
				command.Signal(number)
			}
		case <-lost:
			lost = nil
			if f.onLoss == "warn" {
				a.logger().Warn("the command goes on without its lease (--on-loss warn)")
				continue
			}
			loss = lease.Err()
			command.Signal(syscall.SIGTERM)
			kill = time.After(f.grace)
		case <-kill:
			a.logger().Warn("the command did not end, killing it", slog.Duration("grace", f.grace))
			command.Signal(syscall.SIGKILL)
			kill = nil
		}
	}
}

// release ends the lease; a store that is slow delays the exit for a second.
func (a *app) release(lease *core.Lease, closeStore func()) {
	released := make(chan struct{})
	go func() {
		defer close(released)
		_ = lease.Release() // the strategy has logged what went wrong
		closeStore()
	}()
	select {
	case <-released:
	case <-time.After(releasePatience):
		a.logger().Warn("the store is slow: the key may stay locked until its ttl is over", slog.String("key", lease.Key()))
	}
}
