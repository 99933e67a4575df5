#!/usr/bin/env bash
# Prepares a GPU machine without network for vLLM: unpacks what was carried there and sets PYTHONPATH. Source it.
#   CARRIED_VLLM=folder with vllm-so.tar.xz and vllm-py.tar.xz   VLLM_SITE=where they go   and those of gpu_setup.sh
# Both bundles need not be carried by the same call: a site that is there already is used.
#
# Where both bring a package, gpu_setup's comes first: b12x is compiled against its apache-tvm-ffi (0.1.15; vLLM's only
# user of it, xgrammar, is imported for structured output alone, and imports with it too), and pydantic, pydantic-core,
# annotated-types, typing-inspection and blake3 are the same versions in both. cutlass-dsl (4.6.0) is in one only.
CARRIED=${CARRIED:-.gpu/one} SITE=${SITE:-/tmp/site}
CARRIED_VLLM=${CARRIED_VLLM:-.gpu/vllm} VLLM_SITE=${VLLM_SITE:-/tmp/vllm-site}
if [ -e "$SITE/.ready" ] || ls "$CARRIED"/*.tar.xz >/dev/null 2>&1; then . benchmarks/gpu_setup.sh; fi
if [ ! -e "$VLLM_SITE/.ready" ] && ls "$CARRIED_VLLM"/vllm-*.tar.xz >/dev/null 2>&1; then
  mkdir -p "$VLLM_SITE/vllm"
  xz -dc -T0 "$CARRIED_VLLM/vllm-py.tar.xz" | tar xf - -C "$VLLM_SITE" &
  xz -dc -T0 "$CARRIED_VLLM/vllm-so.tar.xz" | tar xf - -C "$VLLM_SITE/vllm" && wait $! &&
    rm -rf "$VLLM_SITE"/tvm_ffi "$VLLM_SITE"/apache_tvm_ffi-* && touch "$VLLM_SITE/.ready"
fi
export PYTHONPATH=${PYTHONPATH:-$PWD}:$VLLM_SITE
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 TVM_FFI_DISABLE_TORCH_C_DLPACK=1 HF_HUB_OFFLINE=1
