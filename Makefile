# Every target makes .venv and installs what it needs on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Enough for lint and tests; torch's own threads would only fight with the test workers.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test lint format types unit bench parity clean

help:           ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

install: $(STAMP)  ## make .venv with orthomerge and its development tools

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## merge small experts with heads of different sizes, made on the spot
	$(BIN)/python examples/demo.py

test: lint types unit  ## everything that CI runs: lint, types, tests

lint: $(STAMP)  ## style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMP)  ## rewrite files in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

unit: $(STAMP)  ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

bench: $(STAMP)  ## side-by-side figures against mergekit (about 15 minutes; installs it in .venv-mergekit)
	$(BIN)/python benchmarks/merge.py

parity: $(STAMP)  ## compare with mergekit tensor by tensor (installs it in .venv-mergekit)
	$(BIN)/python benchmarks/parity.py

clean:          ## remove environments and caches
	rm -rf $(VENV) .venv-mergekit .pytest_cache .mypy_cache .ruff_cache .hypothesis
