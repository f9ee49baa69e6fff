# make demo    the main job on the shipped corpus, in about ten minutes (QUICK=1: about four)
# make test    everything that CI runs: lint, types, tests
# make setup   a virtual environment with everything; the other targets call it

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null \
	&& { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := modules routing dht peer bootstrap inference simulator
QUICK ?=

.PHONY: demo test setup lint types unit browser format clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed; install one or give PYTHON=..."; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py $(if $(QUICK),--quick)

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads the package as a user has it: a regular install, not the working tree.
types: setup
	rm -rf build/lib build/typecheck
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy --config-file pyproject.toml $(foreach p,$(PACKAGES),-p dipaco.$(p))

# Three workers on two cores, because many tests wait for processes; of whole swarms two at once.
unit: setup
	$(BIN)/python -m pytest tests -n 3 --dist loadfile --ignore-glob='*/test_swarm_*'
	$(BIN)/python -m pytest tests/test_swarm_*.py -n 2 --dist loadfile

# The page of dipaco-serve in a real browser; needs Chromium, which CI does not have.
browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	$(BIN)/python benchmarks/model/browser.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build demo-run .mypy_cache .ruff_cache .pytest_cache
