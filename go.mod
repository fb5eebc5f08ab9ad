module github.com/leasekit/leasekit

go 1.26
