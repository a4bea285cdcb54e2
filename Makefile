# make demo   set everything up, train on digits in fp16 six ways, print tables, make a report
# make test   set everything up and run the tests
# make soak   trainings that everything happens to, for MINUTES=10
# make check  formatting, lint and types
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-gpu test-slow test-mxnet soak check format bench clean

help:
	@sed -n 's/^# //p' Makefile

.venv/.ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: .venv/.ready
	$(BIN)/gradlift demo

test: .venv/.ready
	$(BIN)/python -m pytest -n 2

# Needs a CUDA device, and runs from the source tree with whatever torch is at hand.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu

test-slow: .venv/.ready
	$(BIN)/python -m pytest -m slow

# Goes on where it was when FOLDER is given again.
MINUTES ?= 10
SEED ?= 1

soak: .venv/.ready
	PYTHONPATH=. $(BIN)/python tests/soak.py --minutes $(MINUTES) --seed $(SEED) $(if $(FOLDER),--folder $(FOLDER))

# MXNet is retired: Python 3.10 or 3.11, an old numpy, an environment of its own.
MXNET_PYTHON ?= $(PYTHON)

.venv-mxnet/.ready: requirements-mxnet.txt
	$(MXNET_PYTHON) -m venv .venv-mxnet
	.venv-mxnet/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-mxnet.txt
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

clean:
	rm -rf .venv .venv-mxnet .pytest_cache .hypothesis .ruff_cache *.egg-info
