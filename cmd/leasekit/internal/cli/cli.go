// Package cli is the command line of leasekit.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/leasekit/leasekit/cmd/leasekit/internal/child"
	"github.com/leasekit/leasekit/cmd/leasekit/internal/storeurl"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
)

// The exit codes of leasekit's own; run also exits with its command's.
const (
	exitOK      = 0
	exitFailure = 1  // anything else
	exitUsage   = 64 // EX_USAGE of sysexits(3)
	exitStore   = 69 // EX_UNAVAILABLE: the store failed
	exitHeld    = 75 // EX_TEMPFAIL: somebody else holds the key
	exitLost    = 76 // the lease was lost while the command ran
)

// codeError is an error with an exit code.
type codeError struct {
	code int
	err  error // nil: nothing to be said
}

func (e *codeError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *codeError) Unwrap() error { return e.err }

func usageError(format string, args ...any) error {
	return &codeError{exitUsage, fmt.Errorf(format, args...)}
}

func storeError(err error) error {
	// The stores speak to people who write Go.
	if errors.Is(err, pgstore.ErrNoTable) || errors.Is(err, mongostore.ErrNoIndex) {
		err = fmt.Errorf("%w: leasekit init does that", err)
	}
	return &codeError{exitStore, err}
}

// Main runs leasekit with args and returns its exit code.
func Main(args []string) int {
	a := &app{out: os.Stdout, errOut: os.Stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(a.out)
	root.SetErr(a.errOut)
	err := root.ExecuteContext(context.Background())
	if err == nil {
		return exitOK
	}
	var coded *codeError
	if !errors.As(err, &coded) {
		// What is left are cobra's own: unknown commands, flags, arguments.
		coded = &codeError{exitUsage, err}
	}
	if coded.err != nil {
		a.logger().Error(coded.Error())
		if coded.code == exitUsage {
			a.logger().Info("see leasekit help, or leasekit help COMMAND")
		}
	}
	return coded.code
}

// app is what the subcommands share.
type app struct {
	out, errOut io.Writer

	store, storeFile, prefix string
	jsonLogs, quiet          bool
	rawURL                   string // once known, for redaction
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "leasekit",
		Short: "Run a command under a lease; see who holds what",
		Long: `leasekit runs a command only while it holds a lease on a key, so that a job which
is started on many machines runs on one. It works with Redis, etcd, PostgreSQL
and MongoDB, and hands the command a fencing token.

The store is named by a URL:

  redis://user:password@host:6379/0    rediss:// for TLS
  redis+cluster://host:6379?addr=host2:6379
  redis+sentinel://host:26379?master_name=main
  etcd://user:password@host:2379,host2:2379    etcds:// for TLS; ?ca=FILE&cert=FILE&key=FILE
  postgres://user:password@host/database?sslmode=verify-full
  mongodb://user:password@host/database    mongodb+srv://

Give it in the environment, in LEASEKIT_STORE, or in a file: a password on a
command line is seen by every user of the machine.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError("unknown command %q: use run, list, show, break, init, torture, completion, man or version", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.store, "store", "", "`URL` of the store (default $LEASEKIT_STORE)")
	flags.StringVar(&a.storeFile, "store-file", "", "`FILE` with the URL of the store, for a password that must not be seen")
	flags.StringVar(&a.prefix, "prefix", "", "what the store puts in front of every key (default the store's own)")
	root.MarkFlagsMutuallyExclusive("store", "store-file")
	root.AddCommand(a.runCommand(), a.listCommand(), a.showCommand(), a.breakCommand(), a.initCommand(), a.tortureCommand(), versionCommand(), manCommand(root))
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" { // it would print help, and call that a success
			c.Args = cobra.ArbitraryArgs
			c.RunE = func(*cobra.Command, []string) error {
				return usageError("completion needs a shell: bash, zsh, fish or powershell")
			}
		}
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError("%w", err) })
	return root
}

// url returns the URL of the store that flags or environment name.
func (a *app) url() (string, error) {
	raw := a.store
	if a.storeFile != "" {
		content, err := os.ReadFile(a.storeFile)
		if err != nil {
			return "", usageError("--store-file: %w", err)
		}
		raw = strings.TrimSpace(string(content))
	}
	if raw == "" {
		raw = os.Getenv("LEASEKIT_STORE")
	}
	if raw == "" {
		return "", usageError("no store: set LEASEKIT_STORE, or use --store or --store-file")
	}
	a.rawURL = raw
	return raw, nil
}

// open opens the store that flags or environment name.
func (a *app) open() (*storeurl.Opened, error) {
	raw, err := a.url()
	if err != nil {
		return nil, err
	}
	opened, err := storeurl.Open(raw, a.prefix)
	if err != nil {
		return nil, &codeError{exitUsage, err}
	}
	return opened, nil
}

// logger writes to standard error: for people, or one JSON object a line. No
// password of the store's URL gets through.
func (a *app) logger() *slog.Logger {
	level := slog.LevelInfo
	if a.quiet {
		level = slog.LevelError
	}
	w := redactor{w: a.errOut, app: a}
	if a.jsonLogs {
		return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level}))
	}
	return slog.New(&lineHandler{w: w, level: level})
}

type redactor struct {
	w   io.Writer
	app *app
}

func (r redactor) Write(p []byte) (int, error) {
	if _, err := io.WriteString(r.w, storeurl.Redact(r.app.rawURL, string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// lineHandler prints "leasekit: message: error name=value".
type lineHandler struct {
	w     io.Writer
	level slog.Level
}

func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }
func (h *lineHandler) WithAttrs([]slog.Attr) slog.Handler           { return h }
func (h *lineHandler) WithGroup(string) slog.Handler                { return h }

func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString("leasekit: ")
	b.WriteString(strings.TrimPrefix(r.Message, "leasekit: "))
	r.Attrs(func(attr slog.Attr) bool {
		switch attr.Key {
		case "lock": // there is one lock only
		case "error":
			fmt.Fprintf(&b, ": %v", attr.Value)
		default:
			fmt.Fprintf(&b, " %s=%v", attr.Key, attr.Value)
		}
		return true
	})
	b.WriteByte('\n')
	_, err := io.WriteString(h.w, b.String())
	return err
}

var exitCodes = []struct {
	code int
	when string
}{
	{exitOK, "the command ended with 0; or the key was held elsewhere and --conflict-ok was given"},
	{exitUsage, "wrong usage; nothing was done"},
	{exitStore, "the store failed before the command was started"},
	{exitHeld, "somebody else holds the key, the command was not started (--conflict-exit-code changes it)"},
	{exitLost, "the lease was lost, and the command ended for it (--on-loss term)"},
	{child.ExitNotExecutable, "the command is not executable; no lease was asked for"},
	{child.ExitNotFound, "the command was not found; no lease was asked for"},
	{child.ExitSignalBase, "plus N: the command, or leasekit while it waited, was ended by signal N"},
}
