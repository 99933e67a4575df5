#!/usr/bin/env bash
# Packs in vLLM on a GPU: small models, their parity, what calls do, start-up and decoding, one stage after the other:
#   benchmarks/vllm_all.sh [unpack] [models] [parity] [calls] [shared] [serve-models] [serve] [decode] [tp2]   all but tp2 (two GPUs)
# Results go to $OUT (two files a stage, and vllm_answers.json), models to MODELS. COMMIT names the commit where there is
# no git, PYTHON the python, SLOTS how many engines run at a time. Where vLLM is not installed, vllm_setup.sh unpacks what was carried.
# unpack, models and serve-models need no vLLM: they can run in a call that carries b12x alone.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export OUT=${OUT:-$PWD/benchmarks/results} MODELS=${MODELS:-/tmp/vllm-models} PYTHONUNBUFFERED=1
export HYBRID_PACK_REQUIRE_GPU=1 HYBRID_PACK_REQUIRE_B12X=1 HYBRID_PACK_REQUIRE_VLLM=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT" "$MODELS"
"$python" -c "import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ('blake3', 'pydantic', 'cutlass', 'b12x', 'vllm'))))" || . benchmarks/vllm_setup.sh
export HYBRID_PACK_VLLM_MODELS=$MODELS
rm -f "$OUT/vllm_comparisons.jsonl"

failed=0
run() {
  local began=$SECONDS name=$1 status=0
  shift
  echo "== $name: $*"
  timeout "${LIMIT:-590}" "$@" 2>&1 | tee "$OUT/vllm_$name.txt" || status=$?
  echo "== $name took $((SECONDS - began)) s, exit code $status"
  [ $status = 0 ] || failed=1
}

pytest="$python -m pytest -q -m gpu -p no:cacheprovider -rs tests/gpu/test_gpu_vllm.py"
need() {
  "$python" -c "import importlib.util as u, sys
sys.exit('\n'.join(f'{n} is not there: carry its bundle first, see vllm_setup.sh' for n in ('b12x', 'vllm') if not u.find_spec(n)) or 0)" || exit 3
}

for stage in ${@:-unpack models parity calls shared serve-models serve decode}; do
  case $stage in
    unpack)
      run unpack "$python" -c "
import importlib.metadata as m, importlib.util as u
for name in ('torch', 'triton', 'transformers', 'vllm', 'b12x', 'nvidia-cutlass-dsl', 'apache-tvm-ffi', 'pydantic'):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, 'is not there')
for name in ('b12x', 'cutlass', 'tvm_ffi', 'vllm', 'blake3'):
    found = u.find_spec(name)
    print(name, 'from', found and (found.origin or list(found.submodule_search_locations)[0]))"
      ;;
    models) run models "$python" -m tests.gpu.vllm_models "$MODELS" ;;
    parity) need; run parity $pytest -k "not calls and not memory and not two_ranks and not ranks_that_share" ;;
    calls) need; run calls $pytest -k "calls or memory" ;;
    shared) need; run shared $pytest -k ranks_that_share ;;
    tp2) need; HYBRID_PACK_REQUIRE_GPUS=2 run tp2 $pytest -k two_ranks_are_one ;;
    serve-models) run serve-models "$python" -m benchmarks.vllm_serve --folder "$MODELS/serve" --prepare ;;
    serve) need; run serve "$python" -m benchmarks.vllm_serve --folder "$MODELS/serve" --out "$OUT/vllm_serve.json" \
      --seconds "${SERVE_SECONDS:-480}" --rounds "${ROUNDS:-2}" ;;
    decode) need; run decode "$python" -m benchmarks.vllm_decode --folder "$MODELS/decode" --out "$OUT/vllm_decode.json" ;;
    *) echo "no such stage: $stage"; exit 2 ;;
  esac
done
[ ! -f "$OUT/vllm_comparisons.jsonl" ] || "$python" -m benchmarks.vllm_answers "$OUT" --out "$OUT/vllm_answers.json"
[ ! -f "$OUT/vllm_comparisons.jsonl" ] || { echo "== comparisons"; cat "$OUT/vllm_comparisons.jsonl"; }
# Eight files come back: what a stage printed is in its log already.
for stage in unpack models serve-models parity calls shared tp2 serve decode; do
  [ ! -f "$OUT/vllm_$stage.txt" ] || { echo "== $stage"; cat "$OUT/vllm_$stage.txt"; rm "$OUT/vllm_$stage.txt"; }
done >"$OUT/vllm_stages.txt"
[ $failed = 0 ] && echo "== all good" || echo "== something FAILED"
exit $failed
