# Every target makes .venv and installs what it needs on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test lint format types unit golden bench start walk lowest memory every features align tangent arithmetic digits text8 vision8 fitted moma gpumerge gallery parity docs fuzz crash soak lock audit sbom release clean

help:           ## list the targets
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

install: $(STAMP)  ## make .venv with orthomerge and its development tools

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	@touch $@

# The demo installs no development tools; where .venv has them already, it uses that.
DEMO := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
.venv-demo/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	$(subst $(BIN),.venv-demo/bin,$(PIP)) torch==2.13.0
	$(subst $(BIN),.venv-demo/bin,$(PIP)) --editable '.[suites,report]'
	@touch $@

demo: $(DEMO)/.installed  ## the whole story on seven small tasks: experts, merges, aligned heads (minutes, on a CPU)
	$(DEMO)/bin/python examples/demo.py

test: lint types unit  ## everything that CI runs: lint, types, tests

lint: $(STAMP)  ## style, and which package imports which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

format: $(STAMP)  ## rewrite files in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

unit: $(STAMP)  ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

AGAINST ?= HEAD
golden: $(STAMP)  ## tensors, scores and exit codes of 80 small commands beside those of AGAINST=COMMIT (minutes)
	$(BIN)/python -m tests.golden --against $(AGAINST)

bench: $(STAMP)  ## CPU time and memory beside mergekit (6 minutes; installs it in .venv-mergekit); or beside AGAINST=COMMIT
	$(BIN)/python benchmarks/merge.py $(if $(filter-out HEAD,$(AGAINST)),--against $(AGAINST))

start: $(STAMP)  ## CPU time of a fit until its first step, beside AGAINST=COMMIT (a minute)
	$(BIN)/python benchmarks/first_step.py --against $(AGAINST)

walk: $(STAMP)  ## what every command reads, hashes and writes, counted on tiny inputs (a minute)
	$(BIN)/python tools/walk.py

lowest: $(STAMP)  ## the tests with the oldest versions that pyproject.toml allows, torch apart (installs them in .venv-lowest)
	$(PYTHON) -m venv .venv-lowest
	$(BIN)/python tools/lowest.py > .venv-lowest/constraints.txt
	$(subst $(BIN),.venv-lowest/bin,$(subst constraints.txt,.venv-lowest/constraints.txt,$(PIP))) torch==2.13.0
	$(subst $(BIN),.venv-lowest/bin,$(subst constraints.txt,.venv-lowest/constraints.txt,$(PIP))) --editable '.[test]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/pytest -n 2 --dist worksteal

memory: $(STAMP)  ## memory of merging a synthetic 4 GB model (half an hour, 16 GB of disk)
	$(BIN)/python benchmarks/memory.py

every: $(STAMP)  ## every method on BERT-base-sized experts, exported and compared with stock transformers (half an hour)
	$(BIN)/python benchmarks/every_method.py

features: $(STAMP)  ## throughput of feature extraction beside the bare forward
	$(BIN)/python benchmarks/features.py

align: $(STAMP)  ## CPU time of aligners in closed form, and the papers' gradients beside them (a quarter of an hour)
	$(BIN)/python benchmarks/align.py

arithmetic: $(STAMP)  ## task negation and analogies on the digits suite (a quarter of an hour, then minutes)
	$(BIN)/python benchmarks/arithmetic.py

tangent: $(STAMP)  ## ordinary, linearised and tau-Jp experts of the digits suite, merged at every lambda (90 minutes)
	$(BIN)/python benchmarks/tangent.py

digits: $(STAMP)  ## every protocol and aligner on the embedded suite (half an hour on 2 cores)
	$(BIN)/python benchmarks/suite.py digits

text8: $(STAMP)  ## eight real text tasks from ../shared/data (a GPU, or hours)
	$(BIN)/python benchmarks/suite.py text8

vision8: $(STAMP)  ## eight real image tasks from ../shared/data (a GPU, or hours)
	$(BIN)/python benchmarks/suite.py vision8

fitted: $(STAMP)  ## every fitted merge on the embedded suite, as in MOMA's tables (hours on 2 cores; less with --parts)
	$(BIN)/python benchmarks/fitted.py --suite digits --steps 300

moma: $(STAMP)  ## what a step of MOMA costs beside plain fine-tuning (a GPU)
	$(BIN)/python benchmarks/moma.py

gpumerge: $(STAMP)  ## methods that decompose matrices on a GPU and on the CPU (a GPU)
	$(BIN)/python benchmarks/gpu_merge.py

gallery: $(STAMP)  ## the papers' figures on the embedded suite, as docs/gallery/digits.md (minutes); more with --suite
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gallery.py --suite digits --scale task_arithmetic=0.3 --steps 200

COUNT ?= 120000
fuzz: $(STAMP)  ## COUNT mutations of valid files (4 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --count $(COUNT) --write

parity: $(STAMP)  ## compare with mergekit tensor by tensor (installs it in .venv-mergekit)
	$(BIN)/python benchmarks/parity.py

docs: $(STAMP)  ## build the documentation into site/ (half a minute); open site/index.html
	$(BIN)/python -m sphinx -W --keep-going -q -E -b html -c docs . site

crash: $(STAMP)  ## fail, kill and interrupt at every call that changes a file (an hour on 2 cores)
	CRASH_POINTS=all OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist load tests/faults/test_crash_points.py tests/faults/test_signals.py

soak: $(STAMP)  ## 500 merges in a row with random kills, a run and a sweep killed ten times, 64 jobs at once (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py

UV := .venv-uv/bin/uv
$(UV):
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip --disable-pip-version-check install --quiet uv==0.13.8

lock: $(UV)     ## write requirements-dev.lock anew: constraints.txt with the hashes of all platforms (seconds)
	rm -f requirements-dev.lock  # uv would keep the hashes that are in it
	$(UV) pip compile --quiet --no-deps --no-header --no-annotate --generate-hashes constraints.txt --output-file requirements-dev.lock

audit: $(STAMP)  ## known vulnerabilities of what is locked (needs the network; installs pip-audit in .venv-audit)
	test -x .venv-audit/bin/pip-audit || ($(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install --quiet pip-audit)
	.venv-audit/bin/pip-audit --strict --requirement requirements-dev.lock --disable-pip --no-deps

SBOM = dist/orthomerge-$$($(PYTHON) -c "import runpy; print(runpy.run_path('src/orthomerge/core/version.py')['VERSION'])").cdx.json
sbom: $(UV)     ## what users install, as CycloneDX: dist/orthomerge-VERSION.cdx.json (a part of every release)
	mkdir -p dist
	$(UV) export --quiet --preview --extra all --no-dev --format cyclonedx1.5 --output-file $(SBOM) > /dev/null

release: $(STAMP) $(UV)  ## dist/ as it is published: source, wheel, bill of materials and their checksums
	rm -rf dist
	$(PIP) build
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --quiet
	$(MAKE) sbom
	cd dist && sha256sum * > SHA256SUMS

clean:          ## remove environments and caches
	rm -rf $(VENV) .venv-demo .venv-lowest .venv-mergekit .venv-audit .venv-uv uv.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis
