#!/bin/sh
# Gets the servers that tests run on. Each step is skipped when its server is
# there already.
#
#   servers.sh quick   as root on Debian or Ubuntu: Redis, PostgreSQL and
#                      PgBouncer from packages; elsewhere nothing
#   servers.sh etcd    builds etcd from its Go module, about a minute
#   servers.sh mongo   builds the stand-in for mongod, about 7 minutes
#
# What is built goes to the tool cache, $LEASEKIT_TOOLS, where
# internal/testserver looks for it. The services that packages may start are left
# alone: tests start their own servers, on free ports.
set -eu
cd "$(dirname "$0")"
cache=${LEASEKIT_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/leasekit}

# The one Mongo server that a package registry has, see docs/adr. GPL: a tool
# to run, no part of leasekit.
mongo_crate=secantus-mdb
mongo_version=0.5.3-beta.196

# shellcheck source=tools/apt.sh
. ./apt.sh

say() { echo "servers: $*"; }

have() { command -v "$1" >/dev/null 2>&1; }

# install PACKAGE… installs Debian packages, if that is possible here. If not,
# tests skip what needs them, and say so.
install() {
	if [ "$(id -u)" != 0 ] || ! have apt-get; then
		say "not root on Debian or Ubuntu: please install $*"
		return 0
	fi
	say "apt-get install $*"
	apt_install "$@" || say "apt-get failed"
}

get_quick() {
	missing=
	have redis-server || have valkey-server || missing="$missing redis-server"
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || have initdb || missing="$missing postgresql"
	have pgbouncer || [ -x /usr/sbin/pgbouncer ] || missing="$missing pgbouncer"
	# shellcheck disable=SC2086 # a list of words
	[ -z "$missing" ] || install $missing
}

get_etcd() {
	if have etcd; then
		say "etcd is on PATH"
		return
	fi
	say "etcd in $cache/bin (go build: at once when up to date)"
	GOWORK=off go -C etcd build -o "$cache/bin/etcd" go.etcd.io/etcd/server/v3
}

get_mongo() {
	if have mongod; then
		say "mongod is on PATH"
		return
	fi
	bin=$cache/secantus/bin/secantusd-rs
	if [ -x "$bin" ] && [ "$("$bin" --version | awk 'NR==1 {print $2}')" = "$mongo_version" ]; then
		say "$mongo_crate $mongo_version is in $cache/secantus"
		return
	fi
	if ! have cargo; then
		say "no cargo: install Rust, or a mongod, for the tests of the MongoDB store"
		return 1
	fi
	missing=
	have cmake || missing="$missing cmake"
	have c++ || missing="$missing g++"
	have make || missing="$missing make"
	# shellcheck disable=SC2086 # a list of words
	[ -z "$missing" ] || install $missing
	say "cargo install $mongo_crate $mongo_version (about 7 minutes on two cores)"
	cargo install "$mongo_crate" --version "$mongo_version" --ignore-rust-version --locked --force --quiet \
		--root "$cache/secantus" </dev/null
}

for step; do
	case $step in
	quick | etcd | mongo) "get_$step" ;;
	*)
		echo "usage: servers.sh [quick] [etcd] [mongo]" >&2
		exit 2
		;;
	esac
done
