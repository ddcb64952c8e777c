#!/bin/sh
# Prints the path of a Python that has the official clients of PyPI which the e2e suite speaks through: openai and
# anthropic, in the releases below. They are installed once, into build/.cache/sdks-*. Everything but the path goes to
# stderr.
set -eu

openai=3.57.0
anthropic=2.14.0
here=$(cd "$(dirname "$0")" && pwd)
cache=$here/.cache
final=$cache/sdks-openai-$openai-anthropic-$anthropic

say() { echo "sdks.sh: $*" >&2; }

if [ ! -x "$final/bin/python" ]; then
	if ! command -v python3 >/dev/null; then
		say "python3 is needed to install openai and anthropic from PyPI"
		exit 1
	fi
	mkdir -p "$cache"
	# Older than an hour: left by a run that was killed, not one that is still at work beside us.
	find "$cache" -maxdepth 1 -name '.sdks-*' -mmin +60 -exec rm -rf {} + || true
	tmp=$(mktemp -d "$cache/.sdks-XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM HUP
	say "installing openai==$openai and anthropic==$anthropic from PyPI into $final"
	python3 -m venv "$tmp" >&2
	"$tmp/bin/python" -m pip install -q --disable-pip-version-check "openai==$openai" "anthropic==$anthropic" >&2
	"$tmp/bin/python" -c 'import openai, anthropic'
	# A folder becomes visible whole or not at all: the rename is the commit. What is in the way is another run's.
	if ! mv -T "$tmp" "$final" 2>/dev/null && [ ! -x "$final/bin/python" ]; then
		rm -rf "$final"
		mv -T "$tmp" "$final"
	fi
fi
echo "$final/bin/python"
