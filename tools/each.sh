#!/bin/sh
# Does something with each module of the workspace, but without the workspace,
# as its users get it.
#
#   each.sh vet          go vet (which builds everything, tests included), and
#                        builds the command for macOS and Windows too
#   each.sh tidy         go mod tidy
#   each.sh tidy-check   fails if a go.mod or go.sum is not tidy
set -eu
cd "$(dirname "$0")/.."
job=${1-}
case $job in
vet | tidy | tidy-check) ;;
*)
	echo "usage: each.sh vet|tidy|tidy-check" >&2
	exit 2
	;;
esac
modules=$(go list -m -f '{{.Dir}}')
siblings=$(go list -m -f '-replace={{.Path}}={{.Dir}}')
export GOWORK=off

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# in_module DIR runs the job; a command's module has to do without replace
# directives, because "go install" refuses them, and before a release nothing
# but these can find its siblings. So it is given a go.mod that has them.
in_module() {
	modfile=
	case $1 in
	*/cmd/*)
		modfile=$tmp/go.mod
		cp "$1/go.mod" "$modfile"
		# The sums of its siblings come with their release.
		{ grep -v '^github.com/leasekit/leasekit' "$1/go.sum" || true; } >"$tmp/go.sum"
		# shellcheck disable=SC2086 # a list of words
		go mod edit $siblings "$modfile"
		;;
	esac
	# Callers look at the result, which turns off "set -e" in here.
	case $job in
	vet)
		go -C "$1" vet ${modfile:+-modfile="$modfile"} ./... || return
		# The command imports all that is published, and the rest is for developers.
		case $1 in */cmd/*) ;; *) return ;; esac
		for os in darwin windows; do
			GOOS=$os go -C "$1" build -o /dev/null ${modfile:+-modfile="$modfile"} . || {
				echo "the above: GOOS=$os" >&2
				return 1
			}
		done
		;;
	tidy) go -C "$1" mod tidy ${modfile:+-modfile="$modfile"} || return ;;
	tidy-check) go -C "$1" mod tidy -diff ${modfile:+-modfile="$modfile"} || return ;;
	esac
	if [ "$job" = tidy ] && [ -n "$modfile" ]; then
		# shellcheck disable=SC2046,SC2086 # lists of words
		go mod edit $(echo "$siblings" | sed 's/^-replace=\([^=]*\)=.*/-dropreplace=\1/') "$modfile" &&
			cp "$modfile" "$1/go.mod" && cp "$tmp/go.sum" "$1/go.sum"
	fi
}

failed=
tools=$PWD/tools
[ "$job" = vet ] || tools="$tools $PWD/tools/lint $PWD/tools/etcd" # these two have no code
for dir in $modules $tools; do
	in_module "$dir" || failed="$failed $dir"
done
[ -z "$failed" ] || {
	echo "$job failed in:$failed" >&2
	[ "$job" = vet ] || echo "run: make tidy" >&2
	exit 1
}
