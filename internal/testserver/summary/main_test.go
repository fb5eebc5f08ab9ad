package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	const records = `
{"package":"m/b","kind":"redis","name":"redis-server","version":"7.0.15","from":"PATH","addr":"127.0.0.1:1","tests":3}
{"package":"m/a","kind":"etcd","skipped":2,"hint":"run x"}
{"package":"m/a","kind":"redis","name":"redis-server","version":"7.0.15","from":"PATH","addr":"127.0.0.1:2","tests":1}
{"package":"m/b","kind":"etcd","skipped":1,"hint":"run x"}
{"package":"m/c","kind":"mongo","name":"secantusd-rs","version":"0.5","from":"tool cache","tests":1}
{"package":"m/c","kind":"redis","name":"redis","version":"8.0","from":"$LEASEKIT_TEST_REDIS","tests":1}
`
	const want = `
Servers the tests ran on:
  mongo  secantusd-rs 0.5     tool cache; a stand-in for mongod  1 package
  redis  redis 8.0            $LEASEKIT_TEST_REDIS               1 package
  redis  redis-server 7.0.15  PATH                               2 packages
Skipped, for want of a server:
  etcd  3 tests in 2 packages  run x
`
	name := filepath.Join(t.TempDir(), "summary")
	if err := os.WriteFile(name, []byte(strings.TrimPrefix(records, "\n")), 0o644); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	if err := run(name, &got); err != nil {
		t.Fatal(err)
	}
	if got.String() != strings.TrimPrefix(want, "\n") {
		t.Errorf("got:\n%s\nwant:%s", &got, want)
	}
}

func TestSummaryOfNothing(t *testing.T) {
	var got strings.Builder
	if err := run(filepath.Join(t.TempDir(), "none"), &got); err != nil || !strings.Contains(got.String(), "no test") {
		t.Errorf("without a file: %q, %v", &got, err)
	}
}

func TestSummaryRefusesGarbage(t *testing.T) {
	name := filepath.Join(t.TempDir(), "summary")
	if err := os.WriteFile(name, []byte("{\"kind\":"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := run(name, new(strings.Builder)); err == nil {
		t.Error("a broken file is no error")
	}
}
