#!/bin/sh
# Prints the path of a Python that has the official clients of PyPI which the e2e suite speaks through: openai and
# anthropic, in the releases below. They are installed once, into build/.cache/sdks-*. Everything but the path goes to
# stderr.
set -eu

openai=3.57.0
anthropic=2.14.0
here=$(cd "$(dirname "$0")" && pwd)
name=sdks-openai-$openai-anthropic-$anthropic

say() { echo "sdks.sh: $*" >&2; }
. "$here/cache.sh"
python=$cache/$name/bin/python

has_both() { "$1/bin/python" -c 'import openai, anthropic'; }

[ -x "$python" ] || venv "$name" has_both "openai==$openai" "anthropic==$anthropic"
echo "$python"
