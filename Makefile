# Every target works from a fresh clone: the virtual environment is a prerequisite, made once.
# `make help` lists the targets. Settings are variables of make or of the environment: PORT, DOCS_PORT,
# ARGS, MODEL, NAME, VENV, DOCS_VENV, PYTHON (a 3.11+ interpreter), WORKERS (test processes: 2), BASE,
# SEEDS, CLIENTS, KINDS, and TORCH_INDEX (an index with the torch build you want, for instance a CPU-only
# one; the default index's Linux build brings gigabytes of CUDA libraries). Benchmarks read their own
# from the environment: QUICK, PARTS, ROUNDS, ... (the head of each one's file lists them).

VENV ?= .venv
# what builds the docs is a dependency of nothing else
DOCS_VENV ?= .venv-docs
PORT ?= 8000
DOCS_PORT ?= 8001
MODEL ?= smollm2-135m
WORKERS ?= 2
CONSTRAINTS ?= constraints.txt

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(DOCS_VENV)/.installed
NATIVE := paceline/backends/native/_lib.so
READY := $(STAMP) $(NATIVE)
BEGAN := $(shell date +%s)
# by this name, or make -n would run a target that calls it
SELF := $(MAKE) --no-print-directory
# tests start many processes, each of which would compile the package again
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
# a file's tests stay in one process, in which its servers and models are made once
TWO = -n $(WORKERS) --dist loadfile
DAILY := not ui and not services and not docs and not thorough
QUICK_TESTS := tests/core tests/speculation tests/property tests/contract tests/replay tests/checkpoints \
	tests/routing tests/test_public.py

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))
.DEFAULT_GOAL := test

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

serve: $(READY) ## an OpenAI-compatible server on PORT (8000); ARGS="--help" shows its flags
	@exec $(BIN)/paceline serve $(MODEL) --port $(PORT) $(ARGS)

# in the order of the files: by default those with many tests come first, and the model's, few and
# long, at the end by themselves. The check takes its minute next to the tests, without mypy's cache
# over a minute; what it finds is printed at once and once more at the end
test: $(READY) model ## make check and every day's tests: no Debian package, no browser, nothing long
	@said=$$(mktemp); { $(SELF) check >$$said 2>&1 || { cat $$said; false; }; } & \
		$(PYTEST) $(TWO) --no-loadscope-reorder -m "$(DAILY)"; failed=$$?; \
		wait $$! || { failed=1; cat $$said; }; rm $$said; \
		took=$$(($$(date +%s) - $(BEGAN))); echo "make test took $$((took / 60)) min $$((took % 60)) s"; exit $$failed

quick: $(READY) check ## under a minute: make check and the tests that need no process and no model
	@$(PYTEST) -n $(WORKERS) -m "not slow and $(DAILY)" $(QUICK_TESTS)

check: $(STAMP) ## style, types, layers, sizes and words only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_sizes.py && $(BIN)/python scripts/plain_words.py --limit
	$(BIN)/python scripts/constants_table.py

test-ui: $(READY) ## the page at /ui in Chromium, which apt-get installs, its bundle and types (node and npm)
	@scripts/test-services chromium:chromium && scripts/vendor-ui --check
	@$(BIN)/python -m tests.clients.typescript >/dev/null
	@$(PYTEST) --no-skips tests/ui tests/web/test_page.py tests/client/test_typescript.py

test-services: $(READY) ## tests with a real Redis and a real Prometheus, which apt-get installs
	@scripts/test-services redis-server:redis-server prometheus:prometheus nginx:nginx-light
	@$(PYTEST) --no-skips -m "services and not thorough"

test-thorough: $(READY) model ## what takes long: more cases, seeds, models and kernels than make test has
	@scripts/test-services qemu-x86_64:qemu-user redis-server:redis-server && $(PYTEST) $(TWO) --hypothesis-profile thorough -m "thorough or hypothesis"

test-docs: $(READY) model docs ## the docs site in Chromium, and every example of the pages that is marked `run`
	@scripts/test-services chromium:chromium nginx:nginx-light && $(PYTEST) --no-skips tests/docs

test-all: test test-ui test-services test-thorough test-wheel test-docs ## all of these, and the wheel as strangers would install it

# by way of the source distribution, so what that lacks is missed
wheel: $(STAMP) ## dist/*.whl with the kernels compiled, tagged with the glibc that they need
	@rm -rf dist && PACELINE_KERNELS=required $(BIN)/python -m build --outdir dist . >/dev/null && ls -l dist
# CMake looks for a cross compiler (Debian: g++-aarch64-linux-gnu)
wheel-aarch64: $(STAMP) ## one for aarch64, cross-compiled, with the portable kernels alone
	@CMAKE_TOOLCHAIN_FILE=$(CURDIR)/scripts/aarch64.cmake PACELINE_KERNELS=required \
		$(BIN)/python -m build --wheel --outdir dist . >/dev/null && ls -l dist

