#!/bin/sh
# Prints a folder with kube-apiserver and etcd, which the tests of the kubernetes source start.
#
#   build/kubernetes.sh
#
# The API server is built from the module in build/apiserver, into build/.cache/kubernetes-VERSION: 10 minutes of CPU
# time when nothing of it is in the build cache. etcd is $ETCD, else what is on PATH, else Debian's package, unpacked and
# not installed, so that no service starts. An interrupted run leaves at most a build/.cache/.kubernetes-* folder, which
# nothing reads and a later run removes. Everything but the path goes to stderr.
set -eu

here=$(cd "$(dirname "$0")" && pwd)

say() { echo "kubernetes.sh: $*" >&2; }
. "$here/cache.sh"

version=$(sed -n 's|^.*k8s.io/kubernetes v\([0-9.]*\).*$|\1|p' "$here/apiserver/go.mod" | head -n 1)
final=$cache/kubernetes-$version

complete() { [ -x "$1/kube-apiserver" ] && [ -x "$1/etcd" ]; }

if complete "$final"; then
	echo "$final"
	exit
fi

scratch kubernetes 180

if etcd=$(command -v "${ETCD:-etcd}"); then
	ln -s "$(cd "$(dirname "$etcd")" && pwd)/$(basename "$etcd")" "$tmp/etcd"
else
	(cd "$tmp" && { apt-get download etcd-server || { apt-get update && apt-get download etcd-server; }; } &&
		dpkg -x etcd-server_*.deb x) >&2 || {
		say "no etcd: set ETCD=PATH, or run: apt-get install -y etcd-server"
		exit 1
	}
	mv "$tmp/x/usr/bin/etcd" "$tmp/etcd"
	rm -rf "$tmp"/etcd-server_*.deb "$tmp/x"
fi

say "building kube-apiserver $version into $final"
(cd "$here/apiserver" && go build -trimpath \
	-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$version" -o "$tmp/kube-apiserver" .) >&2

publish "$final" complete
echo "$final"
