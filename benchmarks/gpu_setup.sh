#!/usr/bin/env bash
# Prepares a GPU machine without network: unpacks what was carried there and sets PYTHONPATH. Source it.
#   CARRIED=folder with *.tar.xz of Python packages (b12x, its compiler, pydantic, blake3)   SITE=where they go
CARRIED=${CARRIED:-.gpu/one} SITE=${SITE:-/tmp/site}
if [ ! -e "$SITE/.ready" ]; then
  mkdir -p "$SITE"
  for part in "$CARRIED"/*.tar.xz; do xz -dc -T0 "$part" | tar xf - -C "$SITE"; done
  touch "$SITE/.ready"
fi
export PYTHONPATH="$PWD:$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages" HYBRID_PACK_REQUIRE_GPU=1 HYBRID_PACK_REQUIRE_B12X=1
