# Needs python3.11 or newer with venv, and make. Everything else goes into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
BENCH_VENV := benchmarks/.venv
BENCH_BIN := $(BENCH_VENV)/bin
BENCH_STAMP := $(BENCH_VENV)/.installed
BENCH_PIP := $(BENCH_BIN)/python -m pip --disable-pip-version-check -qq
ARGS ?=

.DEFAULT_GOAL := test
.PHONY: test demo matrix bench bench-quick bench-checkpoints check clean

test: $(STAMP)  ## run the tests; ARGS="-k window" narrows them
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

demo: $(STAMP)  ## run the demo; ARGS are its options
	@$(BIN)/onefold demo $(ARGS)

matrix: $(STAMP)  ## run every feature with every other; writes docs/compatibility.md
	@PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.matrix

bench: $(BENCH_STAMP)  ## measure against the peers, at most 60 minutes; writes docs/performance.md
	@$(BENCH_BIN)/python -m benchmarks full $(ARGS)

bench-quick: $(BENCH_STAMP)  ## the same for 8 backwards, stages 2 and 3, 2 ranks, under 8 minutes
	@$(BENCH_BIN)/python -m benchmarks quick $(ARGS)

bench-checkpoints: $(BENCH_STAMP)  ## saving and loading against the peers, about 10 minutes
	@$(BENCH_BIN)/python -m benchmarks.checkpoints $(ARGS)

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

# The peers have an environment of their own. DeepSpeed asks for torch at build time, and compiles at its first start.
$(BENCH_STAMP): pyproject.toml constraints.txt benchmarks/constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed")'
	@test -x $(BENCH_BIN)/python || $(PYTHON) -m venv $(BENCH_VENV)
	@echo "installing into $(BENCH_VENV); the first time takes minutes"
	@$(BENCH_PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BENCH_PIP) install -c constraints.txt -e '.[contrastive]'
	@$(BENCH_PIP) install -c benchmarks/constraints.txt setuptools wheel
	@DS_BUILD_OPS=0 $(BENCH_PIP) install --no-build-isolation -c constraints.txt -c benchmarks/constraints.txt deepspeed
	@echo "starting DeepSpeed once, which compiles an extension"
	@$(BENCH_BIN)/python -m benchmarks run --workload tiny --engines floor,deepspeed --stage 1 --rounds 0
	@touch $@
