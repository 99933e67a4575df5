#!/usr/bin/env bash
# A virtual environment in which vLLM's Python code can be imported on a machine without a GPU, beside the tests' own:
#   tests/integrations/vllm_site.sh BASE_PYTHON FOLDER [VERSION]
# Of the wheel (300 MB, no dependencies) only Python files are kept; the CPU tests need no more, and what vLLM requires
# to run models on a GPU (gigabytes) stays away. Everything else is taken from BASE_PYTHON's environment.
set -euo pipefail
base=$1 folder=$2 version=${3:-0.27.1}
requirements=$(cd "$(dirname "$0")" && pwd)/vllm_site.txt

"$base" -m venv "$folder"
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
"$base" -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/base.pth"
"$folder/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements" 2>&1 |
  { grep -v -e "dependency conflicts" -e "which is not installed" -e "which is incompatible" || true; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$folder/bin/pip" download --quiet --no-deps --only-binary :all: --dest "$work" "vllm==$version"
"$folder/bin/python" - "$work" "$site" <<'PY'
import sys, zipfile
from pathlib import Path

wheel, = Path(sys.argv[1]).glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.endswith((".py", ".json", "/METADATA")) and "/configs/" not in name:
            archive.extract(name, sys.argv[2])
PY
echo "vLLM $version for the CPU in $folder"
