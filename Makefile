# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test chaos soak check format matrix bench accuracy schema clean help

help:
	@echo "make demo    environment, then plan and train the default recipe on this machine"
	@echo "make test    environment, then the whole test suite"
	@echo "make chaos   every fault of docs/guides/fault-tolerance.md for real, and what is too slow for make test (30 minutes)"
	@echo "make soak    a fault a minute for 30 minutes; MINUTES=5 for less"
	@echo "make check   format, lint, types and the layer map, in seconds"
	@echo "make matrix  every axis and product of axes against one process; writes docs/parity.md (10 minutes)"
	@echo "make bench   the benchmarks that run on a CPU"
	@echo "make accuracy  the planner's errors beside other estimators'; WRITE=1 writes docs/accuracy.md"

demo: .venv/demo
	$(BIN)/trimaran train recipes/stdlib-tiny.yaml

test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

chaos: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m chaos

soak: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),30)

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/python -m pytest --noconftest --durations=0 --durations-min=1 tests/test_layers.py tests/test_budgets.py tests/test_docs.py

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

matrix: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.matrix --write docs/parity.md

bench: .venv/dev
	$(BIN)/python benchmarks/overhead.py

accuracy: .venv/dev
	$(BIN)/python -W ignore -m benchmarks.accuracy $(if $(WRITE),--write)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trimaran needs Python 3.11 or newer: make demo PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/demo

clean:
	rm -rf .venv runs
