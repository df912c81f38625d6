#!/usr/bin/env bash
# Try a wheel as a user would, outside of the checkout: scripts/wheel.sh dist/capi-VERSION-py3-none-any.whl [PYTHON]
# A new venv gets the wheel with the extra `demo`, trains two steps, and reads the run back.
set -euo pipefail
wheel=$(realpath "$1")
constraints=$(realpath "$(dirname "$0")/constraints.txt")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${2:-python3}" -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$constraints" "$wheel[demo]"
cd "$place"
capi=$place/venv/bin/capi
"$capi" --version
"$capi" recipes > recipes.txt
"$capi" pretrain small optimization.steps=2 optimization.batch_size=8 data.workers=0 --data demo --out run
# Two steps are no healthy run; that the doctor has a verdict is what counts (exit code 1).
"$capi" doctor run || [ $? -eq 1 ]
"$capi" export run --format safetensors --out model.safetensors
"$place/venv/bin/python" -c 'import capi; print(capi.load("model.safetensors").patch_size)'
echo "the wheel works in an empty venv"
