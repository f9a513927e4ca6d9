#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one command, in under nine minutes: the kernels against their references,
# exactness with ==, the distance to transformers, a real server, then the benchmark rows.  A short table comes last;
# logs and results.json lie in the output folder.
#
#   scripts/gpu_check.sh [--wheels DIR] [--out DIR]
#
# --wheels DIR: wheels of what this machine lacks (docs/gpu-checklist.md has the list), installed for this run only.
# Needs Python 3.11-3.13 with torch 2.11-2.13, triton, transformers, pytest; PYTHON names it.  The C++ extension is
# not needed.  A part whose packages are missing is reported as skipped.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} wheels="" out=${OUT:-gpu-check}
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    *) sed -n '2,12p' "$0"; exit 2 ;;
  esac
done
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_INTERPRET=0 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 1
  PYTHONPATH="$site:$PYTHONPATH"
fi
"$python" -c 'import torch, triton; assert torch.cuda.is_available(), "no GPU"; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())' \
  | tee "$out/machine.log" || exit 1
failed=0
table=""

part() { # part NAME SECONDS MODULES COMMAND...: run it if the modules are there, and note how it went
  local name=$1 limit=$2 modules=$3 began=$SECONDS state
  shift 3
  if ! "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in '$modules'.split()))"; then
    state=skipped
  elif timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
    state=passed
  else
    state=FAILED failed=1
    tail -n 25 "$out/$name.log"
  fi
  table+=$(printf '%-12s %-8s %4ds  %s' "$name" "$state" $((SECONDS - began)) "$(tail -n 1 "$out/$name.log" 2>/dev/null | cut -c1-90)")$'\n'
}

tests() { # tests NAME SECONDS MODULES FILE
  part "$1" "$2" "msgspec psutil pytest $3" "$python" -m pytest -q -x -p no:cacheprovider -o addopts= \
    -o filterwarnings=default --import-mode=importlib "$4"
}

tests kernels 150 "" tests/ops/test_triton.py
tests runner 150 transformers tests/runner/test_gpu.py
tests server 60 "zmq fastapi uvicorn pydantic prometheus_client httpx" tests/e2e/test_gpu.py
part benchmark 180 "msgspec psutil" "$python" benchmarks/gpu.py --out "$out/results.json"
grep -h "^G\|TB/s" "$out/benchmark.log" 2>/dev/null
printf '%s' "$table" | tee "$out/table.txt"
exit $failed
