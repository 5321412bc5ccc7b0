PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test test-eformer check demo bench format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Real eFormer beside this package: each reads what the other writes. It needs its own environment (it brings ray).
EFORMER := .venv-eformer
EFORMER_STAMP := $(EFORMER)/.installed

test-eformer: $(EFORMER_STAMP)
	$(EFORMER)/bin/python tests/eformer/run.py

$(EFORMER_STAMP): pyproject.toml
	test -x $(EFORMER)/bin/python || $(PYTHON) -m venv $(EFORMER)
	$(EFORMER)/bin/python -m pip install --quiet --disable-pip-version-check eformer==0.0.101 -e .
	touch $(EFORMER_STAMP)

check: setup
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/basedpyright

format: setup
	$(BIN)/ruff check --fix src tests bench examples
	$(BIN)/ruff format src tests bench examples

demo: setup
	$(BIN)/python examples/demo.py

bench: setup
	$(BIN)/python bench/run.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
