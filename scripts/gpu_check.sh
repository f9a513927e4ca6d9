#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one command, in nine minutes at most: the kernels against their references,
# exactness with ==, the distance to transformers, a real server, then the benchmark rows.  A part that fails or runs
# out of time does not keep the next from running.  A short table comes last; it, a log per part and the benchmarks'
# results as JSON lie in the output folder (eight files).
#
#   scripts/gpu_check.sh [--wheels DIR] [--out DIR] [--seconds N] [--only "PART PART"]
#
# --wheels DIR: wheels of what this machine lacks (docs/gpu-checklist.md has the list), installed for this run only.
# --seconds N: for all parts together, default 525.  --only: kernels runner server steps whole.
# Needs Python 3.11-3.13 with torch 2.11-2.13, triton, transformers, pytest; PYTHON names it.  The C++ extension is
# not needed.  A part whose packages are missing is reported as skipped.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} wheels="" out=${OUT:-gpu-check} seconds=525 only="kernels runner server steps whole"
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    *) sed -n '2,14p' "$0"; exit 2 ;;
  esac
done
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_INTERPRET=0 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 1
  PYTHONPATH="$PWD:$site${PYTHONPATH#"$PWD"}"
fi
"$python" - <<'MACHINE' 2>&1 | tee "$out/summary.txt" || exit 1
import importlib.metadata as metadata, os, platform, shutil, sys, sysconfig
import torch, triton
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
print("python", platform.python_version(), "cores", len(os.sched_getaffinity(0)), "cc", shutil.which("cc"), header, os.path.exists(header))
if not (shutil.which("cc") and os.path.exists(header)):
    print("WARNING: triton compiles its launchers with a C compiler and Python.h")
for name in "torch triton transformers numpy msgspec pyzmq fastapi uvicorn pydantic prometheus-client httpx pytest pytest-xdist".split():
    try:
        print(name, metadata.version(name), end="; ")
    except metadata.PackageNotFoundError:
        print(name, "MISSING", end="; ")
print()
if not torch.cuda.is_available():
    sys.exit("no GPU is usable here")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), "CUDA", torch.version.cuda, "memory", torch.cuda.mem_get_info())
MACHINE
failed=0 table="" workers=""
"$python" -c 'import xdist' 2>/dev/null && workers="-n 6"

part() { # part NAME SECONDS MODULES COMMAND...: run it if the modules are there, and note how it went
  local name=$1 limit=$2 modules=$3 began=$SECONDS left=$((seconds - SECONDS)) state
  shift 3
  [[ " $only " == *" $name "* ]] || return
  [ "$limit" -gt "$left" ] && limit=$left
  if ! "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in '$modules'.split()))"; then
    state=skipped
  elif [ "$limit" -lt 10 ]; then
    state="no time"
  elif timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1; then
    state=passed
  else
    state=FAILED failed=1
    [ $((SECONDS - began)) -ge "$limit" ] && state="TIMED OUT"
    tail -n 25 "$out/$name.log" | cut -c1-300
  fi
  table+=$(printf '%-8s %-9s %4ds  %s' "$name" "$state" $((SECONDS - began)) "$(tail -n 1 "$out/$name.log" 2>/dev/null | cut -c1-90)")$'\n'
}

tests() { # tests NAME SECONDS MODULES ARGUMENT...
  local name=$1 limit=$2 modules=$3
  shift 3
  part "$name" "$limit" "msgspec psutil pytest $modules" "$python" -m pytest -q -rfE --tb=short --maxfail=25 \
    -p no:cacheprovider -o addopts= -o filterwarnings=default -o timeout=$((limit - 15)) --import-mode=importlib "$@"
}

tests kernels 150 "" $workers tests/ops/test_triton.py
tests runner 120 "transformers" tests/runner/test_gpu.py
tests server 90 "zmq fastapi uvicorn pydantic prometheus_client httpx" tests/e2e/test_gpu.py
part steps 150 "msgspec psutil" "$python" benchmarks/gpu.py --out "$out/steps.json"
part whole 160 "msgspec psutil transformers zmq fastapi uvicorn pydantic prometheus_client httpx" \
  "$python" benchmarks/gpu_whole.py --out "$out/whole.json"
grep -hs '^G[0-9]\|TB/s\|^transformers' "$out/steps.log" "$out/whole.log"
printf '%s' "$table" | tee -a "$out/summary.txt"
exit $failed
