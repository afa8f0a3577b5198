# Everything a developer runs. The first target that needs it makes .venv; set PYTHON to choose the interpreter.
# TORCH=2.6.0 or TORCH=newest runs a target on another torch than the pinned one, in a venv of its own.
PYTHON ?= python3
WORKERS ?= 3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
DEV := $(VENV)/.dev-installed
BENCH := $(VENV)/.bench-installed
AUDIT := $(VENV)/.audit-installed
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
SHELL := /bin/bash

.PHONY: help dist sbom audit changelog demo test test-all test-engines-packages crds lint bench bench-check gpu campaigns crash-states damage kills hangs troubles lost-hosts soak fuzz docs docs-site clean torn in-turn endurance
.DEFAULT_GOAL := help

help: ## show these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1|\2/' | column -t -s '|'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "holdfast needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)

# Each torch chooses its own sympy and setuptools.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	grep -vE '^(torch|sympy|setuptools)==' constraints.txt > $@
	$(if $(filter-out newest,$(TORCH)),echo 'torch==$(TORCH)' >> $@)

$(DEV): pyproject.toml $(PINS) | $(BIN)/python
	$(BIN)/pip install --quiet -c $(PINS) -e '.[dev]'
	@touch $@

$(BENCH): $(DEV)
	$(BIN)/pip install --quiet -c $(PINS) -e '.[bench]'
	@touch $@

$(AUDIT): $(DEV)
	$(BIN)/pip install --quiet -c $(PINS) -e '.[audit]'
	@touch $@

demo: $(DEV) ## train, kill, corrupt and resume before your eyes
	$(BIN)/holdfast demo

test: $(DEV) ## the default tests
	$(BIN)/python -m pytest -n $(WORKERS)

test-all: $(DEV) ## the default tests and the slow ones
	-$(MAKE) --no-print-directory crds .skypilot  # without a network, the tests that need them are skipped
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not gpu and not alone'
	$(BIN)/python -m pytest -m alone

test-engines-packages: ## as root: what the slow tests of Slurm and SkyPilot need from Debian
	apt-get install --no-install-recommends -y slurm-wlm openssh-server rsync curl

CRDS := jobset-0.9.1.yaml jobset-0.12.0.yaml pytorchjob-1.8.1.yaml pytorchjob-1.9.0.yaml
crds: $(CRDS:%=.crds/%) ## the published definitions of JobSet and PyTorchJob, for the tests of manifests
	sha256sum --check --strict tests/jobs/k8s/crds.sha256

.crds/jobset-%.yaml:
	mkdir -p .crds
	curl -fsSL -o $@ https://raw.githubusercontent.com/kubernetes-sigs/jobset/v$*/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml

.crds/pytorchjob-%.yaml:
	mkdir -p .crds
	curl -fsSL -o $@ https://raw.githubusercontent.com/kubeflow/training-operator/v$*/manifests/base/crds/kubeflow.org_pytorchjobs.yaml

.skypilot: # SkyPilot's example files, for the test that compares what they mean here
	rm -rf $@.part
	git clone --quiet --depth 1 https://github.com/skypilot-org/skypilot $@.part
	mv $@.part $@

lint: $(DEV) ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

LONG ?=
bench: $(BENCH) ## measure against raw limits and peers; LONG=1 for every round of everything
	$(BIN)/python benchmarks/suite.py $(if $(LONG),--long)

bench-check: $(BENCH) ## fail if a measured ratio is 15 % worse than the committed one, in about 20 minutes
	$(BIN)/python benchmarks/suite.py --check

gpu: ## everything that needs a GPU, without a network, in 8 minutes: one JSON file, one table, one plot
	benchmarks/gpu/run.sh

campaigns: crash-states damage kills hangs troubles lost-hosts soak in-turn endurance torn fuzz ## every long search for failures, with its defaults

soak: $(DEV) ## trainings on a file system whose calls fail at random
	$(BIN)/python -m campaigns.faults

in-turn: $(DEV) ## each request to a bucket and each system call below a home fails once
	$(BIN)/python -m campaigns.in_turn

endurance: $(DEV) ## 10,000 saves, signals at random moments of saves, clocks hours apart
	$(BIN)/python -m campaigns.endurance

FUZZ_SECONDS ?= 300
fuzz: $(DEV) ## mutated documents and files for everything that is read; FUZZ_SECONDS=300
	$(BIN)/python -m campaigns.fuzz --seconds $(FUZZ_SECONDS)

crash-states: $(DEV) ## states that a power cut may leave; needs strace
	$(BIN)/python -m campaigns.crash_states

damage: $(DEV) ## thousands of damaged homes
	$(BIN)/python -m campaigns.damage

kills: $(DEV) ## kill -9 of trainers and keepers at random moments
	$(BIN)/python -m campaigns.kills

hangs: $(DEV) ## trainings that hang, whose odd rank must be named, and slow ones that must not be reported
	$(BIN)/python -m campaigns.hangs

troubles: $(DEV) ## one job with one trouble after another, compared with a job without
	$(BIN)/python -m campaigns.troubles

lost-hosts: $(DEV) ## kill whole hosts of a training whose saves are in memory of peers; needs network namespaces
	$(BIN)/python -m campaigns.lost_hosts --write

torn: $(DEV) ## write to states while they are copied, in 90 ways
	$(BIN)/python -m campaigns.tears

docs: $(DEV) ## check every link, code block and command of the documents
	$(BIN)/python -m pytest tests/docs

docs-site: $(DEV) ## the documentation as a site in build/site; warnings are errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site

dist: $(DEV) ## the wheel and the sdist in dist/, checked as the package index does
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*.whl dist/*.tar.gz

changelog: $(DEV) ## move the fragments of changes/ into CHANGELOG.md, for the version of the package
	$(BIN)/python -m towncrier build --yes

sbom: $(AUDIT) ## the packages of this environment as a CycloneDX document, dist/sbom.json
	mkdir -p dist
	$(BIN)/python -m cyclonedx_py environment --pyproject pyproject.toml --output-file dist/sbom.json $(BIN)/python

audit: $(AUDIT) ## known vulnerabilities of the pinned packages; asks a network service, and has not been run yet
	grep -vE '^(#|$$)' constraints.txt > $(VENV)/pinned.txt
	$(BIN)/python -m pip_audit --requirement $(VENV)/pinned.txt --no-deps --disable-pip

clean: ## remove caches and outputs; .venv stays
	rm -rf .bench build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
