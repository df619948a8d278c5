# From nothing: a Python 3.11+ with pip, and a C++ compiler.
#   make bench   trains a small GPT eager and with remat, prints the table, writes JSON and PNG
#   make test    lint, types and tests
#   make test-all   the same with the tests that take minutes each
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: bench test test-all lint types tests clean

bench: $(STAMP)
	@echo "== bench: python -m bench.train $(ARGS)"
	$(BIN)/python -m bench.train $(ARGS)

test: lint types tests

test-all:
	$(MAKE) test ARGS="--slow $(ARGS)"

lint: $(STAMP)
	@echo "== lint: ruff"
	$(BIN)/ruff check .

types: $(STAMP)
	@echo "== types: mypy"
	$(BIN)/mypy

tests: $(STAMP)
	@echo "== tests: pytest (two workers, one torch thread each)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

# torch first and by its exact version: pip then has no reason to look at other builds of it.
$(STAMP): pyproject.toml constraints.txt
	@echo "== install: a virtual environment in $(VENV) with the tested versions"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,bench,dev,triton]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
