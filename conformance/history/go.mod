module github.com/leasekit/leasekit/conformance/history

go 1.26

require (
	github.com/anishathalye/porcupine v1.3.1
	github.com/leasekit/leasekit v0.1.0
)

replace github.com/leasekit/leasekit => ../..
