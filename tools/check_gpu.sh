#!/usr/bin/env bash
# What only a GPU shows, for a kernel developer: `tools/check_gpu.sh PART OUT`, from a checkout.
#   tests       compiles all kernels, then runs the GPU tests; fails if none ran
#   sanitizers  memcheck, racecheck and synccheck over small tests: the fused LoRA kernels, steps
#               through graphs, and files that the device unpacks
#   times       tools/measure.py, tools/measure_graphs.py, tools/measure_loading.py, and what an
#               enqueue costs in C++ (needs g++)
#   bench       cupylora bench over SUITE (default all); beside the peers if PEERS is set
#   tune        tools/tune_kernels.py for TUNE_SECONDS (default 300)
# Logs go to OUT; a short summary is printed. WORKERS: processes at a time (default 8).
set -uo pipefail
part=${1:?tests, sanitizers, times, bench or tune} out=${2:?a folder for logs}
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/tools" WORKERS="${WORKERS:-8}"
pytest=(python3 -m pytest -m gpu --require-gpu -q -p no:cacheprovider)

compile_all() {
  for share in $(seq 0 $((WORKERS - 1))); do
    SHARE=$share python3 - <<'P' &
import os

from cupylora import prepare
from cupylora.compiler.programs import PROGRAMS

names = [program.name for program in PROGRAMS]
prepare(names[int(os.environ["SHARE"]) :: int(os.environ["WORKERS"])])
P
  done
  wait
}

# sanitize TOOL FILE CHOSEN: one tool over the chosen tests of tests/test_FILE.py.
sanitize() {
  local tool=$1 file=$2 chosen=$3 log="$out/$1-$2.txt"
  timeout "${SANITIZER_SECONDS:-240}" compute-sanitizer --tool "$tool" --report-api-errors no \
    --target-processes all --error-exitcode 9 "${pytest[@]}" "tests/test_$file.py" \
    -k "$chosen" >"$log" 2>&1
  echo "$tool, $file: exit code $? ($(grep -c "ERROR SUMMARY: 0 errors" "$log") clean summaries)"
}

# What cupylora.h costs the host above a bare launch, with kernels exported for this device.
enqueue_cost() {
  local arch
  arch=$(python3 -c 'from cupylora.device import probe; print(probe().arch)')
  python3 -c 'from cupylora.cli import main; main()' export --arch "$arch" --out "$out/kernels" &&
    g++ -std=c++17 -O2 -I"$out/kernels/include" tools/hosts/cpp/enqueue_cost.cpp -l:libcuda.so.1 \
      -ldl -lm -o "$out/enqueue_cost" && "$out/enqueue_cost" "$out/kernels"
}

case $part in
  tests)
    compile_all
    "${pytest[@]}" -n "$WORKERS" tests >"$out/tests.txt" 2>&1
    code=$?
    tail -n 25 "$out/tests.txt"
    exit $code
    ;;
  sanitizers)
    compile_all
    sanitize memcheck gpu_lora_fused "row_maps or hostile or shapes_that_sizes" &
    sanitize racecheck gpu_lora_fused shapes_that_sizes &
    sanitize synccheck gpu_lora_fused "shapes_that_sizes or row_maps" &
    sanitize memcheck gpu_graphs "test" &
    sanitize memcheck importing "what_peft_wrote and bfloat16" &
    sanitize racecheck importing "forms and gate_first" &
    wait
    ;;
  times)
    compile_all
    python3 tools/measure.py 2>&1 | tee "$out/measure.txt"
    python3 tools/measure_graphs.py 2>&1 | tee "$out/measure_graphs.txt"
    python3 tools/measure_loading.py 2>&1 | tee "$out/measure_loading.txt"
    enqueue_cost 2>&1 | tee "$out/enqueue_cost.txt"
    ;;
  bench)
    compile_all
    python3 -c 'from cupylora.cli import main; main()' bench --suite "${SUITE:-all}" \
      --json "$out/bench.json" ${PEERS:+--peers "$PEERS"} 2>&1 | tee "$out/bench.txt"
    ;;
  tune)
    python3 tools/tune_kernels.py --seconds "${TUNE_SECONDS:-300}" --json "$out/tune.json" 2>&1 |
      tee "$out/tune.txt"
    ;;
  *)
    echo "unknown part $part" >&2
    exit 2
    ;;
esac
