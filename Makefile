PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# one process per core, each with one thread
PARALLEL := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow check bench docs pages clean

help: ## list all targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(INSTALLED) ## train a translator and draw its word alignments
	$(BIN)/regard demo

test: $(INSTALLED) ## run the tests, the docstring examples and the guide's code
	$(PARALLEL) $(BIN)/python -m pytest -n auto --dist worksteal
	@# run the kernel tests again with the most basic of several instruction sets
	@isa=$$($(BIN)/python -c 'from regard.mechanism import fused; print(*(fused._KERNELS.available()[1:] if fused.available() else [])[-1:])'); \
	    test -z "$$isa" || REGARD_ISA=$$isa $(PARALLEL) $(BIN)/python -m pytest -n auto --dist worksteal tests/mechanism/test_fused.py

test-slow: $(INSTALLED) ## run the tests that take minutes
	@# pytest exits with 5 if no test is marked slow
	$(BIN)/python -m pytest -m slow --timeout 3600 -o faulthandler_timeout=0 || test $$? -eq 5

check: $(INSTALLED) ## check lint, formatting, types and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

bench: $(INSTALLED) ## compare the speed with other libraries
	$(BIN)/python -m benchmarks

docs: $(INSTALLED) ## build the guide as a site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The guide is built: open site/index.html"

pages: $(INSTALLED) ## run the guide's pages and update their outputs and pictures
	$(BIN)/python -m pages

clean: ## remove the environment, build products and caches
	rm -rf .venv build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks pages -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# -c does not reach the environment in which pip builds the package: older pips read the first variable there,
# newer ones the second.
$(INSTALLED): export PIP_CONSTRAINT = constraints.txt
$(INSTALLED): export PIP_BUILD_CONSTRAINT = constraints.txt
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/* kernels/isa/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch numpy
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,dev,docs,notebooks]"
	touch $@
