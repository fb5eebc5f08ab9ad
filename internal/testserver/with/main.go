// Command with runs a command beside a server that it starts, or finds, for it,
// and names that server in $LEASEKIT_STORE as the leasekit command wants it.
//
//	go run ./internal/testserver/with redis sh -c 'leasekit init && leasekit torture'
//
// It exits with the command's exit code, and with 3 if there is no such server.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/leasekit/leasekit/internal/testserver"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: with redis|etcd|postgres|mongo COMMAND [ARGUMENT...]")
		os.Exit(2)
	}
	os.Exit(run(os.Args[1], os.Args[2:]))
}

func run(kind string, argv []string) int {
	server, err := testserver.Open(kind)
	if err != nil {
		fmt.Fprintln(os.Stderr, "with:", err)
		return 3
	}
	defer server.Close()
	url := server.URL
	if kind == "etcd" {
		url = "etcd://" + strings.TrimPrefix(url, "http://")
	}
	fmt.Fprintf(os.Stderr, "with: %s\n", server)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "LEASEKIT_STORE="+url)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "with:", err)
		return 1
	}
	return 0
}
