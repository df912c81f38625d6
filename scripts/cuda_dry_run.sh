#!/usr/bin/env bash
# The code for a GPU, run where there is none, with a CUDA build of torch in a venv of its own that stays:
#   scripts/cuda_dry_run.sh [TORCH [PYTHON [arguments of cuda_dry_run.py]]]
# 2.9.0 is the newest release that was tried with it. The venv is that of compatible.sh: gigabytes, so it is not in CI.
set -euo pipefail
torch=${1:-2.9.0} python=${2:-python3}
cd "$(dirname "$0")/.."
venv=${VENVS:-${TMPDIR:-/tmp}}/capi-torch-$torch-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ -e "$venv/.installed" ] || scripts/compatible.sh "$torch" "$python" --version
OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONPATH=$PWD exec "$venv/bin/python" scripts/cuda_dry_run.py "${@:3}"
