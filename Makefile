# `make demo` shows gnfuse at work, `make test` runs every check. Both make their own .venv first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# the name holds a checksum of what is installed, so a change of either file installs again
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
# one test process a core: compiling a graph is the work of one thread
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test lint kernels bench clean
.DELETE_ON_ERROR:

demo: kernels
	$(BIN)/python benchmarks/demo.py

test: lint kernels
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

kernels: $(STAMP)
	$(BIN)/python -m gnfuse.kernels

bench: kernels
	$(BIN)/python benchmarks/chains.py

$(STAMP):
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt setuptools
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
