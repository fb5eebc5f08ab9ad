module github.com/leasekit/leasekit/stores/postgres

go 1.26

require github.com/leasekit/leasekit v0.1.0

replace github.com/leasekit/leasekit => ../..