test-wheel: wheel model ## that wheel in an empty environment: size, seconds, an answer without PyTorch
	@$(BIN)/python -m tests.wheel dist/*.whl --constraint $(CONSTRAINTS)

# npm's client wants node; without it, it is reported absent
test-clients: $(READY) model ## other people's SDKs and tools against a live server (CLIENTS="openai llm" chooses), and its OpenAPI document
	@$(BIN)/python -m tests.server.schemathesis_run
	@$(BIN)/python -m tests.clients $(CLIENTS)
	@$(BIN)/python -m tests.clients.vectors
	@$(BIN)/python -m tests.clients.typescript
test-upstreams: $(READY) model ## the gateway before llama.cpp's server and vLLM, killed under its streams, and our scheduler inside vLLM (KINDS="vllm paced")
	@$(BIN)/python -m tests.upstreams $(KINDS)

test-fleet: $(READY) ## replicas, engines, controllers and (with paceline[ray]) actors killed and stopped under streams, FAULTS (1) times each
	@$(PYTEST) tests/fleet && FAULTS="$(or $(FAULTS),1)" $(BIN)/python -m benchmarks.fleet.faults

docs: $(DOCS_STAMP) ## the docs site into build/site; fails where a page has a broken link
	@scripts/docs-demo && $(DOCS_VENV)/bin/zensical build --strict --clean
docs-serve: $(DOCS_STAMP) ## the same while you write, on DOCS_PORT (8001)
	@scripts/docs-demo && exec $(DOCS_VENV)/bin/zensical serve --dev-addr 127.0.0.1:$(DOCS_PORT)

pictures: $(READY) model ## the pictures of docs/images: a recorded run, and the page that the default model answers
	@$(BIN)/python -m benchmarks.front_door.picture
	@scripts/test-services chromium:chromium && $(BIN)/python -m tests.ui.pictures
five-minutes: ## a newcomer's way in a fresh clone, timed: from nothing to a paced answer
	@scripts/five-minutes
ten-minutes: $(READY) model ## docs/start/gateway-in-ten-minutes.md followed with the default model, timed
	@$(BIN)/python -m tests.docs.follow docs/start/gateway-in-ten-minutes.md

api-tables: $(STAMP) ## tables of docs/use/api.md, docs/use/flags.md and docs/understand/constants.md
	@$(BIN)/python scripts/api_tables.py --write && $(BIN)/python scripts/constants_table.py --write && $(BIN)/python scripts/flag_tables.py --write
rooms: $(STAMP) ## draw the rooms from the imports, in build/rooms.md too
	@$(BIN)/python scripts/rooms.py --write
replay: $(STAMP) ## the first step that the core of BASE (a commit) decides otherwise, in SEEDS (500) scenarios a policy
	@$(BIN)/python -m tests.replay.side_by_side --processes $(WORKERS) \
		$(if $(BASE),--base $(BASE)) $(if $(SEEDS),--seeds $(SEEDS))

format: $(STAMP) ## apply the formatter and the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(STAMP) ## download the default model
	@$(BIN)/paceline pull smollm2-135m
bench: $(READY) model ## run a benchmark, for instance QUICK=1 make bench NAME=peers; without NAME, list them
	@exec $(BIN)/python -m benchmarks $(NAME) $(ARGS)
# an earlier target, or a slip: answered without the environment
bench-%:
	@$(firstword $(wildcard $(BIN)/python) python3) -m benchmarks $@
studies: $(STAMP) ## simulate the claims of docs/studies and renew its tables and plots
	@$(BIN)/python -m benchmarks.studies --write

venv: $(READY) ## the environment and the kernels, without a test

$(STAMP): pyproject.toml $(CONSTRAINTS) scripts/make-venv
	@VENV="$(VENV)" CONSTRAINTS="$(CONSTRAINTS)" TORCH_INDEX="$(TORCH_INDEX)" scripts/make-venv && touch $@

$(DOCS_STAMP): pyproject.toml $(CONSTRAINTS) scripts/make-docs-venv
	@VENV="$(DOCS_VENV)" CONSTRAINTS="$(CONSTRAINTS)" scripts/make-docs-venv && touch $@

# without a compiler everything works but --compute native; the next make tries again
$(NATIVE): $(wildcard csrc/*) paceline/backends/native/build.py | $(STAMP)
	@$(BIN)/python -m paceline.backends.native.build >&2 || \
		echo "paceline: the native kernels were not built (see above); --compute torch serves" >&2

clean: ## remove caches and build output
	rm -rf $(NATIVE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache build dist *.egg-info
	find paceline tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
clean-venv: clean ## the environments too
	@[ ! -e "$(VENV)" ] || [ -e "$(VENV)/pyvenv.cfg" ] || { \
		echo "paceline: $(VENV) is no virtual environment, so it stays" >&2; exit 1; }
	rm -rf "$(VENV)"
	[ ! -e "$(DOCS_VENV)/pyvenv.cfg" ] || rm -rf "$(DOCS_VENV)"
