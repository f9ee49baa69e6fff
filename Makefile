# make demo      the main job on the shipped corpus, in about five minutes (QUICK=1: about four)
# make demo-adapters  four machines specialise a public model, SmolLM2 (about half an hour)
# make test      what CI runs: lint, types, the site, and the tests that prove the promises; half an hour
# make test-all  every test, the slow ones too
# make pythons   what make test runs, with each promised Python that is here
# make nightly   test-all, each Python, drawn histories, fuzzing, and two hours of a calm swarm
# make setup     a virtual environment with everything; the other targets call it
# make wheel     dist/: the wheel, which is all that a volunteer's machine needs, and a source archive
# make docs      build/site/: the pages as a site, every link checked
# make pictures  docs/pages: the pictures of the page of a swarm, anew
# make lock      the versions and hashes of what CI and the container install, anew

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
QUICK ?=
NIGHTLY ?= build/nightly

.PHONY: demo demo-adapters test test-all pythons nightly setup lock wheel docs pictures lint types unit format clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements/dev.lock
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; install one or give PYTHON=..."; exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes --requirement requirements/dev.lock
	$(PIP) --editable '.[dev]'
	.ci/browser
	touch $@

# Without PyTorch: every kind of GPU has a build of its own.
define locked
	echo "torch; python_version < '3'" | $(BIN)/uv pip compile --quiet pyproject.toml $(2) \
		--override /dev/stdin --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--generate-hashes --no-annotate --no-header --upgrade --output-file $(1)
endef

lock: setup
	$(PIP) uv
	$(call locked,requirements/dipaco.lock,--extra mirrors --extra prepare)
	$(call locked,requirements/dev.lock,--extra mirrors --extra dev)

wheel: setup
	$(PIP) build
	$(BIN)/python -m build --outdir dist

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file site/mkdocs.yml

pictures: setup
	PYTHONPATH=tests $(BIN)/python -m support.swarms.pictures

demo: setup
	$(BIN)/python examples/demo.py $(if $(QUICK),--quick)

demo-adapters: setup
	$(BIN)/python examples/demo_adapters.py $(if $(QUICK),--quick)

test: lint types docs unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -z | xargs -0 $(BIN)/codespell

types: setup
	$(BIN)/mypy

# Three workers on two cores, because many tests wait for processes; of whole swarms two at once.
define tests
	$(BIN)/python -m pytest tests -m $(1) -n 3 --dist loadfile --ignore tests/swarm
	$(BIN)/python -m pytest tests/swarm -m $(1) -n 2 --dist loadfile
endef

unit: setup
	$(call tests,"not slow and not nightly")

test-all: lint types docs
	$(call tests,"not nightly")

pythons:
	for python in python3.11 python3.12 python3.13 python3.14; do \
		if $$python -c '' 2>/dev/null; then \
			$(MAKE) unit PYTHON=$$python VENV=build/$$python || exit 1; \
			rm -rf build/$$python; \
		fi \
	done

nightly: lint types docs pythons
	$(call tests,"slow or not slow")
	mkdir -p $(NIGHTLY)
	$(BIN)/python benchmarks/swarm_faults.py --seeds 2000 --profile all --jobs 2 --log $(NIGHTLY)/scan.jsonl
	$(PIP) 'atheris>=3'
	$(BIN)/python benchmarks/fuzz.py --folder $(NIGHTLY)/fuzz
	$(BIN)/python benchmarks/churn.py --scene calm --rounds 900 --peers 4 --out $(NIGHTLY)/soak

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build demo-run demo-adapters-run .mypy_cache .ruff_cache .pytest_cache
