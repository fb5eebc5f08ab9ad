package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/leasekit/leasekit/core"
)

func (a *app) listCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list [PREFIX]",
		Short: "List live leases",
		Long: `list shows the live leases of the store, or of the keys that begin with PREFIX:
key, holder's label, fencing token, and how long the lease lives unless it is
renewed. It reads on as it prints, a million leases do not have to fit in memory,
and it changes nothing.`,
		Example: `  leasekit list
  leasekit list --json nightly- | jq -r .key`,
		Args: maxArgs(1, "list takes one prefix"),
		RunE: func(cmd *cobra.Command, args []string) error {
			q := core.LeaseQuery{}
			if len(args) == 1 {
				q.Prefix = args[0]
			}
			_, err := a.show(cmd.Context(), q, asJSON)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object a line")
	return cmd
}

func (a *app) showCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "show KEY",
		Short:   "Show who holds a key",
		Long:    fmt.Sprintf("show prints the live lease on KEY. If nobody holds it, it says so and exits with %d.", exitFailure),
		Example: `  leasekit show nightly-report`,
		Args:    exactArgs(1, "show needs one key"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := core.CheckKey(args[0]); err != nil { // "" would be every key
				return usageError("%w", err)
			}
			n, err := a.show(cmd.Context(), core.LeaseQuery{Key: args[0]}, asJSON)
			if err == nil && n == 0 {
				return &codeError{exitFailure, fmt.Errorf("nobody holds %q", args[0])}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func (a *app) breakCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "break KEY",
		Short: "End a lease whoever holds it",
		Long: fmt.Sprintf(`break ends the live lease on KEY and says whose it was. The key is free then; its
token goes on growing. The holder learns of it at its next renewal, by a third of
its ttl: until then it works on, and only the fencing token keeps its writes out.

On a terminal it asks first. If nobody holds the key it says so and exits with
%d.`, exitFailure),
		Example: `  leasekit break nightly-report`,
		Args:    exactArgs(1, "break needs one key"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.breakLease(cmd.Context(), args[0], yes, cmd.InOrStdin())
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

func maxArgs(n int, text string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > n {
			return usageError("%s, not %d", text, len(args))
		}
		return nil
	}
}

func exactArgs(n int, text string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return usageError("%s, not %d", text, len(args))
		}
		return nil
	}
}

// inspector opens the store as something that can show its leases.
func (a *app) inspector() (core.Inspector, func(), error) {
	opened, err := a.open()
	if err != nil {
		return nil, nil, err
	}
	inspector, ok := core.Capability[core.Inspector](opened.Store)
	if !ok {
		opened.Close()
		return nil, nil, usageError("this store cannot show its leases")
	}
	return inspector, opened.Close, nil
}

// show prints the leases of q and returns how many there were.
func (a *app) show(ctx context.Context, q core.LeaseQuery, asJSON bool) (n int, err error) {
	if err := q.Check(); err != nil {
		return 0, usageError("%w", err)
	}
	inspector, closeStore, err := a.inspector()
	if err != nil {
		return 0, err
	}
	defer closeStore()
	out := bufio.NewWriter(a.out)
	show, finish := tablePrinter(out, width(a.out))
	if asJSON {
		show, finish = jsonPrinter(out)
	}
	// A list may be long; it is the silence of the store that is bounded.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(patience, func() { cancel(errSilent) })
	defer silence.Stop()
	for info, err := range inspector.Leases(ctx, q) {
		silence.Stop()
		if err != nil {
			_ = out.Flush()
			return n, storeError(because(ctx, err))
		}
		n++
		if err := show(info); err != nil {
			return n, &codeError{exitFailure, err}
		}
		silence.Reset(patience)
	}
	if err := finish(); err != nil {
		return n, &codeError{exitFailure, err}
	}
	if err := out.Flush(); err != nil {
		return n, &codeError{exitFailure, err}
	}
	return n, nil
}

// patience is how long the commands of an operator wait for a store that says
// nothing.
const patience = 10 * time.Second

var errSilent = fmt.Errorf("no answer in %v", patience)

// patiently calls f, which asks the store, and returns its error as one of the
// store.
func patiently(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errSilent)
	defer cancel()
	if err := f(ctx); err != nil {
		return storeError(because(ctx, err))
	}
	return nil
}

// because returns err, and if that comes of the end of ctx, why it has ended.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// line is a lease as --json prints it.
type line struct {
	Key    string `json:"key"`
	Label  string `json:"label"`
	Token  int64  `json:"token"`
	LeftMS int64  `json:"left_ms"`
}

