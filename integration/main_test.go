package integration

import (
	"os"
	"testing"

	"github.com/leasekit/leasekit/internal/testserver"
)

func TestMain(m *testing.M) {
	// The test binary is also the program that holds a lease in a process of
	// its own.
	if addr := os.Getenv(childEnv); addr != "" {
		os.Exit(child(addr))
	}
	testserver.Main(m)
}
