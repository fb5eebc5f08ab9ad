#!/bin/sh
# Runs "go test" with the given arguments, then prints what the tests had for
# servers. Its exit code is that of go test.
set -u
cd "$(dirname "$0")/.." || exit
LEASEKIT_TEST_SUMMARY=$(mktemp) || exit 1
export LEASEKIT_TEST_SUMMARY
trap 'rm -f "$LEASEKIT_TEST_SUMMARY"' EXIT

go test "$@"
code=$?

echo
go run ./internal/testserver/summary "$LEASEKIT_TEST_SUMMARY" || code=1
if [ "$code" = 0 ]; then echo "PASSED"; else echo "FAILED (go test's lines above say what)"; fi
exit "$code"
