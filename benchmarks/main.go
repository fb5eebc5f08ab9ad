package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "benchmarks:", err)
		os.Exit(1)
	}
}

type flags struct {
	settings
	stores     []string
	json, html string
}

func parse(args []string, errOut io.Writer) (flags, error) {
	var f flags
	var stores string
	set := flag.NewFlagSet("benchmarks", flag.ContinueOnError)
	set.SetOutput(errOut)
	set.StringVar(&stores, "stores", strings.Join(storeNames, ","), "`names` of the stores to measure")
	set.DurationVar(&f.duration, "duration", 3*time.Second, "time for each impl of each workload")
	set.IntVar(&f.clients, "clients", 16, "most clients at once")
	set.IntVar(&f.keys, "keys", 1000, "keys of the Zipf workload")
	set.IntVar(&f.holds, "holds", 10_000, "leases held at once")
	set.DurationVar(&f.ttl, "ttl", 30*time.Second, "length of a lease; whole seconds for etcd")
	set.StringVar(&f.json, "json", "", "`file` for all numbers as JSON; - for standard output instead of the table")
	set.StringVar(&f.html, "html", "", "`file` for a page with pictures")
	if err := set.Parse(args); err != nil {
		return f, err
	}
	f.stores = strings.Split(stores, ",")
	switch {
	case set.NArg() > 0:
		return f, fmt.Errorf("unexpected %q: everything is a flag, see -help", set.Arg(0))
	case f.duration <= 0, f.clients <= 0, f.keys < 2, f.holds <= 0:
		return f, errors.New("-duration, -clients and -holds must be more than 0, -keys more than 1")
	case f.ttl < time.Second:
		return f, errors.New("-ttl must be at least 1s: a lease must not run out while it is measured")
	}
	for i, name := range f.stores {
		if slices.Contains(f.stores[:i], name) {
			return f, fmt.Errorf("-stores: %s is there twice", name)
		}
		if !slices.Contains(storeNames, name) {
			return f, fmt.Errorf("-stores: no store is called %q: use %s", name, strings.Join(storeNames, ", "))
		}
	}
	return f, nil
}

func run(ctx context.Context, args []string, out, errOut io.Writer) error {
	f, err := parse(args, errOut)
	if err != nil {
		return err
	}
	// Before minutes of work, see that the results have a place.
	jsonFile, err := create(f.json)
	if err != nil {
		return err
	}
	defer jsonFile.Close() // a nil file minds nothing
	htmlFile, err := create(f.html)
	if err != nil {
		return err
	}
	defer htmlFile.Close()
	report := &Report{Environment: environment(args)}
	report.Settings.DurationNS, report.Settings.TTLNS = int64(f.duration), int64(f.ttl)
	report.Settings.Clients, report.Settings.Keys, report.Settings.Holds = f.clients, f.keys, f.holds

	bar := progress(errOut, len(f.stores)*len((&bench{settings: f.settings}).workloads()))
	for _, name := range f.stores {
		if err := measureStore(ctx, name, f.settings, report, bar); err != nil {
			return err
		}
	}
	bar.finish()

	if jsonFile != nil {
		if err := errors.Join(report.writeJSON(jsonFile), jsonFile.Close()); err != nil {
			return err
		}
	}
	if htmlFile != nil {
		if err := errors.Join(report.writeHTML(htmlFile), htmlFile.Close()); err != nil {
			return err
		}
	}
	if f.json == "-" {
		return report.writeJSON(out)
	}
	return report.writeTable(out)
}

// create opens a file for a result; nil for no file and for standard output.
func create(name string) (*os.File, error) {
	if name == "" || name == "-" {
		return nil, nil //nolint:nilnil // nothing to create
	}
	return os.Create(name)
}

// measureStore adds one store's results to report. A server that cannot be had
// leaves its store out; one that fails is an error.
func measureStore(ctx context.Context, name string, s settings, report *Report, bar *bar) error {
	bar.step(name+" starting", 0)
	b, err := openBackend(ctx, name, s)
	if err != nil {
		report.Environment.LeftOut[name] = err.Error()
		bar.step(name+" left out", len((&bench{settings: s}).workloads()))
		return ctx.Err()
	}
	defer b.close()
	report.Environment.Servers[name] = b.server
	x := &bench{settings: s, b: b, step: func(what string) { bar.step(what, 1) }}
	err = x.all(ctx)
	report.Results = append(report.Results, x.results...)
	return err
}

// bar shows how far a run is: on a terminal a moving bar, else nothing.
type bar struct{ p *progressbar.ProgressBar }

func progress(w io.Writer, steps int) *bar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return &bar{}
	}
	return &bar{progressbar.NewOptions(steps,
		progressbar.OptionSetWriter(w), progressbar.OptionSetWidth(30), progressbar.OptionShowCount(),
		progressbar.OptionSetPredictTime(true), progressbar.OptionClearOnFinish(),
	)}
}

func (b *bar) step(what string, n int) {
	if b.p != nil {
		b.p.Describe(fmt.Sprintf("%-26s", what))
		_ = b.p.Add(n)
	}
}

func (b *bar) finish() {
	if b.p != nil {
		_ = b.p.Finish()
	}
}
