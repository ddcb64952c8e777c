#!/bin/sh
# Fails if a library needs a newer glibc than the image has that loads it.
#
#   build/glibc.sh 2.35 build/out/libshunt.so build/out/libshunt_contrib.so
set -eu

if [ $# -lt 2 ]; then
	echo "usage: glibc.sh VERSION FILE…" >&2
	exit 2
fi
have=$1
shift
for file; do
	if ! names=$(readelf --version-info --wide "$file"); then exit 1; fi
	need=$(echo "$names" | grep -o 'GLIBC_[0-9][0-9.]*' | cut -d_ -f2 | sort -uV | tail -n 1)
	if [ -z "$need" ]; then
		echo "glibc.sh: $file names no version of glibc: is it a library?" >&2
		exit 1
	fi
	if [ "$(printf '%s\n%s\n' "$need" "$have" | sort -V | tail -n 1)" != "$have" ]; then
		echo "glibc.sh: $file needs glibc $need, the image has $have: build it on an older base" >&2
		exit 1
	fi
	echo "$file: needs glibc $need"
done
