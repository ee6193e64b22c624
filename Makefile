# Settings, to be given on the command line:
#   PYTHON=python3.12         the interpreter to build .venv with
#   PIP_ARGS="--index-url …"  more arguments for every `pip install`
#   PYTEST_ARGS="-k name"     more arguments for pytest
#   WORKERS=4                 processes that `make test` runs tests in: one a core, 4 GB each
#   BENCH_ARGS="MODEL"        more arguments for `make bench`
#   SERVE_ARGS="MODEL"        more arguments for `make run-server`

PYTHON ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=
SERVE_ARGS ?=

BIN := .venv/bin
PROJECTS := . backends/triton backends/cuda backends/rocm backends/tpu conformance
MANIFESTS := $(PROJECTS:%=%/pyproject.toml) constraints.txt
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
# A file's tests share what it makes. Those of tests/support/turns.py come first.
PARALLEL = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
SIBLINGS = $(patsubst %,-e %,$(filter-out .,$(PROJECTS)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run run-server soak test test-full lint bench wheels

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

run: .venv/.installed ## let the shipped model tell a story
	$(BIN)/ml4 generate --prompt "Tell me a story about a rabbit named Pip." --max-tokens 300

run-server: .venv/.installed-serve ## serve the shipped model at http://127.0.0.1:8000/v1
	$(BIN)/ml4 serve --enable-prefix-caching --speculative-config '{"method": "dspark"}' $(SERVE_ARGS)

soak: .venv/.installed-dev ## 200 clients for five minutes: cancels, slow readers, bad requests
	$(BIN)/pytest -m slow tests/serving/test_load.py $(PYTEST_ARGS)

test: .venv/.installed-dev ## run the tests, but for the slow ones; 1.6 GB to download once, for torch-xla and another triton
	$(BIN)/pytest -m "not slow and not network" $(PARALLEL) $(PYTEST_ARGS)

test-full: .venv/.installed-dev ## run every test
	$(BIN)/pytest $(PYTEST_ARGS)

lint: .venv/.installed-dev ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed-dev ## measure steps, speed, memory, and transformers beside it
	$(BIN)/ml4 bench step --compare transformers $(BENCH_ARGS)

wheels: .venv/.installed-dev ## build the wheels of the six distributions into dist/
	rm -rf $(PROJECTS:%=%/build/lib) $(PROJECTS:%=%/build/bdist.*)
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist $(PROJECTS:%=./%)

# What is installed is editable; a stamp newer than every manifest makes the next call instant.

.venv/.installed: .venv/.created $(MANIFESTS)
	$(PIP_INSTALL) --no-build-isolation -e . $(SIBLINGS)
	@touch $@

.venv/.installed-dev: .venv/.created $(MANIFESTS)
	$(PIP_INSTALL) --no-build-isolation -e '.[serve,test,lint]' $(SIBLINGS)
	@touch $@ .venv/.installed .venv/.installed-serve

.venv/.installed-serve: .venv/.created $(MANIFESTS)
	$(PIP_INSTALL) --no-build-isolation -e '.[serve]' $(SIBLINGS)
	@touch $@ .venv/.installed

.venv/.created:
	@set -- $(if $(PYTHON),"$(PYTHON)",python3.13 python3.12 python3.11 python3); \
	for python do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	    echo "ml4core needs Python 3.11 or newer, with its venv module. Tried: $$*." >&2; \
	    echo "Install one (Debian, Ubuntu: apt-get install python3-venv), or name one: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	echo "$$found -m venv .venv"; "$$found" -m venv .venv
	$(PIP_INSTALL) pip setuptools
	@touch $@
