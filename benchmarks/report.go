package main

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"
)

// Report is everything that a run found out.
type Report struct {
	Environment Environment `json:"environment"`
	Settings    struct {
		DurationNS int64 `json:"duration_ns"`
		Clients    int   `json:"clients"`
		Keys       int   `json:"keys"`
		Holds      int   `json:"holds"`
		TTLNS      int64 `json:"ttl_ns"`
	} `json:"settings"`
	Results []Result `json:"results"`
}

func (r *Report) writeJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(r)
}

// duration prints nanoseconds with three digits: 1.23ms.
func duration(ns int64) string {
	d := time.Duration(ns)
	switch {
	case d == 0:
		return "-" // nothing was measured
	case d >= 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d >= time.Second:
		return d.Round(10 * time.Millisecond).String()
	case d >= 100*time.Millisecond:
		return d.Round(time.Millisecond).String()
	case d >= 10*time.Millisecond:
		return d.Round(100 * time.Microsecond).String()
	case d >= time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	case d >= 100*time.Microsecond:
		return d.Round(time.Microsecond).String()
	case d >= 10*time.Microsecond:
		return d.Round(100 * time.Nanosecond).String()
	case d >= time.Microsecond:
		return d.Round(10 * time.Nanosecond).String()
	default:
		return d.String()
	}
}

func ratio(r float64) string {
	if r == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2fx", r)
}

// writeTable prints a table of at most 100 columns.
func (r *Report) writeTable(w io.Writer) error {
	var b strings.Builder
	for _, name := range storeNames {
		server, ok := r.Environment.Servers[name]
		if !ok {
			continue
		}
		fmt.Fprintf(&b, "\n%s: %s\n", name, server)
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "workload\tn\timpl\tp50\tp99\tmax\tops/s\tx floor\t")
		last := ""
		for _, x := range r.Results {
			if x.Store != name {
				continue
			}
			group := fmt.Sprint(x.Workload, x.Contenders)
			workload, n := x.Workload, fmt.Sprint(x.Contenders)
			if group == last {
				workload, n = "", ""
			}
			last = group
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%.0f\t%s\t\n", workload, n, x.Impl,
				duration(x.P50), duration(x.P99), duration(x.Max), x.OpsPerSecond, ratio(x.RatioToFloor))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		for _, x := range r.Results {
			if x.Store == name && x.Error != "" {
				fmt.Fprintf(&b, "  %s, %s %d: gave up: %s\n", x.Impl, x.Workload, x.Contenders, x.Error)
			}
			if x.Store == name && x.Workload == workHolds {
				fmt.Fprintf(&b, "  holds: %d leases renewed for %v, %d lost, %.2f goroutines and %.0f bytes of heap each\n",
					x.Contenders, time.Duration(r.Settings.TTLNS/3).Round(time.Second), x.Lost, x.GoroutinesPerOp, x.HeapPerOp)
			}
			if x.Store == name && x.Workload == workCycle && x.Contenders == 1 && x.Impl == implOurs {
				fmt.Fprintf(&b, "  one lock: %.0f allocations", x.Allocs)
				if x.Bytes > 0 {
					fmt.Fprintf(&b, ", %.0f bytes on the wire", x.Bytes)
				}
				if x.ServerOps > 0 {
					fmt.Fprintf(&b, ", %.1f operations of the server (scripts count what they call)", x.ServerOps)
				}
				b.WriteByte('\n')
			}
			if x.Store == name && x.Workload == workHandOver && x.Contenders > 2 && x.Impl == implOurs {
				fmt.Fprintf(&b, "  %d contenders: the unluckiest waited for %d hand-overs\n", x.Contenders, x.UnluckiestWait)
			}
		}
	}
	for _, name := range storeNames {
		if why, ok := r.Environment.LeftOut[name]; ok {
			fmt.Fprintf(&b, "\n%s: left out: %s\n", name, why)
		}
	}
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 100 {
			line = wrap(line, 100)
		}
		if _, err := io.WriteString(w, line); err != nil {
			return err
		}
	}
	return nil
}

// wrap breaks line at spaces.
func wrap(line string, columns int) string {
	var b strings.Builder
	n := 0
	for word := range strings.FieldsSeq(line) {
		if n > 0 && n+1+utf8.RuneCountInString(word) > columns {
			b.WriteString("\n    ")
			n = 4
		} else if n > 0 {
			b.WriteByte(' ')
			n++
		}
		b.WriteString(word)
		n += utf8.RuneCountInString(word)
	}
	b.WriteByte('\n')
	return b.String()
}

var (
	//go:embed assets/page.html.tmpl
	pageSource string
	//go:embed assets/page.css
	pageStyle string
	//go:embed assets/page.js
	pageScript string
	//go:embed assets/chart.umd.min.js
	chartScript string
)

// writeHTML writes one page that needs nothing else.
func (r *Report) writeHTML(w io.Writer) error {
	page, err := template.New("page").Funcs(template.FuncMap{
		"duration": duration,
		"ratio":    ratio,
		"results": func(r *Report, store string) []Result {
			return slices.DeleteFunc(slices.Clone(r.Results), func(x Result) bool { return x.Store != store })
		},
		"rate": func(f float64) string { return fmt.Sprintf("%.0f", f) },
	}).Parse(pageSource)
	if err != nil {
		return err
	}
	var stores []string
	for _, name := range storeNames {
		if slices.ContainsFunc(r.Results, func(x Result) bool { return x.Store == name }) {
			stores = append(stores, name)
		}
	}
	return page.Execute(w, map[string]any{
		"Report":      r,
		"Stores":      stores,
		"Percentiles": percentiles,
		"TTL":         time.Duration(r.Settings.TTLNS),
		"Duration":    time.Duration(r.Settings.DurationNS),
		"Style":       template.CSS(pageStyle),
		"Chart":       template.JS(chartScript),
		"Script":      template.JS(pageScript),
	})
}
