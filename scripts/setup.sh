#!/usr/bin/env bash
# Create .venv in the checkout with the package and all that its tests need: scripts/setup.sh PYTHON
set -euo pipefail
python=$1
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "capi needs Python 3.11 or newer, but $python is $("$python" --version 2>&1): make test PYTHON=/path/to/python" >&2
  exit 2
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt --editable ".[dev]"
