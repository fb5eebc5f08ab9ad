package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

var discard = slog.New(slog.DiscardHandler)

// Environment is what the numbers depend on.
type Environment struct {
	Date    string            `json:"date"`
	Command string            `json:"command"`
	Go      string            `json:"go"`
	System  string            `json:"system"`
	CPU     string            `json:"cpu"`
	Cores   int               `json:"cores"`
	FsyncNS int64             `json:"fsync_p50_ns"`
	Servers map[string]string `json:"servers"`
	LeftOut map[string]string `json:"left_out,omitempty"`
}

func environment(args []string) Environment {
	return Environment{
		Date:    time.Now().UTC().Format(time.DateTime + " UTC"),
		Command: strings.Join(append([]string{"go run ./benchmarks"}, args...), " "),
		Go:      runtime.Version(),
		System:  runtime.GOOS + "/" + runtime.GOARCH + kernel(),
		CPU:     cpu(),
		Cores:   runtime.NumCPU(),
		FsyncNS: fsync().Nanoseconds(),
		Servers: map[string]string{},
		LeftOut: map[string]string{},
	}
}

func kernel() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return ""
	}
	return ", Linux " + strings.TrimSpace(string(b))
}

func cpu() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

// fsync is the median time of a small synced write in the temporary folder,
// where the servers that are started here keep their data. 0: not known.
func fsync() time.Duration {
	f, err := os.CreateTemp("", "leasekit-fsync-")
	if err != nil {
		return 0
	}
	defer os.Remove(f.Name())
	defer f.Close()
	page := make([]byte, 4096)
	var times []time.Duration
	for range 50 {
		start := time.Now()
		if _, err := f.Write(page); err != nil {
			return 0
		}
		if err := f.Sync(); err != nil {
			return 0
		}
		times = append(times, time.Since(start))
	}
	slices.Sort(times)
	return times[len(times)/2]
}

// scrape sums the values of all metrics at url that begin with one of the
// prefixes.
func scrape(ctx context.Context, url string, prefixes ...string) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: %s", url, resp.Status)
	}
	var sum float64
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		line := lines.Text()
		if !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(line, p) }) {
			continue
		}
		value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %q: %w", url, line, err)
		}
		sum += value
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return int64(sum), lines.Err()
}
