# nri-numa: the two commands a newcomer needs are `make demo` and `make test`.
# Everything is installed into .venv, from pinned versions with hashes; nothing outside is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NODE_STAMP := $(VENV)/.node
REQUIREMENTS := requirements/lock.txt
NODE_REQUIREMENTS := requirements/runtime.txt requirements/build.txt
PYTEST := $(BIN)/pytest
# The tests that have to go through every branch of the pure packages.
COVERED := tests/unit/engine tests/unit/model tests/unit/nri/wire tests/unit/machine tests/unit/cli tests/scenarios tests/properties tests/integration/test_captured_machines.py
UV := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate

.DEFAULT_GOAL := help
.PHONY: help setup node demo test test-all slow coverage covered test-e2e test-browser test-release test-vm test-vm-all test-kube kube fuzz fuzz-guided mutation recorded soak lint lint-workflows format check bench cluster density headline proto schema sbom release sizes kubectl docs interpreters lock clean

help: ## Show what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the virtual environment (demo and test do it by themselves)

# Root must not run what somebody else can write: a copy, in a folder of root's.
NODE ?= /opt/nri-numa

node: ## For a node, as root: only what the plugin needs to run, in NODE=/opt/nri-numa
	@mkdir -p $(NODE) 2> /dev/null; test -w $(NODE) || { echo "cannot write $(NODE): run as root, or choose another folder: make node NODE=DIR"; exit 3; }
	@umask 022; test -x $(NODE)/bin/python || $(PYTHON) -m venv $(NODE) || { echo "cannot make a virtual environment: on Debian, apt-get install python3-venv"; exit 3; }
	@umask 022; $(NODE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes $(NODE_REQUIREMENTS:%=-r %)
	@umask 022; tree=$$(mktemp -d) && trap 'rm -rf "$$tree"' EXIT && cp -R pyproject.toml README.md LICENSE nri_numa "$$tree" && chmod -R go-w "$$tree" && \
	$(NODE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall "$$tree"
	@echo "$(NODE)/bin/nri-numa"

# $(call environment,FILES): make the environment with what the files pin, and install this tree.
define environment
	@$(PYTHON) -c 'import sys; sys.exit("nri-numa needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: on Debian, apt-get install python3-venv"; exit 3; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes $(1:%=-r %)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
endef

$(STAMP): $(REQUIREMENTS) pyproject.toml
	$(call environment,$(REQUIREMENTS))

$(NODE_STAMP): $(NODE_REQUIREMENTS) pyproject.toml
	$(call environment,$(NODE_REQUIREMENTS))

# It needs the packages of a node; an environment that has more serves as well.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(NODE_STAMP)) ## Run the main job against the embedded runtime
	@$(BIN)/nri-numa demo

# Folders that a run before has tested already; CI names those of `make coverage`.
WITHOUT :=
PARALLEL := -n auto --maxprocesses=8

test: $(STAMP) ## What needs only Python, and as root the core of real containerd; says what it left out
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-quick} $(PYTEST) -q $(PARALLEL) -m "not e2e and not vm and not kube and not browser and not release" --ignore=tests/perf $(WITHOUT:%=--ignore=%) --junitxml=artifacts/tests/python.xml
	@if [ "$$(id -u)" = 0 ]; then set -x; NRI_NUMA_SERIES=1.7 NRI_NUMA_RACE_ROUNDS=5 $(PYTEST) -q -m core --junitxml=artifacts/tests/core.xml tests/e2e; \
	else echo "left out: the core of real containerd, which needs root"; fi
	@echo "everything: make test-all (root)"

test-all: $(STAMP) ## Everything: all series of containerd, all virtual machines, Kubernetes, many examples (root; hours)
	$(BIN)/python -m tests.lanes --thorough

slow: $(STAMP) ## What the tests of the last run cost, and the slowest of them
	@$(BIN)/python -m tests.slow

coverage: $(STAMP) ## The pure packages must be covered completely, branches included
	$(PYTEST) -q tests/perf --junitxml=artifacts/tests/perf.xml
	$(PYTEST) -q -n 2 $(COVERED) --cov --cov-config=tests/pure_coverage.ini --junitxml=artifacts/tests/coverage.xml

covered:
	@echo $(COVERED)

test-e2e: $(STAMP) ## The tests against real containerd (root)
	$(PYTEST) -m e2e

test-browser: $(STAMP) ## The page in headless Chromium
	$(PYTEST) tests/browser

test-release: $(STAMP) ## A release built twice: the same bytes
	$(PYTEST) -m release tests/shipped

test-vm: $(STAMP) ## The core set of virtual machines (root)
	NRI_NUMA_VM=core $(PYTEST) -m vm

test-vm-all: $(STAMP) ## Every virtual machine (root; takes a while)
	NRI_NUMA_VM=all $(PYTEST) -m vm

test-kube: $(STAMP) ## The tests in a real Kubernetes, built once (root)
	$(BIN)/python -m tests.beds.kube.build
	NRI_NUMA_REQUIRE_KUBE=1 $(PYTEST) -m kube

# Suites of Debian and names in PATH; python3.12 is in no suite. arm64 is the bundle, emulated.
INTERPRETERS := trixie sid python3.12 arm64

interpreters: $(STAMP) ## The core of the tests on newer Pythons and on arm64 (root)
	$(BIN)/python -m tests.interpreters $(INTERPRETERS)

kube: $(STAMP) ## A shell with kubectl in front of a real Kubernetes with nri-numa (root)
	@$(BIN)/python -m tests.kube

lint: $(STAMP) ## Format, lint, types, import rules, names, conditions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini bench tools tests
	$(BIN)/lint-imports
	$(BIN)/python -m tools.name_counts
	$(BIN)/python -m tools.text_reads
	$(BIN)/python -m tools.condition_counts

# Elsewhere than in the environment: nothing else needs them.
build/workflows: requirements/workflows.txt | $(STAMP)
	@rm -rf $@ $@.part
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $@.part -r requirements/workflows.txt
	@mv $@.part $@ && touch $@

lint-workflows: build/workflows ## The workflows of .github, by zizmor
	build/workflows/bin/zizmor --offline --quiet .github

format: $(STAMP) ## Put the code into form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(STAMP) ## What CI runs (root)
	$(BIN)/python -m tests.lanes

bench: $(STAMP) ## Measure, and print the tables of docs/performance.md
	$(BIN)/python -m bench

cluster: $(STAMP) ## Pods behind three schedulers on a real control plane; NODES=5000: speed and size at that many (root)
	$(BIN)/python -m bench.cluster $(if $(NODES),--nodes $(NODES) --pods 200 --filter --looking --throughput,--real)

density: $(STAMP) ## Pods that come and go on captured machines: refused, stranded, on several NUMA nodes
	$(BIN)/python -m bench.replay

headline: $(STAMP) ## A training job beside co-tenants that Kubernetes cannot see, placed in four ways (root)
	$(BIN)/python -m bench.headline

fuzz: $(STAMP) ## Fuzz the parsers for ten minutes
	$(BIN)/python -m tests.fuzz --seconds 600

# One target each, so that a finding of one does not end the others; atheris is needed nowhere else.
FUZZ_TARGETS := extender capacity small kubelet-state slots kubelet-config requests protocol config manifests http annotations notices assigned checkpoint
FUZZ_SECONDS ?= 60

fuzz-guided: $(STAMP) ## Fuzz by coverage, FUZZ_SECONDS each; new inputs are in build/fuzz
	@test -d build/atheris || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target build/atheris -r requirements/fuzz.txt
	found=0; $(foreach one,$(FUZZ_TARGETS),PYTHONPATH=build/atheris $(BIN)/python -m tests.fuzz.guided $(one) --seconds $(FUZZ_SECONDS) || found=1;) exit $$found

# Seconds, and modules or directories of them; cosmic-ray is needed nowhere else.
BUDGET ?= 600
ONLY ?=

build/cosmic-ray: requirements/mutation.txt | $(STAMP)
	@rm -rf $@ $@.part
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $@.part -r requirements/mutation.txt
	@mv $@.part $@ && touch $@

mutation: $(STAMP) build/cosmic-ray ## Do tests notice mutants? BUDGET=600 ONLY=nri_numa/engine/place
	PYTHONPATH=build/cosmic-ray nice -n 19 $(BIN)/python -m tests.mutation --budget $(BUDGET) --only $(ONLY)

# Classes of differences that are meant, such as `width place`; texts may differ without.
MEANT :=

recorded: $(STAMP) ## Write down again what pods get in tests/golden; say what differs, MEANT=width
	$(BIN)/python -m tests.checks.recorded $(MEANT)

soak: $(STAMP) ## 10,000 pods through the embedded runtime
	$(BIN)/python -m tests.soak

proto: $(STAMP) ## Generate the protobuf code again
	$(BIN)/python proto/generate.py
	$(BIN)/python proto/generate_cri.py

schema: $(STAMP) ## Generate again what follows from the configuration and the commands
	$(BIN)/python -m tools.config_schema
	$(BIN)/python -m tools.helm_schema
	$(BIN)/python -m tools.chart_files
	$(BIN)/python -m tools.docs_regions

sbom: $(NODE_STAMP) ## Write what a node gets for scanners of weaknesses and licences
	$(BIN)/python -m tools.sbom -o build/nri-numa.cdx.json

release: $(NODE_STAMP) ## Build all that is handed out into build/release, with SHA256SUMS (Debian; rpm)
	$(BIN)/python -m tools.release -o build/release

sizes: ## Sizes and start times of what is in build/release
	$(BIN)/python -m tools.sizes build/release

kubectl: $(NODE_STAMP) ## Pack `kubectl numa` for krew into build/kubectl
	$(BIN)/python -m tools.kubectl_plugin -o build/kubectl

# The site has an environment of its own: none of its packages is needed to run or test.
DOCS_VENV := build/docs-venv
DOCS_STAMP := $(DOCS_VENV)/.installed

$(DOCS_STAMP): requirements/docs.txt
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/docs.txt
	@touch $@

docs: $(DOCS_STAMP) ## Build the documentation into build/site, and check its links
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict
	$(DOCS_VENV)/bin/python tools/docs_check.py --site build/site

lock: ## Resolve the dependencies anew (needs uv in the environment)
	$(UV) --extra otel pyproject.toml requirements/test.in requirements/lint.in requirements/vm.in -o $(REQUIREMENTS)
	$(UV) -c $(REQUIREMENTS) --extra otel pyproject.toml -o requirements/runtime.txt
	$(UV) -c $(REQUIREMENTS) requirements/build.in -o requirements/build.txt
	$(UV) requirements/docs.in -o requirements/docs.txt
	$(UV) requirements/go.in -o requirements/go.txt
	$(UV) requirements/fuzz.in -o requirements/fuzz.txt
	$(UV) -c $(REQUIREMENTS) requirements/mutation.in -o requirements/mutation.txt
	$(UV) requirements/workflows.in -o requirements/workflows.txt
	$(BIN)/python -m tools.interpreter

clean: ## Remove what was built, the environment included
	rm -rf $(VENV) build dist site artifacts *.egg-info
