# Everything from a bare clone: `make train` and `make test`. Each step leaves a stamp, so nothing is done twice.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# Open MPI refuses to run as root, as one does in a container, unless told that it is meant.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

RANKS ?= 2
ARGS ?=
# With more ranks than cores they share; --bind-to none leaves the choice of cores to the system.
MPIRUN := $(BIN)/mpirun -n $(RANKS) --oversubscribe --bind-to none

TESTS ?= tests
WORKERS ?= 2

.PHONY: train test lint format clean

train: .venv/installed
	$(MPIRUN) $(BIN)/python examples/train_gpt.py $(ARGS)

# Files go to workers in the order of tests/conftest.py, the longest first.
# ORACLES=1 also installs PyTorch, transformers and ONNX, and compares with them live instead of with golden values.
test: .venv/installed-test $(if $(ORACLES),.venv/installed-oracles)
	$(if $(ORACLES),NUMSTACK_ORACLES=1) $(BIN)/python -m pytest $(TESTS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

.venv/installed-oracles: .venv/installed-test
	$(BIN)/pip install --quiet --editable '.[test,oracles]'
	touch $@

clean:
	rm -rf .venv runs build dist *.egg-info
