// Command summary prints what a run of tests had for servers: what it ran on,
// and what was skipped and how to get it. Its argument is the file that the run
// had in $LEASEKIT_TEST_SUMMARY.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/leasekit/leasekit/internal/testserver"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: summary FILE")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "summary:", err)
		os.Exit(1)
	}
}

func run(name string, w io.Writer) error {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		_, err := fmt.Fprintln(w, "no test asked for a server")
		return err
	}
	if err != nil {
		return err
	}
	defer f.Close()
	rows, err := read(f)
	if err != nil {
		return err
	}
	return render(w, rows)
}

// row sums up the records of one server, or of one kind that was missing.
type row struct {
	testserver.Record
	packages map[string]bool
}

// read sums up the records of all packages, by kind.
func read(r io.Reader) ([]*row, error) {
	var rows []*row
	scan := bufio.NewScanner(r)
	for scan.Scan() {
		var rec testserver.Record
		if err := json.Unmarshal(scan.Bytes(), &rec); err != nil {
			return nil, err
		}
		same := func(o *row) bool {
			return o.Kind == rec.Kind && o.Name == rec.Name && o.Version == rec.Version && o.From == rec.From
		}
		i := slices.IndexFunc(rows, same)
		if i < 0 {
			i = len(rows)
			rows = append(rows, &row{Record: testserver.Record{
				Kind: rec.Kind, Name: rec.Name, Version: rec.Version, From: rec.From, Hint: rec.Hint,
			}, packages: map[string]bool{}})
		}
		rows[i].Tests += rec.Tests
		rows[i].Skipped += rec.Skipped
		rows[i].packages[rec.Package] = true
	}
	slices.SortFunc(rows, func(a, b *row) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
	return rows, scan.Err()
}

func render(w io.Writer, rows []*row) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	section := func(title string, wanted func(*row) bool, line func(*row) string) {
		for _, r := range rows {
			if !wanted(r) {
				continue
			}
			if title != "" {
				fmt.Fprintln(table, title)
				title = ""
			}
			fmt.Fprintf(table, "  %s\t%s\n", r.Kind, line(r))
		}
	}
	section("Servers the tests ran on:", func(r *row) bool { return r.Tests > 0 }, func(r *row) string {
		note := ""
		if r.Kind == "mongo" && strings.HasPrefix(r.Name, "secantusd") {
			note = "; a stand-in for mongod"
		}
		return fmt.Sprintf("%s %s\t%s%s\t%s", r.Name, r.Version, r.From, note, count(len(r.packages), "package"))
	})
	section("Skipped, for want of a server:", func(r *row) bool { return r.Skipped > 0 }, func(r *row) string {
		return fmt.Sprintf("%s in %s\t%s", count(r.Skipped, "test"), count(len(r.packages), "package"), r.Hint)
	})
	return table.Flush()
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}
