#!/usr/bin/env bash
# Run the tests against another torch, in a venv of its own that stays for the next time:
#   scripts/compatible.sh TORCH [PYTHON [pytest arguments]]     scripts/compatible.sh 2.9.0 python3.12 tests/train -x
# Without arguments for pytest it takes the tests that depend most on torch. VENVS names the folder of the venvs, which hold
# 6 GB each where the build is one for CUDA.
set -euo pipefail
torch=${1:?which torch, such as 2.9.0} python=${2:-python3}
venv=${VENVS:-${TMPDIR:-/tmp}}/capi-torch-$torch-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
cd "$(dirname "$0")/.."
if [ ! -e "$venv/.installed" ]; then
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  { grep -v '^torch==' scripts/constraints.txt; echo "torch==$torch"; } > "$venv/constraints.txt"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$venv/constraints.txt" --editable ".[dev]"
  touch "$venv/.installed"
fi
if [ $# -gt 2 ]; then
  tests=("${@:3}")
else
  tests=(tests/parity tests/models tests/method tests/train tests/runtime tests/zoo tests/integration -m "not thorough")
fi
"$venv/bin/python" -c 'import platform, torch; print("torch", torch.__version__, "Python", platform.python_version())'
OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONPATH=$PWD "$venv/bin/python" -m pytest "${tests[@]}"
