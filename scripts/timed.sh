#!/usr/bin/env bash
# Run a command and say how long it took: scripts/timed.sh NAME COMMAND...
set -u
name=$1
shift
start=$(date +%s.%N)
"$@"
code=$?
end=$(date +%s.%N)
awk -v name="$name" -v start="$start" -v end="$end" -v code="$code" \
  'BEGIN { printf "== %s: %s in %.1f s\n", name, (code == 0 ? "passed" : "FAILED"), end - start }'
exit $code
