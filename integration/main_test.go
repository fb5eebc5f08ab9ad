package integration

import (
	"testing"

	"github.com/leasekit/leasekit/internal/testserver"
)

func TestMain(m *testing.M) { testserver.Main(m) }
