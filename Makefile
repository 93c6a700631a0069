# Everything needed is set up by the targets themselves; a second call finds it done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-parallel test-faults lint clean

run: $(READY)
	$(BIN)/lopa race --max-new-tokens 128

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Groups of real processes, more of them than cores: not beside other tests.
test-parallel: $(READY)
	$(BIN)/python -m pytest tests/parallel -m parallel --durations 0

test-faults: $(READY)
	$(BIN)/python -m pytest tests/parallel -m faults --durations 0

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lopa needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'setuptools>=77' torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
