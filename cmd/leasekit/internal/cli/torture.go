package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/leasekit/leasekit/cmd/leasekit/internal/storeurl"
	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/conformance/faults"
	"github.com/leasekit/leasekit/conformance/history"
	"github.com/leasekit/leasekit/core"
)

type tortureFlags struct {
	duration, ttl, slack time.Duration
	clients, keys        int
	seed                 uint64
	dir                  string
	noFaults             bool
}

func (a *app) tortureCommand() *cobra.Command {
	var f tortureFlags
	cmd := &cobra.Command{
		Use:   "torture",
		Short: "Try to break a store before you trust it",
		Long: fmt.Sprintf(`torture lets many clients fight for a few keys of the store, gives up some of
their calls, breaks the network of half of them again and again by a proxy in
this process, and checks that all answers together are those of a correct lock
(linearizability, by package porcupine). Point it at a staging system: it uses
random keys, which the store forgets after its retention, and nothing else.

If a rule is broken it names the rule and the call, writes a picture of the
history (HTML) and the history itself (JSON) into --dir, and exits with %d.

The network is broken where that can be done from here: the URL names one host,
without TLS. Faults of the server itself are yours to make meanwhile: restart it,
kill it, let it fail over.`, exitFailure),
		Example: `  leasekit torture --store redis://staging:6379 --for 60s
  leasekit torture --store etcd://127.0.0.1:2379 --ttl 4s
  leasekit torture --store memory: --for 5s`,
		Args: maxArgs(0, "torture takes no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return a.torture(cmd.Context(), f) },
	}
	flags := cmd.Flags()
	flags.DurationVar(&f.duration, "for", time.Minute, "how long")
	flags.DurationVar(&f.ttl, "ttl", 0, "shortest lease (default 400ms, etcd 2s)")
	flags.DurationVar(&f.slack, "slack", 0, "how late a lease may end (default 100ms, etcd 4s)")
	flags.IntVar(&f.clients, "clients", history.DefaultClients, "clients at once")
	flags.IntVar(&f.keys, "keys", history.DefaultKeys, "keys that they fight for at a time")
	flags.Uint64Var(&f.seed, "seed", 0, "seed of the clients' choices (default random)")
	flags.StringVar(&f.dir, "dir", "leasekit-torture", "`folder` for what is found")
	flags.BoolVar(&f.noFaults, "no-faults", false, "leave the network alone")
	return cmd
}

func (a *app) torture(ctx context.Context, f tortureFlags) error {
	switch {
	case f.duration <= 0:
		return usageError("--for %v: use a time such as 60s", f.duration)
	case f.slack < 0:
		return usageError("--slack %v: use 0 for the default, or more", f.slack)
	case f.clients < 2 || f.keys < 1:
		return usageError("--clients must be at least 2, --keys at least 1")
	}
	raw, err := a.url()
	if err != nil {
		return err
	}
	if strings.HasPrefix(raw, "etcd") {
		// etcd counts in seconds, and ends leases in a loop of its own.
		f.ttl, f.slack = orDefault(f.ttl, 2*time.Second), orDefault(f.slack, 4*time.Second)
	}
	plan := history.Plan{
		Seed: f.seed, Clients: f.clients, Keys: f.keys, TTL: f.ttl, For: f.duration,
		Check:    history.Options{Slack: f.slack},
		Progress: a.progress(f.duration),
	}
	ttl := orDefault(f.ttl, conformance.DefaultTTL)

	// The odd clients go through the proxy.
	broken := raw
	if proxied, target, ok := proxyable(raw); ok && !f.noFaults {
		proxy, err := faults.Listen(target)
		if err != nil {
			return &codeError{exitFailure, err}
		}
		defer proxy.Close()
		broken = proxied(proxy.Addr())
		var clients []int
		for i := 1; i < f.clients; i += 2 {
			clients = append(clients, i)
		}
		plan.Faults = history.NetworkFaults(proxy, ttl, clients...)
	} else if !f.noFaults {
		a.logger().Info("the network is left alone: the store is not one host without TLS")
	}

	stores, closeAll, err := a.openMany(f.clients, raw, broken)
	if err != nil {
		return err
	}
	defer closeAll()
	// A server that is away would only give unknown outcomes, all of them fine.
	if err := patiently(ctx, func(ctx context.Context) error {
		_, err := stores[0].Acquire(ctx, "leasekit/torture/probe", "probe", time.Millisecond)
		return err
	}); err != nil {
		return err
	}

	empty, err := makeFolder(f.dir)
	if err != nil {
		return usageError("--dir: %w", err)
	}
	defer empty()

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	report, err := history.Drive(ctx, func(client int) (core.LockStore, error) { return stores[client], nil }, plan)
	if err != nil {
		return usageError("%w", err)
	}
	if _, err := fmt.Fprintln(a.out, strings.TrimSpace(report.String())); err != nil {
		return &codeError{exitFailure, err}
	}
	if v := report.Violation; v != nil {
		html, data, err := v.WriteFiles(f.dir)
		if err != nil {
			return &codeError{exitFailure, errors.Join(v, err)}
		}
		return &codeError{exitFailure, fmt.Errorf("%w\npicture: %s\nhistory: %s", v, html, data)}
	}
	if n := len(report.Undecided); n > 0 {
		return &codeError{exitFailure, fmt.Errorf("%d histories were too tangled to be judged in time: try fewer --clients", n)}
	}
	return nil
}

// makeFolder sees to it, before minutes of work, that what is found has a place.
// It returns what removes the folder again if it is new, and nothing was found.
func makeFolder(dir string) (removeEmpty func(), err error) {
	_, err = os.Stat(dir)
	isNew := errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	probe, err := os.MkdirTemp(dir, "probe-")
	if err != nil {
		return nil, err
	}
	return func() {
		if isNew {
			_ = os.Remove(dir) // fails if it is not empty
		}
	}, os.Remove(probe)
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}
	return d
}

