#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one command, in ten minutes at most: twelve questions (gpu_probe.py), whose
# answers begin the summary's table, the kernels against their references,
# exactness with ==, the distance to transformers, the benchmark rows, a real server, the whole engine.  A part that
# fails or runs out of time does not keep the next from running.  Last come the first error of each part that failed,
# the figures, and a short table, in less than 12,000 characters; a log per part, the table and the benchmarks' results
# as JSON lie in the output folder (eight files).
#
#   scripts/gpu_check.sh [--wheels DIR] [--out DIR] [--seconds N] [--only "PART PART"]
#
# --wheels DIR: wheels of what this machine lacks (docs/gpu-checklist.md has the list), installed for this run only.
# --seconds N: for all parts together, default 570.  --only: probe kernels runner both_ways steps server
# training ipc ranks whole; by name only: probe2 features layers profile G4 G9.
# Needs Python 3.11-3.13 with torch 2.11-2.13, triton, transformers, pytest; PYTHON names it.  The C++ extension is
# not needed.  A part whose packages are missing is reported as skipped.
set -uo pipefail
python=${PYTHON:-python3} wheels="" out=${OUT:-gpu-check} seconds=570 only="probe kernels runner both_ways steps server training ipc ranks whole"
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$(realpath "$2"); shift 2 ;;
    --out) out=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    *) sed -n '2,16p' "$0"; exit 2 ;;
  esac
done
mkdir -p "$out" && out=$(realpath "$out") && cd "$(dirname "$0")/.." || exit 1
export PYTHONUNBUFFERED=1 TRITON_INTERPRET=0 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${TRITON_CACHE_DIR:-}" ] && ! { mkdir -p "${HOME:-/}/.triton/cache" && [ -w "${HOME:-/}/.triton/cache" ]; } 2>/dev/null; then
  TRITON_CACHE_DIR=$(mktemp -d) && export TRITON_CACHE_DIR # where no home can be written
fi
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
for name in "torch triton transformers numpy msgspec pyahocorasick pyzmq fastapi uvicorn uvloop pydantic prometheus-client httpx pytest pytest-xdist".split():
    try:
        print(name, metadata.version(name), end="; ")
    except metadata.PackageNotFoundError:
        print(name, "MISSING", end="; ")
print()
if not torch.cuda.is_available():
    sys.exit("no GPU is usable here")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), "CUDA", torch.version.cuda, "memory", torch.cuda.mem_get_info())
MACHINE
failed=0 table="" errors="" workers=""
"$python" -c 'import xdist' 2>/dev/null && workers="-n $(($(nproc) < 12 ? $(nproc) : 12))"

part() { # part NAME SECONDS MODULES COMMAND...: run it if the modules are there, and note how it went
  local name=$1 limit=$2 modules=$3 log="$out/$1.log" began=$SECONDS left=$((seconds - SECONDS)) state
  shift 3
  [[ " $only " == *" $name "* ]] || return
  [ "$limit" -gt "$left" ] && limit=$left
  if ! "$python" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in '$modules'.split()))"; then
    state=skipped
  elif [ "$limit" -lt 10 ]; then
    state="no time"
  elif timeout -s INT -k 10 "$limit" "$@" >"$log" 2>&1; then
    state=passed
  else
    state=FAILED failed=1
    [ $((SECONDS - began)) -ge "$limit" ] && state="TIMED OUT"
    errors+=$(printf -- '---- %s: %s\n%s' "$name" "$state" "$(first_error "$log")")$'\n'
  fi
  local line
  line=$(printf '%-8s %-9s %4ds  %s' "$name" "$state" $((SECONDS - began)) "$(tail -n 1 "$log" 2>/dev/null | cut -c1-90)")
  echo "$line"
  table+=$line$'\n'
}

first_error() { # first_error LOG: what failed first, and the last lines, in 1,600 characters
  local at
  at=$(grep -n -m 1 '^E  ' "$1" | cut -d: -f1)
  { if [ -n "$at" ]; then sed -n "$((at > 8 ? at - 8 : 1)),$((at + 5))p" "$1"; else grep -a -n -m 1 -A 12 'Traceback' "$1"; fi; } |
    cut -c1-160 | head -c 900
  grep -a '^FAILED\|^ERROR' "$1" | cut -c1-140 | head -n 4
  tail -n 3 "$1" | cut -c1-160 | tail -c 400
}

