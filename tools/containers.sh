#!/bin/sh
# Runs the conformance suite on servers in containers, of images that
# tools/images.sh makes, so that nothing has to be pulled. Where no Docker runs,
# root on Debian or Ubuntu gets one for the time of the tests.
set -eu
cd "$(dirname "$0")/.."

# start_docker starts a dockerd whose files are in $dir, and returns when it
# answers.
start_docker() {
	dir=$(mktemp -d)
	dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/pid" >"$dir/log" 2>&1 &
	daemon=$!
	trap stop_docker EXIT
	tries=0
	until docker info >/dev/null 2>&1; do
		tries=$((tries + 1))
		if [ $tries -gt 60 ] || ! kill -0 $daemon 2>/dev/null; then
			echo "containers: dockerd does not start:" >&2
			tail "$dir/log" >&2
			stop_docker
			return 1
		fi
		sleep 1
	done
}

# What the clearing up meets must not be taken for the tests' answer.
stop_docker() {
	kill $daemon 2>/dev/null || :
	wait $daemon 2>/dev/null || :
	rm -rf "$dir" || :
}

if ! docker info >/dev/null 2>&1; then
	if ! command -v dockerd >/dev/null 2>&1; then
		if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
			echo "containers: no Docker runs here: start it" >&2
			exit 1
		fi
		echo "containers: apt-get install docker.io"
		. ./tools/apt.sh
		apt_install docker.io iptables
	fi
	# The package may have started one.
	if ! docker info >/dev/null 2>&1; then
		start_docker || start_docker
	fi
fi

images=$(tools/images.sh) # apart, so that its failure is one
eval "$images"
# Containers are reached by their published ports, and removed by the tests
# themselves: the image of testcontainers' reaper cannot be pulled.
export TESTCONTAINERS_HOST_OVERRIDE=127.0.0.1 TESTCONTAINERS_RYUK_DISABLED=true
export LEASEKIT_CONTAINERS=1
go test -count=1 -timeout=40m -run Container "$@" ./integration
