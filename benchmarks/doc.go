// Command benchmarks answers what a lock costs on each backend, and how it
// behaves when many want it.
//
//	go run ./benchmarks
//	go run ./benchmarks -stores redis,etcd -duration 10s -html report.html
//
// Every workload runs beside its floor: the raw operations that the backend
// needs at least, on the same client, in alternating slices of the same run. The
// ratio of the two holds on a noisy machine, where the times alone do not. Where
// there are other libraries for the backend, they run in the same slices.
//
// Each server is taken from $LEASEKIT_TEST_REDIS ($LEASEKIT_TEST_ETCD, …), or
// else started from what is on PATH or in the tool cache ("make servers"), or
// else in a container, of an official image or the one that
// $LEASEKIT_REDIS_IMAGE ($LEASEKIT_ETCD_IMAGE, …) names. A store whose server
// cannot be had is left out, and the reason is said.
package main