tests() { # tests NAME SECONDS MODULES ARGUMENT...
  local name=$1 limit=$2 modules=$3
  shift 3
  part "$name" "$limit" "msgspec psutil ahocorasick pytest $modules" "$python" -m pytest -q -rfE --tb=short --maxfail=25 \
    -p no:cacheprovider -o addopts= -o filterwarnings=default -o timeout=$((limit * 3 / 4)) -o timeout_method=thread \
    --import-mode=importlib "$@"
}

result() { # result FILE COMMAND...: run it; whatever becomes of it, the file is JSON
  local file=$1
  shift
  "$@"
  "$python" -c 'import json, sys; json.load(open(sys.argv[1]))' "$file" 2>/dev/null || echo '{"rows": [], "failed": true}' >"$file"
}

part probe 75 "msgspec psutil" "$python" scripts/gpu_probe.py
if [ -f "$out/probe.log" ]; then cut -c1-400 "$out/probe.log" >>"$out/summary.txt" && rm "$out/probe.log"; fi
tests kernels 110 "" $workers tests/ops/test_triton.py tests/ops/test_later_keys.py tests/ops/test_sorted_choices.py tests/ops/test_training_kernels.py
tests runner 150 "transformers" $workers tests/runner/test_gpu.py
result "$out/steps.json" part steps 190 "msgspec psutil" "$python" benchmarks/gpu.py --out "$out/steps.json"
tests server 90 "zmq fastapi uvicorn uvloop pydantic prometheus_client httpx" tests/e2e/test_gpu.py
tests training 90 "zmq fastapi uvicorn uvloop pydantic prometheus_client httpx" tests/e2e/test_gpu_training.py -k "not other_layers"
tests both_ways 110 "transformers" tests/runner/test_gpu_both_ways.py
tests ipc 60 "zmq fastapi uvicorn uvloop pydantic prometheus_client httpx" tests/e2e/test_gpu_ipc.py
tests ranks 150 "zmq fastapi uvicorn uvloop pydantic prometheus_client httpx" tests/e2e/test_gpu_ranks.py
result "$out/whole.json" part whole 170 "msgspec psutil ahocorasick transformers zmq fastapi uvicorn uvloop pydantic prometheus_client httpx" \
  "$python" benchmarks/gpu_whole.py --out "$out/whole.json"
# what is asked for by name: --only "probe2 features layers profile G4 G9"
part probe2 300 "msgspec psutil" "$python" scripts/gpu_probe2.py --out "$out/probe2.json"
if [ -f "$out/probe2.log" ]; then cut -c1-400 "$out/probe2.log" >>"$out/summary.txt"; fi
tests features 400 "zmq fastapi uvicorn uvloop pydantic prometheus_client httpx safetensors" $workers tests/e2e/test_gpu_features.py
tests layers 150 "zmq fastapi uvicorn uvloop pydantic prometheus_client httpx safetensors" $workers tests/e2e/test_gpu_training.py -k other_layers
part profile 170 "msgspec psutil" "$python" benchmarks/gpu.py --profile --out "$out/profile.json"
for goal in G4 G9; do
  part "$goal" 400 "msgspec psutil ahocorasick transformers zmq fastapi uvicorn uvloop pydantic prometheus_client httpx" \
    "$python" benchmarks/gpu_whole.py --only "$goal" --out "$out/$goal.json"
done
printf '%s' "$errors"
grep -hs '^ *[0-9]* \(yes\|NO\|--\|FAILED\) ' "$out/summary.txt" | cut -c1-300
grep -hs '^G[0-9]\|TB/s\|^transformers' "$out/steps.log" "$out/whole.log" "$out/G4.log" "$out/G9.log" | cut -c1-400
if [ -f "$out/profile.log" ]; then tail -n 56 "$out/profile.log" | cut -c1-110; fi
printf '%s' "$table" | tee -a "$out/summary.txt"
exit $failed
