# One entry point for people and for CI. `make help` lists the targets.
#
# Everything runs from an environment of its own in .venv (override: make VENV=...). A stamp
# file remembers what is installed, so a second call starts at once. Paths are relative: a
# checkout whose path has spaces works.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint type bench docs clean
.DELETE_ON_ERROR:

VENV ?= .venv
PYTEST_JOBS ?= auto
PYTEST_ARGS ?=
DEMO_OUT ?= demo-out
PY := $(VENV)/bin/python
PACKAGES := prismtrace prismcalib prismreplay
GENERATED := schemas cli api_page errors diagrams

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.demo ## emulate a job of 8 ranks here, then run it truly and compare
	@PATH="$(VENV)/bin:$$PATH" bash examples/demo.sh "$(DEMO_OUT)"

test: lint type ## lint, types and all tests
	$(PY) -m pytest -n $(PYTEST_JOBS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.dev ## format check and lint rules
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

type: $(VENV)/.dev ## mypy --strict on the three packages
	$(PY) -m mypy

bench: $(VENV)/.dev ## run every benchmark script (minutes; wants a quiet machine)
	@for script in benchmarks/*.py; do echo "== $$script"; PYTHONPATH=. $(PY) "$$script"; done

docs: $(VENV)/.dev ## write generated pages and schemas anew, build the site in build/site
	$(PY) -m pytest -q $(GENERATED:%=tests/contract/test_%.py) --regenerate
	$(PY) docs/site/build.py

clean: ## remove the environment, caches and the demo's output
	rm -rf "$(VENV)" "$(DEMO_OUT)" build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The first Python that is new enough makes the environment; PYTHON=... chooses another.
$(PY):
	@for candidate in $${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating $(VENV) with $$("$$candidate" --version)"; \
	        "$$candidate" -m venv "$(VENV)" && exit 0; \
	        echo "error: $$candidate cannot create an environment" >&2; \
	        echo "  hint: on Debian and Ubuntu: apt install python3-venv" >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "error: no Python 3.11 or newer found" >&2; \
	echo "  hint: install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1

# Without a GPU the constraint takes the torch release that is tested there, not the newest. On Linux
# PyPI's build of it is for CUDA, several GB; for the CPU build of the same release, let pip see it:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
$(VENV)/.demo: EXTRAS := calib,replay
$(VENV)/.dev: EXTRAS := dev,replay
$(VENV)/.demo $(VENV)/.dev: pyproject.toml constraints-cpu.txt | $(PY)
	@constraint="-c constraints-cpu.txt"; \
	if { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1; then constraint=""; fi; \
	echo "installing prismllm-toolkit[$(EXTRAS)] into $(VENV)"; \
	$(PY) -m pip install --quiet --disable-pip-version-check $$constraint -e '.[$(EXTRAS)]'
	@touch $@
