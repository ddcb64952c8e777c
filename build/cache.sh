# Read by the scripts beside it that fill build/.cache; they have set here and say.
cache=$here/.cache

# scratch NAME MINUTES sets tmp to a new folder build/.cache/.NAME-*, which is gone when the script ends. Those older than
# MINUTES were left by a run that was killed, and not by one that is still at work beside us: they go.
scratch() {
	mkdir -p "$cache"
	find "$cache" -maxdepth 1 -name ".$1-*" -mmin "+$2" -exec rm -rf {} + || true
	tmp=$(mktemp -d "$cache/.$1-XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM HUP
}

# publish FINAL CHECK makes tmp the folder FINAL, which so becomes visible whole or not at all: the rename is the commit.
# What is in the way is broken or, where the command CHECK succeeds for it, a complete one that another run finished first.
publish() {
	if ! mv -T "$tmp" "$1" 2>/dev/null && ! "$2" "$1" >&2; then
		rm -rf "$1"
		mv -T "$tmp" "$1"
	fi
}

# venv NAME CHECK PACKAGE==VERSION... makes build/.cache/NAME a virtual environment of Python with these packages of PyPI.
venv() {
	final=$cache/$1
	check=$2
	shift 2
	if ! command -v python3 >/dev/null; then
		say "python3 is needed to install $* from PyPI"
		return 1
	fi
	scratch venv 60
	say "installing $* from PyPI into $final"
	python3 -m venv "$tmp" >&2
	"$tmp/bin/python" -m pip install -q --disable-pip-version-check "$@" >&2
	"$check" "$tmp" >&2
	publish "$final" "$check"
}
