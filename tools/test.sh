#!/bin/sh
# Runs "go test" with the given arguments, then prints what the tests had for
# servers. Its exit code is that of go test.
#
# One package is tested at a time: the suites watch the clock, and two of them on
# a small machine would make each other late. Compiling is done before, on all
# processors.
set -u
cd "$(dirname "$0")/.." || exit
LEASEKIT_TEST_SUMMARY=$(mktemp) || exit 1
export LEASEKIT_TEST_SUMMARY
trap 'rm -f "$LEASEKIT_TEST_SUMMARY"' EXIT

race=
for arg; do
	[ "$arg" != -race ] || race=-race
done
# Errors are go test's to report.
go list -m -f '{{.Dir}}/...' | xargs go list $race -export -test -deps >/dev/null 2>&1 || true

# Rules that a busy machine makes late are tried again with longer leases.
go test -p=1 -timeout=40m "$@"
code=$?

echo
go run ./internal/testserver/summary "$LEASEKIT_TEST_SUMMARY" || code=1
if [ "$code" = 0 ]; then echo "PASSED"; else echo "FAILED (go test's lines above say what)"; fi
exit "$code"
