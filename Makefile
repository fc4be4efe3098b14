# make        lists what there is
# Every target makes .venv itself; a bare machine needs python3.11 and make.

PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed
# where `make ui` listens
PORT ?= 5000
# what `make train` adds: a name, and saves often enough to see them
TRAIN_ARGS ?= run.name=digits callbacks.async_checkpoint.every=20s

.DEFAULT_GOAL := help
.PHONY: help venv train test oldest lint soak bench ui clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv with everything installed

$(STAMP): pyproject.toml
	@echo "installing into .venv, about two minutes"
	@$(PYTHON) -m venv .venv
	@{ $(BIN)/python -m pip install --upgrade pip && $(BIN)/python -m pip install -e '.[dev]'; } > .venv/install.log 2>&1 \
		|| { cat .venv/install.log; exit 1; }
	@touch $(STAMP)

train: $(STAMP) ## train a ResNet on handwritten digits; again: goes on. make train TRAIN_ARGS='data.root=/path/to/imagenet'
	$(BIN)/python -m framework.train +recipe=imagenet_resnet $(TRAIN_ARGS)

test: lint ## lint, then all tests but the slow ones; make test PYTEST_ARGS='tests/config -k name'
	$(PYTEST) -m 'not soak' $(PYTEST_ARGS)

oldest: $(OLDEST_STAMP) ## the tests of checkpoints and volumes with the oldest torch that is supported
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -m 'not soak' tests/checkpoint tests/volume $(PYTEST_ARGS)

# the versions below which pyproject.toml allows none
$(OLDEST_STAMP): pyproject.toml
	@echo "installing into $(OLDEST), about two minutes"
	@$(PYTHON) -m venv $(OLDEST)
	@{ $(OLDEST)/bin/python -m pip install --upgrade pip \
		&& $(OLDEST)/bin/python -m pip install 'torch==2.11.0' 'torchvision==0.26.0' -e '.[dev]'; } > $(OLDEST)/install.log 2>&1 \
		|| { cat $(OLDEST)/install.log; exit 1; }
	@touch $(OLDEST_STAMP)

lint: $(STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(STAMP) ## the slow tests
	$(PYTEST) -m soak $(PYTEST_ARGS)

bench: $(STAMP) ## run every benchmark; each prints one table
	@for script in benchmarks/*.py; do [ -e "$$script" ] || continue; echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

ui: $(STAMP) ## look at all runs in MLflow; make ui ROOT=runs PORT=5000
	@echo "http://127.0.0.1:$(PORT)  (Ctrl-C ends it)"
	@MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false PYTHONWARNINGS=ignore $(BIN)/mlflow ui --host 127.0.0.1 --port $(PORT) \
		--workers 1 --uvicorn-opts '--log-level warning' \
		--backend-store-uri "sqlite:///$(abspath $(or $(ROOT),runs))/mlflow.db"

clean: ## remove what can be made again; runs and data stay
	rm -rf .venv $(OLDEST) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
