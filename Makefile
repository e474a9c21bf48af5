# make run        set up .venv for this machine's hardware, and run rlhf.py to its end
# make test       set up the same, and pass the linter and all tests
# make test-gpu   the tests for GPUs; those with too few GPUs are skipped and say so (REQUIRE_GPU=1: fail)
# make quick      the tests without an engine, in seconds

PYTHON ?= python3
GPU := $(shell nvidia-smi -L 2>/dev/null)
REQUIREMENTS := $(if $(GPU),requirements.txt,requirements-cpu.txt)
TORCH_CPU := torch==2.13.0+cpu

.PHONY: venv run test quick test-gpu lint

venv: .venv/ready-$(REQUIREMENTS)

.venv/ready-$(REQUIREMENTS): $(REQUIREMENTS) requirements-test.txt
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install --quiet --upgrade pip
ifeq ($(GPU),)
	@echo "no NVIDIA GPU: installing the CPU builds of torch and vLLM"
	.venv/bin/pip install --quiet $(TORCH_CPU) || \
		.venv/bin/pip install --quiet $(TORCH_CPU) --index-url https://download.pytorch.org/whl/cpu
endif
	.venv/bin/pip install --quiet -r $(REQUIREMENTS) -r requirements-test.txt
ifeq ($(GPU),)
	# vLLM's CPU build names these three; their builds on PyPI are for CUDA's torch and break the import of vLLM.
	.venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@

run: venv
	.venv/bin/python rlhf.py

test: lint
	.venv/bin/pytest

quick: venv
	.venv/bin/pytest tests/test_learning.py tests/test_copies.py tests/test_transport.py tests/test_shared_memory.py tests/test_replay.py

test-gpu: venv
	.venv/bin/pytest -m gpu -rs

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
