# make demo | make test | make test-all | make help      (the first use makes .venv with the pinned set)
# make ... PY=python3                                    uses that interpreter as it is and keeps its torch
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= all,dev
DEMO   ?= reports/demo

ifdef PY
RUN   := $(PY)
READY := .ready-$(notdir $(PY))
PINS  :=
else
RUN   := $(VENV)/bin/python
READY := $(VENV)/.ready
PINS  := -c constraints.txt -c constraints-ci.txt
endif

.DEFAULT_GOAL := help
.PHONY: demo test test-all test-data lint bench sanitize help clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## Train a Differential Transformer and its Transformer twin on this machine's own Python sources; write reports/demo/index.html
	$(RUN) -m difftransformer compare recipes/demo.yaml --out $(DEMO)

test: $(READY) lint ## Format, lint, types, layers and the quick tests
	$(RUN) -m pytest -m "not slow and not gpu"

test-all: $(READY) test-data ## The heavier tests
	$(RUN) -m pytest -m "slow and not gpu"

test-data: $(READY) ## Check the data that heavier tests read (DIFFTRANSFORMER_DATA); under CI a missing set is a failure
	$(RUN) tests/check_data.py

lint: $(READY) ## ruff, mypy, import-linter
	$(RUN) -m ruff format --check src tests
	$(RUN) -m ruff check src tests
	$(RUN) -m mypy
	$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

bench: $(READY) ## Time attention and a training step of DIFF and its twin on this machine; write reports/bench/results.json
	$(RUN) -m difftransformer bench --out reports/bench

sanitize: $(READY) ## Quick tests with uninitialised memory filled with NaN and autograd's anomaly detection on
	DIFFTRANSFORMER_SANITIZE=1 $(RUN) -m pytest -m "not slow and not gpu" tests/ops tests/attention tests/model

clean: ## Remove the virtual environment
	rm -rf $(VENV) .ready-*

$(VENV)/.ready: pyproject.toml constraints.txt constraints-ci.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "difftransformer needs Python 3.11 or newer; this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[$(EXTRAS)]'
	@touch $@

.ready-%: pyproject.toml
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "difftransformer needs Python 3.11 or newer; this is %d.%d: make PY=python3.11" % sys.version_info[:2])'
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@
