# make demo   set up what it needs, train on digits in fp16 six ways, print tables, make a report
# make test   set everything up and run the tests
# make test-long  the tests that take longer, which CI runs as well
# make soak   trainings that everything happens to, for MINUTES=10
# make check  formatting, lint and types
# make docs   build the documentation into site/
# make dist   build sdist and wheel into dist/, and run the README with the installed wheel
PYTHON ?= python3
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-long test-gpu test-slow test-mxnet test-oldest soak check format bench docs dist clean

help:
	@sed -n 's/^# make/make/p' Makefile

.venv/.ready: requirements.txt requirements-demo.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -r requirements.txt
	$(BIN)/python $(PIP) --no-deps -e .
	@touch $@

# An environment of its own: a quarter of what the tests need.
.venv-demo/.ready: requirements-demo.txt pyproject.toml
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python $(PIP) -r requirements-demo.txt
	.venv-demo/bin/python $(PIP) --no-deps -e .
	@touch $@

# Where the tests' environment is there already, it serves.
ifeq ($(wildcard .venv/.ready),)
DEMO := .venv-demo
else
DEMO := .venv
endif

demo: $(DEMO)/.ready
	$(DEMO)/bin/gradlift demo

test: .venv/.ready
	$(BIN)/python -m pytest -n 2

# Needs a CUDA device, and runs from the source tree with the packages at hand: in parallel where
# xdist is one of them, without any other plugin, since these may warn or reorder tests.
test-gpu:
	PYTHONPATH=. PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PYTHON) -m pytest -m gpu \
	  $$($(PYTHON) -c "import xdist" 2>/dev/null && echo "-p xdist.plugin -n auto --maxprocesses 8")

# Named in tests/long.txt.
test-long: .venv/.ready
	$(BIN)/python -m pytest -n 2 -m "long and not slow"

test-slow: .venv/.ready
	$(BIN)/python -m pytest -m slow

# The oldest torch that is declared. 5.6 GB, so it is not part of .ci/run. Its Triton's interpreter
# is older than the numpy that this Python has, and warns.
.venv-oldest/.ready: requirements.txt requirements-demo.txt pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python $(PIP) torch==2.6.0 "numpy<2.3" scikit-learn rich matplotlib \
	  pytest pytest-xdist hypothesis
	.venv-oldest/bin/python $(PIP) --no-deps -e .
	@touch $@

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -m pytest -n 2 -m "not slow" -W "ignore:Conversion of an array with ndim" \
	  tests/test_torch_*.py tests/test_report*.py

# Goes on where it was when FOLDER is given again.
MINUTES ?= 10
SEED ?= 1

soak: .venv/.ready
	PYTHONPATH=. $(BIN)/python tests/soak.py --minutes $(MINUTES) --seed $(SEED) $(if $(FOLDER),--folder $(FOLDER))

# MXNet is retired: Python 3.10 or 3.11, an old numpy, an environment of its own.
MXNET_PYTHON ?= $(PYTHON)

.venv-mxnet/.ready: requirements-mxnet.txt
	$(MXNET_PYTHON) -m venv .venv-mxnet
	.venv-mxnet/bin/python $(PIP) -r requirements-mxnet.txt
	@touch $@

test-mxnet: .venv-mxnet/.ready
	PYTHONPATH=. .venv-mxnet/bin/python -m pytest tests_mxnet

# On the machine at hand; a GPU where there is one.
bench:
	PYTHONPATH=. $(PYTHON) benchmarks/step_overhead.py

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv-docs/.ready: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(PIP) -r requirements-docs.txt
	@touch $@

# Reads the sources, imports none of them, and loads nothing from elsewhere.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# The wheel goes into an empty environment, and the README's loop runs with it. For PyPI with
# URL=https://..., the repository's address: links of the README are relative without it.
URL ?=

dist:
	rm -rf dist build .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(PIP) build==1.3.0 twine==6.2.0
	GRADLIFT_URL=$(URL) .venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/python -m twine check --strict dist/*
	rm -rf .venv-dist && $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(PIP) torch==2.13.0 numpy==2.4.6
	.venv-dist/bin/python $(PIP) dist/*.whl
	.venv-dist/bin/python tests/run_page.py README.md
	rm -rf .venv-dist

clean:
	rm -rf .venv .venv-demo .venv-dist .venv-docs .venv-mxnet .venv-oldest build dist site
	rm -rf .pytest_cache .hypothesis .ruff_cache *.egg-info
