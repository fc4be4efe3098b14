# make        lists what there is
# Every target makes .venv itself; a bare machine needs python3.11 and make.

PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# what `make train` adds: a name, and saves often enough to see them
TRAIN_ARGS ?= run.name=digits callbacks.async_checkpoint.every=20s

.DEFAULT_GOAL := help
.PHONY: help venv train test lint soak bench ui clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv with everything installed

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $(STAMP)

train: $(STAMP) ## train a ResNet on handwritten digits; again: goes on. make train TRAIN_ARGS='data.root=/path/to/imagenet'
	$(BIN)/python -m framework.train +recipe=imagenet_resnet $(TRAIN_ARGS)

test: lint ## lint, then all tests but the slow ones; make test PYTEST_ARGS='tests/config -k name'
	$(PYTEST) -m 'not soak' $(PYTEST_ARGS)

lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(STAMP) ## the slow tests
	$(PYTEST) -m soak $(PYTEST_ARGS)

bench: $(STAMP) ## run every benchmark; each prints one table
	@for script in benchmarks/*.py; do [ -e "$$script" ] || continue; echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

ui: $(STAMP) ## look at all runs in MLflow; make ui ROOT=runs
	$(BIN)/mlflow ui --backend-store-uri "sqlite:///$(abspath $(or $(ROOT),runs))/mlflow.db"

clean: ## remove what can be made again; runs and data stay
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
