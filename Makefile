# The same targets at the desk and in CI. Every target does all of its own set-up; `make` alone lists them.

# The interpreter to use: `make test PYTHON=python3.13`. Each one gets a virtual environment of its own, so they can live side by side.
DEFAULT_PYTHON := $(shell command -v python3.11 >/dev/null 2>&1 && echo python3.11 || echo python3)
PYTHON ?= $(DEFAULT_PYTHON)
# A package index to take torch from before everything else, for example one with CPU-only builds (200 MB to download instead of 3 GB).
TORCH_INDEX ?=
# Passed on to the program behind the target: `make test ARGS="tests/backend -x"`, `make demo ARGS="--steps 50"`.
ARGS ?=
# Processes that share the tests, file by file. Most tests spend part of their time waiting, so there is one more process than two cores can
# run. With JOBS=0 the tests run in one process, which a debugger needs.
JOBS ?= 3

VENV := .venv$(if $(filter-out $(DEFAULT_PYTHON),$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# pyenv's shims run only a version that was chosen with this variable; other interpreters ignore it.
RUN_PYTHON := PYENV_VERSION=$(patsubst python%,%,$(notdir $(PYTHON))) $(PYTHON)
UV := $(shell command -v uv 2>/dev/null)
ifdef UV
MAKE_VENV = $(UV) venv --quiet --python "$$($(RUN_PYTHON) -c 'import sys; print(sys.executable)')" $(VENV)
INSTALL = $(UV) pip install --compile-bytecode --python $(BIN)/python
else
MAKE_VENV = $(RUN_PYTHON) -m venv $(VENV)
INSTALL = $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check
endif

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu check docs faults conformance bench proto compose-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: PYTHON=$(PYTHON) (environment in $(VENV)), ARGS, TORCH_INDEX"

demo: $(STAMP) ## train a small language model on a local cluster of two workers, in about three minutes
	$(BIN)/shardnet demo $(ARGS)

# The tests start some hundred processes. If the environment forbids keeping bytecode, each of them would compile the package again.
test faults: export PYTHONDONTWRITEBYTECODE :=

faults: export SHARDNET_TO_THE_LETTER := 1

# A process that crashes ends the run: with another one in its place, pytest-xdist 3.8 runs the same test again, and then waits for ever.
test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 $(ARGS)

check: $(STAMP) ## formatting, lint, types, import rules, and whether the generated protobuf code is current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check

docs: $(STAMP) ## build the documentation into build/docs; a link that leads nowhere is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky --fresh-env -c docs $(ARGS) . build/docs
	@echo "build/docs/index.html"

faults: $(STAMP) ## run the long fault tests, which `make test` leaves out, and those of promises in seconds, to the letter
	$(BIN)/python -m pytest -m faults --timeout 600 $(ARGS)
	grep -rl --include='test_*.py' 'tests.promises' tests | xargs $(BIN)/python -m pytest

test-gpu: $(STAMP) ## run the tests that need a GPU, which skip themselves in `make test` where there is none
	$(BIN)/python -m pytest -n $(JOBS) --max-worker-restart 0 tests/gpu $(ARGS)

conformance: $(STAMP) ## run torch's own tests of a process group on the backend "shardnet", in three minutes
	$(BIN)/python tests/interop/conformance.py $(ARGS)
	$(BIN)/python -m pytest -m conformance

bench: $(STAMP) ## measure everything against torch's gloo and FSDP2, 45 minutes; writes benchmarks/latest.json and benchmarks/results
	$(BIN)/python -m benchmarks $(or $(ARGS),--results benchmarks/results)

proto: $(STAMP) ## generate shardnet/pb from protos/
	$(BIN)/python protos/generate.py

compose-test: ## run the cluster of compose.yaml and hurt it; only checks its syntax where no container engine is up
	PYTHONPATH=docker $(RUN_PYTHON) -m compose_test $(ARGS)

clean: ## remove environments, caches and build; what runs have written stays
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(MAKE_VENV)
ifneq ($(TORCH_INDEX),)
	$(INSTALL) --index-url $(TORCH_INDEX) -c constraints.txt torch
endif
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@
