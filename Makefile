# `make help` lists the targets. None needs a step before it: packages of Python go into $(VENV) as requirements/ pins
# them. With VENV= the packages of $(PYTHON) are used as they are, offline, and our own goes into build/site.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
EXPLORE_ARGS ?= --plans 1000000
BENCH_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
NVCC := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(origin CXX),default)
  CXX := g++
endif
export CXX JOBS

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help build package demo bench test test-long test-gpu explore asan tsan lint format docs clean compiler

ifneq ($(strip $(VENV)),)
  PY := $(abspath $(VENV))/bin/python
  export PATH := $(abspath $(VENV))/bin:$(PATH)
  # Recipes' prerequisites: packages of Python for each purpose.
  for_build := $(VENV)/.installed-build $(if $(NVCC),$(VENV)/.installed-cuda)
  for_test := $(for_build) $(VENV)/.installed-test $(VENV)/.installed-demo
  for_demo := $(for_build) $(VENV)/.installed-demo
  for_lint := $(for_build) $(VENV)/.installed-lint
  for_docs := $(VENV)/.installed-docs
else
  PY := $(PYTHON)
  export PATH := $(CURDIR)/build/site/bin:$(PATH)
  export PYTHONPATH := $(CURDIR)/build/site$(if $(PYTHONPATH),:$(PYTHONPATH))
  install_options := --no-index --upgrade --target build/site
endif
export PY

# $(call need,program,package): stops with one line where a program is missing.
need = command -v $(1) >/dev/null || { echo "$(1) is missing: sudo apt-get install $(2)" >&2; exit 1; }
has_hopper = nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -q "^9.0"
pip = $(PY) -m pip --disable-pip-version-check

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

build: compiler $(for_build)  ## the library, its tests and the command build/release/clowder
	@tools/build.sh release

package: compiler $(for_build)  ## builds and installs the Python package
	@$(PY) -c "import nanobind, nanobind_backend, scikit_build_core" 2>/dev/null || \
	  { echo "$(PY) lacks packages: $(PY) -m pip install -r requirements/build.txt" >&2; exit 1; }
	@$(pip) install -q --no-build-isolation --no-deps $(install_options) --config-settings=build-dir=build/python .

demo: package $(for_demo)  ## trains a small language model on source code (DEMO_ARGS=...)
	$(PY) examples/train_code_lm.py $(DEMO_ARGS)

bench: build package $(for_demo)  ## times layers beside PyTorch and writes benchmarks/results (BENCH_ARGS=...)
	if $(has_hopper); then $(PY) benchmarks/layer_gpu.py --burst $(BENCH_ARGS); \
	  else $(PY) benchmarks/layer_cpu.py $(BENCH_ARGS); fi

test: build $(for_test)  ## builds and runs the tests of this machine, C++ and Python
	ctest --preset release -j $(JOBS)
	@tools/test_package.sh
	@$(MAKE) --no-print-directory package
	$(PY) -m pytest -q tests/python

test-long: build $(for_test)  ## soaks
	ctest --preset long
	@$(MAKE) --no-print-directory package
	$(PY) -m pytest -q -m long tests/python

test-gpu:  ## the tests that need a GPU
	if $(has_hopper); then $(MAKE) --no-print-directory build && tools/gpu_checks.sh build/release/clowder; \
	  else echo "test-gpu: there is no H100 or H200 here, so there is nothing to run"; fi

explore: build  ## a million explored plans (EXPLORE_ARGS=...)
	build/release/clowder_explore $(EXPLORE_ARGS)

asan: compiler $(for_build)  ## the C++ tests under the address and undefined-behaviour sanitizers
	@tools/build.sh asan
	ctest --preset asan -j $(JOBS)

# Thread sanitizers of older compilers fail where addresses are randomised widely.
tsan: compiler $(for_build)  ## the C++ tests under the thread sanitizer
	@tools/build.sh tsan
	fixed=; if setarch -R true 2>/dev/null; then fixed="setarch -R"; fi; $$fixed ctest --preset tsan -j $(JOBS)

lint: compiler $(for_lint)  ## clang-format, clang-tidy and ruff
	@$(call need,clang-format,clang-format)
	@$(call need,clang-tidy,clang-tidy)
	@tools/lint.sh

format: $(for_lint)  ## formats C++ and Python
	@$(call need,clang-format,clang-format)
	@tools/lint.sh --fix

docs: $(for_docs)  ## tests the tools of the documentation and builds its site, build/docs/html
	@$(PY) -c "import furo, griffe, myst_parser, pytest, tree_sitter_cpp, yaml" 2>/dev/null || \
	  { echo "$(PY) lacks packages: $(PY) -m pip install -r requirements/docs.txt" >&2; exit 1; }
	$(PY) -m pytest -q tests/tools
	$(PY) tools/docs/build.py

clean:  ## removes what was built; the virtual environment stays
	rm -rf build

compiler:
	@$(call need,$(firstword $(CXX)),g++)

ifneq ($(strip $(VENV)),)
$(VENV)/.created:
	@$(call need,$(PYTHON),python3)
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || \
	  { echo "the modules venv and ensurepip of Python are missing: sudo apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Headers: what else the package asks for is of no use here.
$(VENV)/.installed-cuda: requirements/cuda.txt $(VENV)/.created
	@echo "installing requirements/cuda.txt"
	@$(pip) install -q --no-deps -r $<
	@touch $@

$(VENV)/.installed-%: requirements/%.txt $(VENV)/.created
	@echo "installing requirements/$*.txt"
	@$(pip) install -q -r $<
	@touch $@
endif
