#!/bin/sh
# Makes container images of the servers that are on this machine, for the tests
# in integration/ where no image can be pulled. Prints the variables that name
# them: eval "$(tools/images.sh)".
#
# An image holds a program, the libraries that it is linked with, and what else
# it needs; nothing is downloaded. Needs a running Docker.
set -eu
cache=${LEASEKIT_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/leasekit}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# put ROOT FILE... copies files, with the libraries that they are linked with,
# to the same places below ROOT.
put() {
	root=$1
	shift
	for file in "$@"; do
		real=$(readlink -f "$file")
		mkdir -p "$root$(dirname "$file")"
		cp -aL "$real" "$root$file"
		for lib in $(ldd "$real" 2>/dev/null | grep -o '/[^ ]*'); do
			[ -e "$root$lib" ] && continue
			mkdir -p "$root$(dirname "$lib")"
			cp -L "$lib" "$root$lib"
		done
	done
}

# base ROOT makes what every image has: a shell, and a place for data.
base() {
	mkdir -p "$1/tmp" "$1/data" "$1/etc"
	chmod 1777 "$1/tmp" "$1/data"
	put "$1" /bin/sh
	cp /etc/passwd /etc/group "$1/etc/"
}

# import ROOT NAME CHANGE... makes the image.
import() {
	root=$1
	# shellcheck disable=SC2034 # eval uses it
	name=$2
	shift 2
	changes=
	for change in "$@"; do
		changes="$changes --change '$change'"
	done
	eval "tar -C \"\$root\" -c . | docker import $changes - \"\$name\"" >/dev/null
}

# script ROOT TEXT writes the program that the container runs.
script() {
	printf '#!/bin/sh\n%s\n' "$2" >"$1/run"
	chmod 755 "$1/run"
}

image_redis() {
	program=$(command -v redis-server) || return 0
	base "$tmp/redis"
	put "$tmp/redis" "$program"
	import "$tmp/redis" leasekit-test/redis "ENV PATH=$(dirname "$program"):/bin" 'WORKDIR /data'
	echo "export LEASEKIT_REDIS_IMAGE=leasekit-test/redis"
}

image_etcd() {
	program=$(command -v etcd || echo "$cache/bin/etcd")
	[ -x "$program" ] || return 0
	base "$tmp/etcd"
	put "$tmp/etcd" "$program"
	mkdir -p "$tmp/etcd/usr/local/bin"
	mv "$tmp/etcd$program" "$tmp/etcd/usr/local/bin/etcd"
	import "$tmp/etcd" leasekit-test/etcd 'WORKDIR /data'
	echo "export LEASEKIT_ETCD_IMAGE=leasekit-test/etcd"
}

image_postgres() {
	bin=$(find /usr/lib/postgresql -maxdepth 2 -name bin 2>/dev/null | sort -V | tail -n 1)
	[ -n "$bin" ] || return 0
	version=$(basename "$(dirname "$bin")")
	base "$tmp/postgres"
	mkdir -p "$tmp/postgres/usr/lib/postgresql/$version" "$tmp/postgres/usr/share/postgresql"
	cp -a "/usr/lib/postgresql/$version/lib" "$tmp/postgres/usr/lib/postgresql/$version/"
	cp -a "/usr/share/postgresql/$version" "$tmp/postgres/usr/share/postgresql/"
	put "$tmp/postgres" "$bin/initdb" "$bin/postgres"
	[ -d /usr/share/zoneinfo ] && mkdir -p "$tmp/postgres/usr/share" && cp -a /usr/share/zoneinfo "$tmp/postgres/usr/share/"
	script "$tmp/postgres" "set -e
$bin/initdb -D /data/db -U postgres -A trust >/dev/null
echo 'host all all all trust' >>/data/db/pg_hba.conf
exec $bin/postgres -D /data/db -c listen_addresses='*' -c unix_socket_directories="
	import "$tmp/postgres" leasekit-test/postgres 'USER postgres' 'ENTRYPOINT ["/run"]'
	echo "export LEASEKIT_POSTGRES_IMAGE=leasekit-test/postgres"
}

# The stand-in for mongod.
image_mongo() {
	program=$(command -v secantusd-rs || echo "$cache/secantus/bin/secantusd-rs")
	[ -x "$program" ] || return 0
	base "$tmp/mongo"
	put "$tmp/mongo" "$program"
	script "$tmp/mongo" "exec $program --host 0.0.0.0 --port 27017 --storage-path /data/db --sync-on-commit"
	import "$tmp/mongo" leasekit-test/mongo 'ENTRYPOINT ["/run"]'
	echo "export LEASEKIT_MONGO_IMAGE=leasekit-test/mongo"
}

image_redis
image_etcd
image_postgres
image_mongo
