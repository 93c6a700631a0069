# Everything needed is set up by the targets themselves; a second call finds it done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
BROWSER_READY := $(VENV)/.browser-ready

# Modules are compiled when they are first imported. Tests start many processes: what is compiled is kept, even where
# Python is told to keep nothing.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-engine test-schemas test-parallel test-faults test-browser screenshots
.PHONY: test-serving-soak test-ray test-harness test-judge lint docs dist test-dist audit extras clean

# $(call step,what is done,command): says so first, and on a terminal counts the seconds meanwhile.
define step
@echo '$(1) …'; \
if [ -t 1 ]; then (n=0; while sleep 1 && kill -0 $$$$; do n=$$((n + 1)); printf '\r%s s ' $$n; done) 2>/dev/null & \
trap "kill $$!; printf '\r'" EXIT; fi; $(2)
endef

run: $(INSTALLED)
	@$(BIN)/lopa race

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# A soak of the engine, whole decodes in Triton's interpreter, the rest of the recorded runs, a training run, the
# examples, and the questions of the documentation.
test-engine: $(READY)
	$(BIN)/python -m pytest tests/engine tests/kernels tests/models tests/recipes tests/runner tests/test_recorded.py tests/test_doc_questions.py -m engine -n 2 --dist worksteal

# Answers that have to fit, hundreds of made-up schemas and regexes among them.
test-schemas: $(READY)
	$(BIN)/python -m pytest tests/engine tests/grammar -m schemas -n 2 --dist worksteal

# Needs Chromium (apt-get install chromium), or its path in CHROMIUM. Frames are counted and timed: first and alone.
test-browser: $(BROWSER_READY)
	$(BIN)/python -m pytest --browser tests/browser/test_smoothness.py
	$(BIN)/python -m pytest --browser tests/browser --ignore tests/browser/test_smoothness.py -n 2 --dist worksteal

screenshots: $(BROWSER_READY)
	$(BIN)/python -m pytest --browser --screenshots docs/images tests/browser/test_screenshots.py

# Minutes of load, faults and made-up requests against a server. The load goes first and alone:
# it is timed.
test-serving-soak: $(READY)
	$(BIN)/python -m pytest tests/serving/test_load.py -m soak -s
	$(BIN)/python -m pytest tests/serving --ignore tests/serving/test_load.py -m soak -n 2 --dist worksteal

test-ray: $(VENV)/.ray
	$(BIN)/python -m pytest tests/serving/test_ray.py -m ray

$(VENV)/.ray: $(READY)
	$(INSTALL) --no-build-isolation --editable '.[dev,ray]'
	touch $@

# lm-evaluation-harness and EvalPlus on local files.
test-harness: $(VENV)/.harness
	$(BIN)/python -m pytest tests/evaluation -m harness -n 2 --dist worksteal

# The judge of generated code: on every Python from 3.11 that is here, as root, as a user, and in a
# user namespace.
test-judge: $(READY)
	$(BIN)/python -m pytest tests/evaluation/test_judge_matrix.py -m judge -n 2 --dist worksteal

# EvalPlus without its clients of paid services, which want an older protobuf than Ray has.
EVALPLUS_NEEDS := appdirs fire multipledispatch psutil tempdir termcolor tree-sitter tree-sitter-python wget
$(VENV)/.harness: $(READY)
	$(INSTALL) --no-build-isolation --editable '.[dev,harness]' $(EVALPLUS_NEEDS)
	$(INSTALL) --no-deps evalplus
	touch $@

# Known vulnerabilities of the versions in use, where PyPI can be asked.
audit: $(READY)
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)-audit/bin/pip-audit --no-deps --disable-pip --progress-spinner off --requirement constraints.txt

# Groups of real processes, more of them than cores: not beside other tests.
test-parallel: $(READY)
	$(BIN)/python -m pytest tests/distributed tests/studies -m parallel --durations 0

test-faults: $(READY)
	$(BIN)/python -m pytest tests/distributed -m faults --durations 0

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in build/site. A link that leads nowhere is an error (not with --quiet).
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.docs: $(READY)
	$(INSTALL) --no-build-isolation --editable '.[dev,docs]'
	touch $@

# A wheel and an sdist.
dist: $(READY)
	rm -rf dist $(VENV)-dist
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	$(VENV)-dist/bin/python -m build --outdir dist .
	$(VENV)-dist/bin/twine check --strict dist/*

# The wheel in a new environment, outside of the clone.
test-dist: dist
	$(PYTHON) -m venv --clear $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	bin=$$PWD/$(VENV)-dist/bin && cd /tmp && $$bin/lopa race --decoders d2f,lopa --branches 3

# What it takes to run: PyTorch, lopa and its server.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lopa needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(call step,Making $(VENV),$(PYTHON) -m venv $(VENV))
	$(call step,Installing PyTorch: about a minute; the first time it is downloaded too,$(INSTALL) 'setuptools>=77' torch)
	$(call step,Installing lopa and what it needs,$(INSTALL) --no-build-isolation --editable '.[serve]')
	@touch $@

$(READY): $(INSTALLED)
	$(call step,Installing what the tests need,$(INSTALL) --no-build-isolation --editable '.[dev]')
	@touch $@

$(BROWSER_READY): $(READY)
	$(INSTALL) --no-build-isolation --editable '.[dev,browser]'
	touch $@

# What all of these need beside READY, in one go: each time pip looks at everything.
extras: $(READY)
	$(INSTALL) --no-build-isolation --editable '.[dev,browser,docs,ray,harness]' $(EVALPLUS_NEEDS)
	$(INSTALL) --no-deps evalplus
	touch $(BROWSER_READY) $(VENV)/.docs $(VENV)/.ray $(VENV)/.harness

clean:
	rm -rf $(VENV) $(VENV)-audit $(VENV)-dist build dist src/*.egg-info
