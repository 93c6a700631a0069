# Everything needed is set up by the targets themselves; a second call finds it done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BROWSER_READY := $(VENV)/.browser-ready

.PHONY: run test test-browser screenshots lint clean

run: $(READY)
	$(BIN)/lopa race --max-new-tokens 128

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Needs Chromium (apt-get install chromium), or its path in CHROMIUM.
test-browser: $(BROWSER_READY)
	$(BIN)/python -m pytest --browser tests/browser

screenshots: $(BROWSER_READY)
	$(BIN)/python -m pytest --browser --screenshots docs/images tests/browser/test_screenshots.py

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

$(BROWSER_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,browser]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
