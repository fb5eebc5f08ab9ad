#!/bin/sh
# Runs the conformance suite on servers in containers, of images that
# tools/images.sh makes, so that nothing has to be pulled. Where no Docker runs,
# root on Debian or Ubuntu gets one for the time of the tests.
set -eu
cd "$(dirname "$0")/.."

if ! docker info >/dev/null 2>&1; then
	if ! command -v dockerd >/dev/null 2>&1; then
		if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
			echo "containers: no Docker runs here: start it" >&2
			exit 1
		fi
		echo "containers: apt-get install docker.io"
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 --no-install-recommends docker.io iptables; } </dev/null >/dev/null
	fi
	dir=$(mktemp -d)
	dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/pid" >"$dir/log" 2>&1 &
	daemon=$!
	# What the clearing up meets must not be taken for the tests' answer.
	trap 'kill $daemon 2>/dev/null || :; wait $daemon 2>/dev/null || :; rm -rf "$dir" || :' EXIT
	tries=0
	until docker info >/dev/null 2>&1; do
		tries=$((tries + 1))
		if [ $tries -gt 60 ] || ! kill -0 $daemon 2>/dev/null; then
			echo "containers: dockerd does not start:" >&2
			tail "$dir/log" >&2
			exit 1
		fi
		sleep 1
	done
fi

eval "$(tools/images.sh)"
# Containers are reached by their published ports, and removed by the tests
# themselves: the image of testcontainers' reaper cannot be pulled.
export TESTCONTAINERS_HOST_OVERRIDE=127.0.0.1 TESTCONTAINERS_RYUK_DISABLED=true
export LEASEKIT_CONTAINERS=1
go test -count=1 -run Container "$@" ./integration
