#!/usr/bin/env bash
# Runs a command several times in a row beside a compiler on every processor, stops at the first failure, and prints the
# seconds of each run: a test that depends on a quick or idle machine fails here.
#   scripts/under_load.sh [N [COMMAND ...]]     by default 5 times `make test`
# NICE=0 gives the compilers the priority of the tests; by default they have a lower one, as a build beside them has.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-5}
[[ $runs =~ ^[1-9][0-9]*$ ]] || { echo "usage: $0 [N [COMMAND ...]], with N at least 1" >&2; exit 2; }
shift || true
[ $# -gt 0 ] || set -- make test
compiler=${CXX:-c++}
command -v "$compiler" > /dev/null || { echo "$0: there is no $compiler: apt-get install g++, or CXX=..." >&2; exit 2; }
objects=$(mktemp -d)
loads=()

end_loads() {
  trap - EXIT INT TERM
  for load in "${loads[@]}"; do
    while kill -KILL -- "-$load" 2> /dev/null; do  # a process group, again for a compiler that just begins
      wait "$load" 2> /dev/null || true
    done
  done
  rm -rf "$objects"
}
trap end_loads EXIT
trap 'exit 130' INT TERM

compile() {  # one processor, for ever
  while true; do
    nice -n "${NICE:-5}" "$compiler" -std=c++20 -O3 -DTOKSERVE_ISA=portable -Icsrc -c csrc/gemm.cpp -o "$1"
  done
}

"$compiler" -std=c++20 -O0 -DTOKSERVE_ISA=portable -Icsrc -c csrc/gemm.cpp -o "$objects/tried.o"
set -m  # each load has a process group of its own
for number in $(seq "$(nproc)"); do
  compile "$objects/$number.o" &
  loads+=($!)
done
set +m

for run in $(seq "$runs"); do
  began=$SECONDS
  if "$@"; then
    echo "run $run of $runs: passed in $((SECONDS - began)) s"
  else
    code=$?
    echo "run $run of $runs: failed with exit code $code after $((SECONDS - began)) s"
    exit "$code"
  fi
done