// openMany opens a store for each client, of url for the even ones and of
// broken for the odd ones. A store of this process alone is opened once.
func (a *app) openMany(n int, url, broken string) (stores []core.LockStore, closeAll func(), err error) {
	var closers []func()
	closeAll = func() {
		for _, c := range slices.Backward(closers) {
			c()
		}
	}
	for i := range n {
		if i > 0 && strings.HasPrefix(url, "memory:") {
			stores = append(stores, stores[0])
			continue
		}
		raw := url
		if i%2 == 1 {
			raw = broken
		}
		opened, err := storeurl.Open(raw, a.prefix)
		if err != nil {
			closeAll()
			return nil, nil, &codeError{exitUsage, err}
		}
		closers = append(closers, opened.Close)
		stores = append(stores, opened.Store)
	}
	return stores, closeAll, nil
}

// proxyable tells whether a proxy can stand in front of the store at raw, where
// its server is, and what the URL by way of the proxy is.
func proxyable(raw string) (proxied func(addr string) string, target string, ok bool) {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || strings.Contains(u.Host, ",") {
		return nil, "", false
	}
	ports := map[string]string{"redis": "6379", "etcd": "2379", "postgres": "5432", "postgresql": "5432", "mongodb": "27017"}
	port, ok := ports[u.Scheme] // the others are TLS, or find their servers by themselves
	query := u.Query()
	switch {
	case !ok, query.Get("tls") == "true", query.Get("ssl") == "true", query.Has("ca"), query.Has("cert"):
		return nil, "", false
	case strings.HasPrefix(u.Scheme, "postgres") && query.Get("sslmode") != "disable":
		return nil, "", false
	case u.Scheme == "mongodb":
		query.Set("directConnection", "true") // or the driver goes to where the server says it is
		u.RawQuery = query.Encode()
		if u.Path == "" {
			u.Path = "/"
		}
	}
	if u.Port() != "" {
		port = u.Port()
	}
	return func(addr string) string {
		by := *u
		by.Host = addr
		return by.String()
	}, net.JoinHostPort(u.Hostname(), port), true
}

// progress prints how far it is: on a terminal in one line that changes, else a
// line now and then.
func (a *app) progress(total time.Duration) func(history.Report) {
	const seldom = 10 * time.Second
	terminal := false
	if f, ok := a.errOut.(interface{ Fd() uintptr }); ok {
		terminal = term.IsTerminal(int(f.Fd()))
	}
	var last time.Duration
	return func(r history.Report) {
		faults := 0
		for _, n := range r.Faults {
			faults += n
		}
		line := fmt.Sprintf("%3.0f s of %.0f: %d calls (%.0f a second, %d unknown), %d histories checked, %d faults",
			r.Elapsed.Seconds(), total.Seconds(), r.Calls, float64(r.Calls)/max(r.Elapsed.Seconds(), 0.001), r.Unknown, r.Keys, faults)
		switch {
		case terminal && r.Elapsed < total:
			fmt.Fprintf(a.errOut, "\r%s\x1b[K", line)
		case terminal:
			fmt.Fprintf(a.errOut, "\r%s\x1b[K\n", line)
		case r.Elapsed-last >= seldom:
			last = r.Elapsed
			fmt.Fprintln(a.errOut, line)
		}
	}
}