func jsonPrinter(w io.Writer) (show func(core.LeaseInfo) error, finish func() error) {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return func(l core.LeaseInfo) error {
		return encoder.Encode(line{l.Key, l.Label, l.Token, l.Left.Milliseconds()})
	}, func() error { return nil }
}

// tableRows is how many rows are lined up with each other: a table of a
// million rows is printed as it comes.
const tableRows = 1000

// tablePrinter prints a table that is no wider than columns; 0: as wide as it
// gets.
func tablePrinter(w io.Writer, columns int) (show func(core.LeaseInfo) error, finish func() error) {
	const numbers = len("1790000000000000") + len("999h59m59s") + 4*2
	text := 0 // widest key or label
	if columns > 0 {
		text = max((columns-numbers)/2, 12)
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	rows := 0
	return func(l core.LeaseInfo) error {
		if rows == 0 {
			fmt.Fprintln(table, "KEY\tHOLDER\tTOKEN\tLEFT")
		}
		if rows++; rows%tableRows == 0 {
			if err := table.Flush(); err != nil {
				return err
			}
		}
		label := l.Label
		if label == "" {
			label = "-"
		}
		_, err := fmt.Fprintf(table, "%s\t%s\t%d\t%v\n", clip(l.Key, text), clip(label, text), l.Token, l.Left.Round(100*time.Millisecond))
		return err
	}, table.Flush
}

// clip makes s printable, and at most n characters long if n > 0.
func clip(s string, n int) string {
	if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		s = fmt.Sprintf("%q", s) // a newline or an escape sequence must not draw on the terminal
	}
	if n > 0 && utf8.RuneCountInString(s) > n {
		s = string([]rune(s)[:n-1]) + "…"
	}
	return s
}

// width returns how wide the terminal is, 0 if w is none.
func width(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if columns, _, err := term.GetSize(int(f.Fd())); err == nil {
			return columns
		}
	}
	return 0
}

func (a *app) breakLease(ctx context.Context, key string, yes bool, in io.Reader) error {
	if err := core.CheckKey(key); err != nil {
		return usageError("%w", err)
	}
	terminal := false
	if f, ok := in.(*os.File); ok {
		terminal = term.IsTerminal(int(f.Fd()))
	}
	if !yes && !terminal {
		return usageError("break ends somebody's lease: give --yes where nobody can be asked")
	}
	opened, err := a.open()
	if err != nil {
		return err
	}
	defer opened.Close()
	breaker, ok := core.Capability[core.Breaker](opened.Store)
	if !ok {
		return usageError("this store cannot break leases")
	}
	if !yes {
		if sure, err := a.ask(ctx, opened.Store, key, in); err != nil || !sure {
			return err
		}
	}
	var was core.LeaseInfo
	var broken bool
	err = patiently(ctx, func(ctx context.Context) (err error) {
		was, broken, err = breaker.Break(ctx, key)
		return err
	})
	switch {
	case err != nil:
		return err
	case !broken:
		return &codeError{exitFailure, fmt.Errorf("nobody holds %q", key)}
	}
	_, err = fmt.Fprintf(a.out, "broke the lease on %s of %s, token %d, which had %v left\n", clip(key, 0), holder(was), was.Token, was.Left.Round(100*time.Millisecond))
	if err != nil {
		return &codeError{exitFailure, err}
	}
	return nil
}

func holder(l core.LeaseInfo) string {
	if l.Label == "" {
		return "a holder without a label"
	}
	return clip(l.Label, 0)
}

// ask shows the lease and asks whether to break it.
func (a *app) ask(ctx context.Context, store core.LockStore, key string, in io.Reader) (bool, error) {
	question := fmt.Sprintf("Break the lease on %s?", clip(key, 0))
	if inspector, ok := core.Capability[core.Inspector](store); ok {
		found := false
		if err := patiently(ctx, func(ctx context.Context) error {
			for l, err := range inspector.Leases(ctx, core.LeaseQuery{Key: key}) {
				if err != nil {
					return err
				}
				found = true
				question = fmt.Sprintf("%s is held by %s, token %d, for %v more unless renewed. Break it?", clip(key, 0), holder(l), l.Token, l.Left.Round(100*time.Millisecond))
			}
			return nil
		}); err != nil {
			return false, err
		}
		if !found {
			return false, &codeError{exitFailure, fmt.Errorf("nobody holds %q", key)}
		}
	}
	fmt.Fprintf(a.errOut, "%s [y/N] ", question)
	answer, _ := bufio.NewReader(in).ReadString('\n')
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return true, nil
	}
	return false, &codeError{exitFailure, fmt.Errorf("left as it is")}
}
