# Everything from a fresh clone: `make help` lists the targets. The first one that needs the package builds it (minutes); later ones
# build again only where sources have changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
# Processes that run tests; one worker runs all tests of a file. 0: the tests run one by one, in pytest's own process.
WORKERS ?= 2
# In the order of testpaths; by itself xdist takes files with many tests first, which are the quick ones.
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Extra arguments of `make train`, `make test` and `make bench`, for example: make test ARGS="-k schedule"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One torch for building and running: the core is compiled against its headers.
TORCH := 2.13.0
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2

NATIVE := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
SOURCES := $(NATIVE) $(shell find python -type f -name '*.py*' -not -name '*.pyc')

.PHONY: help train test test-npu test-titan simulator fuzz bench lint sanitize wheel dev clean

help: ## list the targets
	@echo "usage: make TARGET"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

# ---- environment and package -----------------------------------------------------------------------------------------

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, $(PYTHON) is " + sys.version)'
	@$(PYTHON) -c 'import os, sys, sysconfig as c; h = c.get_paths()["include"] + "/Python.h"; \
	  sys.exit(not os.path.exists(h) and h + " is missing: install the headers of Python (Debian: apt install python3-dev)")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.python
	$(PIP) install torch==$(TORCH)
	echo "torch==$(TORCH)" > $(VENV)/constraints.txt
	touch $@

# `make dev` marks the environment as editable; then the package is compiled in place, step by step, and Python files are used as
# they are.
ifneq ($(wildcard $(VENV)/.editable),)

package_with = --no-build-isolation -e ".[$(1)]"

$(VENV)/.package: $(NATIVE) $(VENV)/.torch
	$(PIP) install --no-build-isolation --no-deps -e .
	touch $@

else

package_with = "$$(echo dist/*.whl)[$(1)]"

