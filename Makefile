# Every target makes the virtual environment first if need be. Hand arguments on with ARGS="...".
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test lint typecheck wheel-check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes first and pinned, so that nothing that depends on it can choose another build
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "colonnade needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: $(STAMP) ## train ten thousand experts (ARGS="preset=smoke" for a small run)
	$(BIN)/colonnade train $(ARGS)

test: $(STAMP) ## run the tests
	$(BIN)/pytest $(ARGS)

lint: $(STAMP) ## ruff: style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# the repository root is the package: pyright needs to see it under its name
typecheck: $(STAMP) ## pyright over the package
	@links=$$(mktemp -d) && ln -s "$(CURDIR)" "$$links/colonnade" && \
		PYTHONPATH="$$links" $(BIN)/pyright --pythonpath $(BIN)/python; status=$$?; rm -r "$$links"; exit $$status

wheel-check: $(STAMP) ## build the wheel, install it alone and import it from elsewhere
	bash .ci/wheel-check

bench: $(STAMP) ## speed of the resident loops against batched PyTorch calls
	$(BIN)/python -P benchmarks/bench_mlp_resident.py $(ARGS)

clean: ## remove build leftovers and caches (runs and .venv stay)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
