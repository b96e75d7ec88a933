# Needs python3.11 or newer with venv, and make. Everything else goes into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
ARGS ?=

.DEFAULT_GOAL := test
.PHONY: test demo matrix check clean

test: $(STAMP)  ## run the tests; ARGS="-k window" narrows them
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

demo: $(STAMP)  ## run the demo; ARGS are its options
	@$(BIN)/onefold demo $(ARGS)

matrix: $(STAMP)  ## run every feature with every other; writes docs/compatibility.md
	@PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.matrix

check: $(STAMP)  ## format, lint, types, spelling
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/codespell

clean:  ## remove caches and build outputs; `rm -rf .venv` starts over
	@rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, pinned by constraints.txt: an open requirement would fetch the newest CUDA build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes minutes"
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -c constraints.txt -e '.[contrastive,dev]'
	@touch $@
