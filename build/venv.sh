# Read by the scripts beside it, which have set here and say.
#
# venv NAME CHECK PACKAGE==VERSION... makes build/.cache/NAME a virtual environment of Python with these packages of
# PyPI. CHECK is a command that is told a folder and succeeds if that is such an environment. What an interrupted run
# leaves, a build/.cache/.venv-* folder, nothing reads and a later download removes.
venv() {
	cache=$here/.cache
	final=$cache/$1
	check=$2
	shift 2
	if ! command -v python3 >/dev/null; then
		say "python3 is needed to install $* from PyPI"
		return 1
	fi
	mkdir -p "$cache"
	# Older than an hour: left by a run that was killed, not one that is still at work beside us.
	find "$cache" -maxdepth 1 -name '.venv-*' -mmin +60 -exec rm -rf {} + || true
	tmp=$(mktemp -d "$cache/.venv-XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM HUP
	say "installing $* from PyPI into $final"
	python3 -m venv "$tmp" >&2
	"$tmp/bin/python" -m pip install -q --disable-pip-version-check "$@" >&2
	"$check" "$tmp" >&2
	# A folder becomes visible whole or not at all: the rename is the commit. What is in the way is broken, or is a
	# complete one that another run finished first.
	if ! mv -T "$tmp" "$final" 2>/dev/null && ! "$check" "$final" >&2; then
		rm -rf "$final"
		mv -T "$tmp" "$final"
	fi
}
