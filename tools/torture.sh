#!/bin/sh
# Runs "leasekit torture" on every store, for so long each: torture.sh 60s. A
# store whose server cannot be had is left out, and named, unless
# LEASEKIT_TEST_REQUIRE is set.
set -eu
cd "$(dirname "$0")/.."
duration=${1:-60s}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
go build -o "$tmp/leasekit" ./cmd/leasekit
go build -o "$tmp/with" ./internal/testserver/with
found=$PWD/leasekit-torture

echo "memory:"
"$tmp/leasekit" torture --store memory: --for "$duration" --dir "$found"
failed=''
left=''
for kind in redis etcd postgres mongo; do
	echo "$kind:"
	code=0
	"$tmp/with" "$kind" sh -c "$tmp/leasekit init && $tmp/leasekit torture --for $duration --dir $found" || code=$?
	case $code in
	0) ;;
	3) left="$left $kind" ;;
	*) failed="$failed $kind" ;;
	esac
done
[ -z "$left" ] || echo "torture: left out, no server:$left"
[ -z "$failed" ] || echo "torture: failed:$failed (see $found)"
[ -z "$failed" ] && { [ -z "$left" ] || [ -z "${LEASEKIT_TEST_REQUIRE:-}" ]; }
