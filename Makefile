# make demo   set everything up, train on digits in fp16 six ways, print tables, make a report
# make test   set everything up and run the tests
# make check  formatting, lint and types
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-gpu test-slow check format bench clean

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
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache *.egg-info
