# Every target installs what it needs first: `make demo` and `make test` work in a fresh clone.
SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.complete
CODE  := $(wildcard scrubber plugin dashboards tests bench scripts)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-fast property lint format bench soak pod-matrix fuzz boards boards-preview boards-types reference chart deb image release gpu-check cluster-check kernels amd-kernels protos lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## install everything the lock file names into .venv

$(STAMP): pyproject.toml requirements/dev.txt scripts/bootstrap.sh
	@scripts/bootstrap.sh $(VENV)
	@touch $@

demo: $(STAMP)  ## play a hand-over on a simulated node (ARGS=--dra: with resource claims; ARGS="--backend command": a program manages the devices)
	@$(BIN)/scrubber demo $(ARGS)

test: $(STAMP)  ## run all tests that need no real GPU, five processes at a time
	@scripts/test.sh $(BIN)/python

test-fast: $(STAMP)  ## run the tests that start few processes or none: of decisions, formats, protocols and documents
	@scripts/test.sh $(BIN)/python fast

property: $(STAMP)  ## run the searching tests (simulated cluster, Hypothesis) as deep as tests/depth.py says (hours)
	@scripts/test.sh $(BIN)/python property

lint: $(STAMP)  ## check style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-logo

format: $(STAMP)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## run the benchmarks, and write the results to bench/ (about twenty minutes)
	$(BIN)/python -m bench

soak: $(STAMP)  ## run 2,000 pods on 16 devices while the processes around them are killed (ARGS="--kills 10000 --record bench/results/soak.txt": rounds)
	$(BIN)/python -m tests.chaos.soak $(ARGS)

pod-matrix: $(STAMP)  ## simulate every pod shape of up to three containers, with a restart between any two events (about an hour)
	$(BIN)/python -m tests.simulation.shapes $(ARGS)

fuzz: $(STAMP)  ## fuzz all parsers and entry points for MINUTES (default 10), and add the runs to bench/results/fuzz.txt
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) --record bench/results/fuzz.txt $(ARGS)

boards: $(STAMP)  ## generate the JSON of the Grafana boards from their code
	$(BIN)/python -m dashboards

boards-preview: $(STAMP)  ## draw the boards with Grafana's components into docs/images (needs npm and chromium)
	$(BIN)/python -m dashboards.preview draw $(ARGS)

TYPES := dashboards/types

boards-types: $(TYPES)/node_modules/.package-lock.json  ## check the boards against the types of Grafana's schema, versions 11 and 12 (needs npm)
	node $(TYPES)/check.mjs

$(TYPES)/node_modules/.package-lock.json: $(TYPES)/package-lock.json
	cd $(TYPES) && npm ci --ignore-scripts --no-progress
	@touch $@

reference: $(STAMP)  ## generate the schemas of policies, and the pages of settings, logs, metrics and codes
	$(BIN)/python scripts/gen_schema.py
	$(BIN)/python scripts/gen_reference.py

chart: $(STAMP)  ## generate the Helm chart from the kustomize manifests, check it, and write its archive to dist
	$(BIN)/python scripts/gen_chart.py --package dist

# For the Debian or Ubuntu release of this machine. ARGS="--cuda 13" for drivers from 580 on, "--cuda none" without a GPU library.
deb: $(STAMP)  ## build a Debian package of both programs as systemd units, into dist
	$(BIN)/python scripts/build_deb.py $(ARGS)

# As root on Debian 12. ARGS="--cuda 13", "--cuda none"; ARGS=--lock takes newer Debian packages. docs/deploying.md#the-image
image: $(STAMP)  ## build the container image as an OCI archive with its list of contents, start it, and check it
	$(BIN)/python -m scripts.build_image $(ARGS)

# VERSION=x.y.z; KEY=FILE signs the provenance, SOURCE=URL names the sources in it. docs/releasing.md
release: $(STAMP)  ## build wheel, images, chart and Debian package with checksums and provenance into dist/VERSION
	$(BIN)/python -m scripts.release $(if $(VERSION),'$(VERSION)',$(error name the version: make release VERSION=x.y.z)) \
		$(if $(KEY),--key '$(KEY)') $(if $(SOURCE),--source '$(SOURCE)')

# On a machine with a GPU that is not used otherwise. PYTHON may have CuPy and nvidia-ml-py already; nothing is installed.
# BACKEND=amd: on a node with ROCm, which needs neither.
PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)
gpu-check:  ## check on a real GPU what no fake can prove; overwrites its memory; results go to bench/results/
	$(PYTHON) -m tests.gpu$(if $(filter amd,$(BACKEND)),.amd) $(ARGS)

# KUBECONFIG=… and RESOURCE=nvidia.com/gpu or DEVICE_CLASS=gpu.scrubber.dev; IMAGE, NAMESPACE_PREFIX and ARGS if needed.
cluster-check: $(STAMP)  ## test on a cluster what a tenant finds of the earlier one (docs/cluster-check.md)
	@$(BIN)/python -m tests.clustercheck $(if $(KUBECONFIG),--kubeconfig '$(KUBECONFIG)') $(if $(RESOURCE),--resource '$(RESOURCE)') \
		$(if $(DEVICE_CLASS),--device-class '$(DEVICE_CLASS)') $(if $(IMAGE),--image '$(IMAGE)') \
		$(if $(NAMESPACE_PREFIX),--namespace-prefix '$(NAMESPACE_PREFIX)') $(ARGS)

amd-kernels: $(STAMP)  ## compile the kernels for AMD GPUs to code objects (clang-19 and lld-19)
	$(BIN)/python scripts/make_amd_kernels.py

kernels: $(STAMP)  ## compile the CUDA kernels to PTX
	$(BIN)/python scripts/make_kernels.py

protos: $(STAMP)  ## generate the gRPC code from the .proto files
	$(BIN)/python scripts/gen_protos.py

# Universal: one file serves Python 3.11 and newer. No index is named in it; pip's own settings say where to look.
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' $(UPGRADE)

lock: $(STAMP)  ## resolve the dependencies again (UPGRADE=--upgrade selects newer ones)
	$(COMPILE) --output-file requirements/base.txt pyproject.toml
	$(COMPILE) --output-file requirements/dev.txt --group dev --constraint requirements/base.txt pyproject.toml
	$(COMPILE) --extra cuda12 --extra otel --constraint requirements/dev.txt --output-file deploy/container/cuda12.txt pyproject.toml
	$(COMPILE) --extra cuda13 --extra otel --constraint requirements/dev.txt --output-file deploy/container/cuda13.txt pyproject.toml
	$(COMPILE) --extra otel --constraint requirements/dev.txt --output-file deploy/container/none.txt pyproject.toml
	$(COMPILE) --output-file requirements/build.txt --group build --constraint requirements/dev.txt

clean:  ## remove what was built or installed here, but no service's ledger
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
