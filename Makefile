# nri-numa: the two commands a newcomer needs are `make demo` and `make test`.
# Everything is installed into .venv, from pinned versions with hashes; nothing outside is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := requirements/lock.txt
PYTEST := $(BIN)/pytest
UV := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit coverage test-e2e test-vm test-vm-all fuzz soak lint format check bench proto schema docs lock clean

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the virtual environment (demo and test do it by themselves)

$(STAMP): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("nri-numa needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: on Debian, apt-get install python3-venv"; exit 3; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(REQUIREMENTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Run the main job against the embedded runtime
	@$(BIN)/nri-numa demo

test: $(STAMP) ## All tests; those that need root, containerd or VMs run when they can and say why not
	$(PYTEST)

test-unit: $(STAMP) ## Only the tests that need nothing but Python
	$(PYTEST) -m "not e2e and not vm and not browser"

coverage: $(STAMP) ## The pure packages must be covered completely, branches included
	$(PYTEST) -q tests/perf
	$(PYTEST) -q -n 2 tests/unit/engine tests/unit/protocol tests/unit/topology tests/unit/cli tests/scenarios tests/properties tests/integration/test_captured_machines.py --cov --cov-config=tests/pure_coverage.ini

test-e2e: $(STAMP) ## The tests against real containerd (root)
	$(PYTEST) -m e2e

test-vm: $(STAMP) ## The core set of virtual machines (root)
	NRI_NUMA_VM=core $(PYTEST) -m vm

test-vm-all: $(STAMP) ## Every virtual machine (root; takes a while)
	NRI_NUMA_VM=all $(PYTEST) -m vm

lint: $(STAMP) ## Format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Put the code into form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint coverage docs test ## What CI runs

bench: $(STAMP) ## Measure, and print the tables of docs/performance.md
	$(BIN)/python -m bench

fuzz: $(STAMP) ## Fuzz the parsers for ten minutes
	$(BIN)/python -m tests.fuzz --seconds 600

soak: $(STAMP) ## 10,000 pods through the embedded runtime, 500 through containerd
	$(BIN)/python -m tests.soak

proto: $(STAMP) ## Generate the protobuf code again
	$(BIN)/python proto/generate.py
	$(BIN)/python proto/generate_cri.py

schema: $(STAMP) ## Generate again what follows from the configuration and the commands
	$(BIN)/python -m nri_numa.config.schema config
	$(BIN)/python -m tools.helm_schema
	$(BIN)/python -m tools.docs_regions

# The site has an environment of its own: none of its packages is needed to run or test.
DOCS_VENV := build/docs-venv
DOCS_STAMP := $(DOCS_VENV)/.installed

$(DOCS_STAMP): requirements/docs.txt
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

docs: $(DOCS_STAMP) ## Build the documentation into build/site, and check its links
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict
	$(DOCS_VENV)/bin/python tools/docs_check.py --site build/site

lock: ## Resolve the dependencies anew (needs uv in the environment)
	$(UV) pyproject.toml requirements/test.in requirements/lint.in requirements/vm.in -o $(REQUIREMENTS)
	$(UV) requirements/docs.in -o requirements/docs.txt

clean: ## Remove what was built, the environment included
	rm -rf $(VENV) build dist site artifacts *.egg-info
