#!/usr/bin/env bash
# Runs each fuzz target of the module for the time given: build/fuzz.sh 20s
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
go list -f '{{.ImportPath}} {{.Dir}}' ./... | while read -r pkg dir; do
  for target in $(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go 2>/dev/null | cut -c6-); do
    echo "== $pkg $target"
    if ! go test -run '^$' -fuzz "^$target\$" -fuzztime "$1" "$pkg" >"$log" 2>&1 </dev/null; then
      # Go's fuzzer now and then reports the end of its own time as a failure:
      # then there is no failing input.
      if grep -q 'context deadline exceeded' "$log" && ! grep -qE 'Failing input|panic:' "$log"; then
        echo "ended by its own deadline, without a failing input"
        continue
      else
        cat "$log"
        exit 1
      fi
    fi
    tail -n 1 "$log"
  done
done
