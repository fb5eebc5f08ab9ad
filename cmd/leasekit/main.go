// Command leasekit runs any command under a lease, and shows who holds what.
//
//	leasekit run --store redis://localhost nightly-report -- /usr/local/bin/report
//
// See leasekit help, or the page that leasekit man writes.
package main

import (
	"os"

	"github.com/leasekit/leasekit/cmd/leasekit/internal/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:])) }
