# Needs python >= 3.11 with venv, and a package index; everything else is set up here.
#   make demo            make demo ARGS="--problems 16 --json out.json"
#   make demo -- --compose eagle3
#   make demo ARGS="--real"          SmolLM2-135M-Instruct; 93 MB are fetched once
#   make test            make lint            make docs            make clean
#   make clients         sessions of OpenAI's, Anthropic's and other SDKs
#   make load-clients    times of sglang.bench_serving, guidellm and aiperf
#   make contract        after another SGLang was pinned; make contract SGLANG=0.5.22

VENV ?= .venv
# Test files run in so many processes; most of their time is waiting for servers.
WORKERS ?= 2
# Threads of torch in each process. Beside others, threads mostly wait for each other.
THREADS ?= 1
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

# What follows `make demo --` are words for the demo, not targets.
ifeq (demo,$(firstword $(MAKECMDGOALS)))
    WORDS := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
    ARGS += $(WORDS)
    $(eval $(WORDS):;@:)
endif

.PHONY: demo test clients load-clients contract test-real real-model imports lint docs clean install

# `--real` is the demo of another model, which is outside the wheel.
demo: imports
	@$(if $(filter --real,$(ARGS)), \
	    $(BIN)/python -m benchmarks.real_model demo $(filter-out --real,$(ARGS)), \
	    $(BIN)/sglang-parse demo $(ARGS))

test: install
	$(MAKE) -j 3 imports lint docs real-model
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not contract_source" --durations=40 $(ARGS)

# What PARSE needs of SGLang. Those of its tests that read SGLang's source text cannot
# fail while the version is pinned, so `make test` leaves them out.
# With SGLANG=VERSION, of that release, which is put in front of the pinned one; a table
# of what differs follows.
contract: install $(if $(SGLANG),build/sglang-$(SGLANG))
	$(if $(SGLANG),PYTHONPATH=build/sglang-$(SGLANG)) OMP_NUM_THREADS=$(THREADS) \
	    $(BIN)/python -m pytest tests/contract $(ARGS) $(if $(SGLANG),--tb=short -W ignore \
	    --continue-on-collection-errors --junitxml build/contract-$(SGLANG).xml \
	    || { $(BIN)/python docs/contract_table.py build/contract-$(SGLANG).xml; exit 1; })

build/sglang-%: | install
	$(BIN)/python -m pip install --no-deps --target $@.part sglang==$*
	mv $@.part $@

# Compiles what servers import: else each process of the first ones would do it again,
# and each of every one where PYTHONDONTWRITEBYTECODE is set, as in many containers.
imports: $(COMPILED)

$(COMPILED): $(STAMP)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -W ignore -c 'import sglang_parse.plugin.worker'
	@touch $@

# Without the real model and BFCL, which are fetched once, their tests are skipped.
real-model: install
	-$(BIN)/python -m benchmarks.real_model
	-$(MAKE) build/bfcl

# Questions, gold and checker of BFCL v4 (2 MB). Its requirements are not installed.
build/bfcl: | install
	$(BIN)/python -m pip download -q --no-deps -d $@.part bfcl-eval==2026.3.23
	$(BIN)/python -m zipfile -e $@.part/*.whl $@.part
	mv $@.part $@

# The tests of the real model alone. 93 MB are fetched first.
test-real: install
	$(BIN)/python -m benchmarks.real_model
	$(BIN)/python -m pytest tests/real $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Sessions of clients' SDKs with a server of the embedded pair.
SDKS := openai anthropic litellm langchain-openai pydantic-ai instructor dspy
clients: imports build/clients/.installed
	$(BIN)/python -m benchmarks.client_sessions --python build/clients/bin/python

build/clients/.installed:
	$(BIN)/python -m venv build/clients
	build/clients/bin/python -m pip install -q $(SDKS)
	@touch $@

# sglang.bench_serving, guidellm and aiperf, two of them in environments of their own.
load-clients: imports build/guidellm/.installed build/aiperf/.installed
	$(BIN)/python -m benchmarks.load_clients --guidellm build/guidellm/bin/guidellm \
	    --aiperf build/aiperf/bin/aiperf $(or $(ARGS),--out build/load-clients)

build/guidellm/.installed: TOOL := guidellm==0.8.1
build/aiperf/.installed: TOOL := aiperf==0.13.0
build/guidellm/.installed build/aiperf/.installed:
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install -q $(TOOL)
	@touch $@

# The site, to build/docs. A dead link is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(STAMP)

# Re-made when pyproject.toml changes. PYTHON=... chooses the interpreter.
$(STAMP): pyproject.toml
	@set -e; python=""; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if $$candidate -c '$(SUPPORTED)' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "make: sglang_parse needs python 3.11 to 3.13, found" \
	        "$$(python3 --version 2>/dev/null || echo no python3);" \
	        "install one, or name it with PYTHON=/path/to/python." >&2; exit 1; \
	fi; \
	$(BIN)/python -c '$(SUPPORTED)' 2>/dev/null || $$python -m venv --clear $(VENV) || { \
	    echo "make: $$python cannot create $(VENV); install its venv module" \
	        "(Debian: apt install python3-venv)." >&2; exit 1; }
	$(BIN)/python -m pip install --progress-bar off --no-compile -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
