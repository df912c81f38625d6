# `make test` needs Python 3.11 or newer, make and a compiler; it sets up everything else in .venv.
PYTHON ?= python3
MAKEFLAGS += --no-print-directory
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint types layers docs pictures pytest thorough format benchmarks dist upgrade clean

demo:
	@$(MAKE) $(STAMP)
	$(BIN)/capi demo --resume --out demo_run

test:
	@$(MAKE) $(STAMP)
	@bash scripts/timed.sh "lint and format" $(MAKE) lint
	@bash scripts/timed.sh "types" $(MAKE) types
	@bash scripts/timed.sh "import layers" $(MAKE) layers
	@bash scripts/timed.sh "docs" $(MAKE) docs
	@bash scripts/timed.sh "tests" $(MAKE) pytest
	@echo "all passed"

$(STAMP): pyproject.toml scripts/constraints.txt
	@bash scripts/timed.sh "find a browser" bash scripts/browser.sh
	@bash scripts/timed.sh "set up .venv" bash scripts/setup.sh "$(PYTHON)"
	@touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/layers.py

# The site, in build/site; every warning is an error, a link that leads nowhere too.
docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/site

# Those of README and docs, from the run of `make demo`. Look at them before they are committed.
pictures: demo
	$(BIN)/python scripts/pictures.py demo_run

# One OpenMP thread a worker: with more they fight for the cores. A worker more than cores, since some wait for processes
# that they started. A file stays on one worker, which makes its fixtures once.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

pytest: $(STAMP)
	$(PYTEST) -m "not thorough"

# What is long and rarely tells something new: run it before a release and after changes to what it tests.
thorough: $(STAMP)
	$(PYTEST) -m thorough

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(STAMP)
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/clustering.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/evals.py
	$(BIN)/python benchmarks/health.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/masking.py
	$(BIN)/python benchmarks/onnx_export.py
	$(BIN)/python benchmarks/pca.py
	$(BIN)/python benchmarks/predictors.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/sinkhorn_queue.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/step_profile.py
	$(BIN)/python benchmarks/versions.py

# Wheel and sdist, with their metadata checked; the wheel is tried in an empty venv.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	bash scripts/wheel.sh dist/*.whl "$(PYTHON)"

# The releases that the tests run with, so that a new one of another project turns nothing red. torch stays the one that is
# there, since a newer one may bring gigabytes for GPUs: scripts/compatible.sh tries others. Its build (+cpu) is left out.
upgrade: $(STAMP)
	$(BIN)/python -m pip freeze | grep '^torch==' | sed 's/+.*//' > .venv/torch.txt
	$(BIN)/python -m pip install --upgrade --upgrade-strategy eager --constraint .venv/torch.txt --editable ".[dev]"
	$(BIN)/python -m pip freeze --exclude-editable | sed '/^torch==/s/+.*//' > scripts/constraints.txt

clean:
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache
