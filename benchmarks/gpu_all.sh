#!/usr/bin/env bash
# GPU tests and the GPU benchmarks, in one call on a machine with a GPU:
#   benchmarks/gpu_all.sh [tests-moe] [tests-quantise] [tests-rest] [moe] [load] [quantise] [tp2]    all but tp2 (two GPUs)
# Results go to $OUT, else to benchmarks/results. COMMIT names the commit where there is no git, PYTHON the python to use.
# On a machine without network, gpu_setup.sh unpacks what was carried there (CARRIED, SITE).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export OUT=${OUT:-$PWD/benchmarks/results} HYBRID_PACK_REQUIRE_GPU=1 HYBRID_PACK_REQUIRE_B12X=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"
"$python" -c "import blake3, pydantic, cutlass, b12x" 2>/dev/null || . benchmarks/gpu_setup.sh
"$python" -m hybrid_pack.cli doctor --require b12x || exit 3

failed=0
run() {
  local began=$SECONDS name=$1 status=0
  shift
  echo "== $name: $*"
  timeout 590 "$python" -m "$@" 2>&1 | tee "$OUT/gpu_$name.txt" || status=$?
  echo "== $name took $((SECONDS - began)) s, exit code $status"
  [ $status = 0 ] || failed=1
}

quantising="tests/gpu/test_gpu_quantize.py tests/gpu/test_gpu_gptq.py tests/gpu/test_gpu_convert.py"
pytest="pytest -q -m gpu -p no:cacheprovider --maxfail=${MAXFAIL:-20}"
for stage in ${@:-tests-moe tests-quantise tests-rest moe load quantise}; do
  case $stage in
    tests-moe)
      rm -f "$OUT/gpu_findings.jsonl"
      # Several processes, because compiling kernels takes longer than running them; b12x keeps compiled code on disk.
      run tests-moe $pytest -n "${TEST_PROCESSES:-6}" tests/runtime tests/gpu/test_gpu_moe*.py ${TESTS:-}
      ;;
    tests-quantise) run tests-quantise $pytest -n "${TEST_PROCESSES:-6}" $quantising ${TESTS:-} ;;
    tests-rest) run tests-rest $pytest --ignore-glob='*/test_gpu_moe*' --ignore=tests/gpu/test_gpu_vllm.py ${quantising//tests/--ignore=tests} tests/gpu ${TESTS:-} ;;
    tp2) HYBRID_PACK_REQUIRE_GPUS=2 run tp2 $pytest tests/gpu/test_gpu_tp2.py ;;
    moe) run moe benchmarks.gpu_moe --out "$OUT/gpu_moe.json" ;;
    load) run load benchmarks.gpu_load --out "$OUT/gpu_load.json" ;;
    quantise) run quantise benchmarks.quantise --device cuda --out "$OUT/quantise_gpu.json" ;;
    *) echo "no such stage: $stage"; exit 2 ;;
  esac
done
[ ! -f "$OUT/gpu_findings.jsonl" ] || { echo "== findings"; sort -u "$OUT/gpu_findings.jsonl"; }
[ $failed = 0 ] && echo "== all good" || echo "== something FAILED"
exit $failed