$(VENV)/.package: dist/.built
	$(PIP) install --force-reinstall --no-deps dist/*.whl
	$(PIP) install dist/*.whl
	touch $@

endif

# pip makes an isolated environment with torch's headers for this. The constraint has two names, of older and newer pips.
dist/.built: $(SOURCES) $(VENV)/.torch
	rm -rf dist
	PIP_CONSTRAINT=$(VENV)/constraints.txt PIP_BUILD_CONSTRAINT=$(VENV)/constraints.txt $(PIP) wheel . --no-deps --wheel-dir dist
	touch $@

wheel: dist/.built ## build the wheel: dist/*.whl

$(VENV)/.test $(VENV)/.lint $(VENV)/.bench: $(VENV)/.%: pyproject.toml | $(VENV)/.package
	$(PIP) install $(call package_with,$*)
	touch $@

$(VENV)/.tools: pyproject.toml $(VENV)/.torch
	$(PIP) install "scikit-build-core>=0.10" "pybind11>=3.0" cmake ninja
	touch $@

dev: $(VENV)/.tools ## install the package editable, with everything for development
	$(PIP) install --no-build-isolation -e ".[test,lint,bench]"
	touch $(addprefix $(VENV)/,.editable .package .test .lint .bench)

# ---- training --------------------------------------------------------------------------------------------------------

work/stdlib.jsonl: examples/collect_stdlib.py | $(VENV)/.python
	$(BIN)/python examples/collect_stdlib.py --output $@

# Cut at the model's max_seq_len, so that the few samples of a step come from several files.
work/train_data.jsonl: work/stdlib.jsonl | $(VENV)/.package
	$(BIN)/python prepare_data.py --input $< --output $@ --tokenizer byte --eos --max_seq_len 1024

train: work/train_data.jsonl $(VENV)/.package ## train a small Llama on Python's standard library, two processes; again: continue
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 train.py --config examples/llama3_debug.yaml \
	  --data_dir $< --checkpoint_dir work/checkpoints --log_dir work/logs $(ARGS)

# ---- checks ----------------------------------------------------------------------------------------------------------

fuzz: $(VENV)/.package $(VENV)/.test ## random programs beside a plain model (ARGS="--programs 1000 --seed 7")
	OMP_NUM_THREADS=1 $(BIN)/python tests/dist/fuzz.py $(ARGS)

test: $(VENV)/.package $(VENV)/.test ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

# A second environment, with torch_npu: its `import torch` needs CANN's libraries, here the simulator's. They are compiled against
# that environment's torch; ninja compiles what has changed.
NPU_VENV := .venv-npu
NPU_BIN := $(NPU_VENV)/bin
NPU_PIP := $(NPU_BIN)/python -m pip --disable-pip-version-check

$(NPU_VENV)/.torch: $(VENV)/.python
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_PIP) install torch==$(TORCH) torch_npu==$(TORCH) cmake ninja
	echo "torch==$(TORCH)" > $(NPU_VENV)/constraints.txt
	touch $@

$(NPU_VENV)/.package: dist/.built $(NPU_VENV)/.torch
	$(NPU_PIP) install --force-reinstall --no-deps dist/*.whl
	$(NPU_PIP) install --constraint $(NPU_VENV)/constraints.txt "$$(echo dist/*.whl)[test]"
	touch $@

SIMULATOR := build/simulator
$(SIMULATOR)/.built: CMakeLists.txt $(shell find simulator -type f) $(NPU_VENV)/.torch
	$(NPU_BIN)/cmake -S . -B $(SIMULATOR) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(NPU_BIN))/ninja -DTT_SIMULATOR=ON -DTT_UNITY=ON \
	  -DPython_EXECUTABLE=$(abspath $(NPU_BIN))/python
	$(NPU_BIN)/cmake --build $(SIMULATOR)
	touch $@

simulator: $(SIMULATOR)/.built $(NPU_VENV)/.package ## build simulated Ascend cards and .venv-npu, an environment with torch_npu for them

test-npu: $(SIMULATOR)/.built $(NPU_VENV)/.package ## run the tests of the NPU backend on simulated Ascend cards
	OMP_NUM_THREADS=1 $(NPU_BIN)/python -m pytest $(IN_PARALLEL) tests/ascend --ignore tests/ascend/test_torchtitan.py $(ARGS)

# A third one, for a trainer that is not ours: torchtitan brings many large packages, some in older versions. It imports triton.
TITAN_VENV := .venv-titan
$(TITAN_VENV)/.torchtitan:
	$(PYTHON) -m venv $(TITAN_VENV)
	$(TITAN_VENV)/bin/python -m pip --disable-pip-version-check install torch==$(TORCH) torch_npu==$(TORCH) numpy pyyaml setuptools \
	  torchtitan==0.3.0 triton
	touch $@

test-titan: $(SIMULATOR)/.built $(NPU_VENV)/.package $(TITAN_VENV)/.torchtitan ## train PyPI's torchtitan on simulated Ascend cards (2.6 GB of packages)
	TT_TITAN_PYTHON=$(abspath $(TITAN_VENV))/bin/python OMP_NUM_THREADS=1 $(NPU_BIN)/python -m pytest tests/ascend/test_torchtitan.py $(ARGS)

BENCHMARKS := collectives fsdp_step train_step bucket_cap memory host_cost planning checkpoint data_prepare data generate trainer_overhead

bench: $(VENV)/.package $(VENV)/.bench ## compare with DDP, FSDP1, FSDP2 and Gloo (long; ARGS=--quick is a smoke test)
	mkdir -p work/bench
	for name in $(BENCHMARKS); do \
	  $(BIN)/python benchmarks/$$name.py --csv work/bench/$$name.csv --png work/bench/$$name.png $(ARGS); \
	done

lint: $(VENV)/.package $(VENV)/.lint ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/mypy
	find csrc simulator tests -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run -Werror

# Random delays in every device operation and wait, chosen by the seed.
SEEDS ?= 1 2 3
# Of broken token files, for each seed; 100,000 take some five seconds.
FUZZ_CASES ?= 400000
sanitize: $(VENV)/.tools ## run the torch-free stress programs under the thread and address sanitizers (SEEDS="1 2 3")
	for kind in thread address,undefined; do \
	  build=build/sanitize-$${kind%,*}; \
	  $(BIN)/cmake -S . -B $$build -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTT_CORE_ONLY=ON -DTT_STRESS_DELAYS=ON -DTT_SANITIZE=$$kind; \
	  $(BIN)/cmake --build $$build; \
	  for seed in $(SEEDS); do \
	    export TT_DELAY_SEED=$$seed; \
	    for ranks in 1 2 3 4 7; do $$build/engine_stress $$ranks 40 $$seed; done; \
	    for ranks in 2 4 7; do $$build/shm_stress $$ranks 100; done; \
	    for ranks in 2 3; do $$build/lanes_stress $$ranks 40 $$seed; done; \
	    if [ $$kind != thread ]; then $$build/data_fuzz $(FUZZ_CASES) $$seed; fi; \
	  done; \
	done

clean: ## remove everything that the other targets made, work/ with the trained model too
	rm -rf $(VENV) $(NPU_VENV) $(TITAN_VENV) build dist work .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
