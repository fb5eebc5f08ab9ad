# shellcheck shell=sh
# To be sourced: apt_install PACKAGE… installs Debian packages, as root.

apt_install() {
	# The package lists may be missing, as in an image, or too old to fetch by.
	apt_get install "$@" 2>/dev/null || { apt_get update && apt_get install "$@"; }
}

apt_get() {
	DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 --no-install-recommends "$@" </dev/null >/dev/null
}
