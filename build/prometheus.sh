#!/bin/sh
# Prints the path of the Prometheus that the e2e suite asks: $PROMETHEUS, else
# what is on PATH, else Debian's package, unpacked under build/.cache and not
# installed, so that no service starts.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
if [ -n "${PROMETHEUS:-}" ]; then
	[ -x "$PROMETHEUS" ] || { echo "PROMETHEUS=$PROMETHEUS is not an executable" >&2; exit 1; }
	echo "$PROMETHEUS"
	exit
fi
if command -v prometheus; then
	exit
fi
cache=$root/build/.cache/prometheus
if [ ! -x "$cache/usr/bin/prometheus" ]; then
	new=$(mktemp -d)
	trap 'rm -rf "$new"' EXIT
	help="no prometheus: set PROMETHEUS=PATH, or run: apt-get install -y prometheus"
	(cd "$new" && { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } && dpkg -x prometheus_*.deb x) >&2 || {
		echo "$help" >&2
		exit 1
	}
	mkdir -p "$cache"
	cp -R "$new/x/." "$cache"
fi
echo "$cache/usr/bin/prometheus"
