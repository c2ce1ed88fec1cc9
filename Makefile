# Two commands for a newcomer: `make demo` and `make test`. Everything they need is set up here.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BOOTSTRAP_PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# schemathesis and what it needs, which is not what we need.
FUZZ := $(VENV)/fuzz
PYTEST := $(PY) -m pytest
# What the tiers of `make test` leave to others.
UNIT := unit

.PHONY: help setup demo demo-down lint unit controlplane cluster test soak bench causes generate fix lock

help: ## Show what can be done
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## Make the virtual environment (.venv)

$(READY): requirements/dev.txt requirements/fuzz.txt pyproject.toml
	@$(BOOTSTRAP_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed; set BOOTSTRAP_PYTHON to one" >&2; exit 1; }
	@$(BOOTSTRAP_PYTHON) -m venv --clear $(VENV) || \
	  { echo "the venv module is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes \
	  --target $(FUZZ) -r requirements/fuzz.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## Bring up a Kubernetes and run two real tool jobs on it
	$(PY) -m demo up

demo-down: $(READY) ## Take away what `make demo` has set up
	$(PY) -m demo down

test: lint unit controlplane cluster ## Run all tiers of tests, the fast ones first

lint: $(READY) ## Check style, types, direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

unit: $(READY) ## Run the tests that need nothing
	$(PYTEST) -q -m "$(UNIT)" --numprocesses auto --dist worksteal

controlplane: $(READY) ## Run the tests on a real API server without nodes
	$(PY) -m tests.cluster build --control-plane
	$(PY) -m tests.cluster binary helm > /dev/null
	$(PYTEST) -q -m "controlplane and not soak"

cluster: $(READY) ## Run the tests on a real node (root)
	$(PY) -m tests.cluster build
	$(PY) -m tests.cluster.imagebuild operator > /dev/null
	$(PYTEST) -q -m "cluster and not soak"

soak: $(READY) ## Run everything with large counts
	$(PY) -m tests.cluster build
	AGENTJOBS_SOAK=1 $(PYTEST) -q --timeout 3600

bench: $(READY) ## Measure a burst of jobs against bare Jobs; BENCH=gateway, BENCH=inbox: these
	$(if $(filter inbox,$(BENCH)),,$(PY) -m tests.cluster build --control-plane)
	$(PY) -m bench $(BENCH)

causes: $(READY) ## Write docs/causes.md from what the tests see on a real node (root)
	$(PY) -m tests.cluster build
	AGENTJOBS_RECORD_CAUSES=docs/causes.md \
	  $(PYTEST) -q -m "cluster and not soak" tests/e2e/test_causes.py tests/e2e/test_endings.py

generate: $(READY) ## Write crds/, the chart's CRDs, manifests/install.yaml
	$(PY) -m agentjobs.generate

fix: $(READY) ## Format, and mend what can be mended
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

lock: $(READY) ## Pin the newest versions of all dependencies, with hashes and without hosts
	$(VENV)/bin/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header \
	  --python-version 3.11 --extra operator pyproject.toml -o requirements/operator.txt
	$(VENV)/bin/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header \
	  --python-version 3.11 --extra operator --group dev pyproject.toml -o requirements/dev.txt
	$(VENV)/bin/uv pip compile --quiet --upgrade --universal --generate-hashes --no-header \
	  --python-version 3.11 --group fuzz -o requirements/fuzz.txt
