# Every target works from a fresh clone: the virtual environment is a prerequisite, made once.
#
#   make serve          an OpenAI-compatible server on PORT (8000); ARGS="--help" shows its flags
#   make test           style, types, layers and all tests
#   make quick          under a minute: make check and the tests that need no process and no model
#   make check          style, types and layers only
#   make rooms          draw the rooms from the imports, in build/rooms.md too
#   make api-tables     the tables of fields in docs/use/api.md, from the bodies that the server reads
#   make replay         the core of BASE (a commit) and this one through SEEDS (500) scenarios of each
#                       policy: the same decisions? prints the first step that differs
#   make test-all       make test, what it leaves out for its length, and the wheel as strangers would
#                       install it, and make test-docs
#   make test-seconds   where the last `make test` took how long: seconds by folder, file and test
#   make wheel          dist/*.whl with the kernels compiled, tagged with the glibc that they need
#   make wheel-aarch64  one for aarch64, cross-compiled, with the portable kernels alone
#   make test-wheel     that wheel in an empty environment: size, seconds, an answer without PyTorch
#   make test-clients   SDKs and tools that people use, each in an environment of its own under the
#                       cache folder, against a live server (CLIENTS="openai llm" chooses), and
#                       everything that the OpenAPI document allows and forbids; and the types of
#                       clients/typescript
#   make test-upstreams the gateway before llama.cpp's server and vLLM's CPU build (KINDS=vllm chooses), whose
#                       servers are stopped and killed under its streams
#   make test-emulator  installs the emulator on which `make test-all` tries AVX2's kernels, where apt-get can
#   make docs           the docs site, searchable, into build/site; fails where a page has a broken link
#   make docs-serve     the same while you write, on DOCS_PORT (8001)
#   make test-docs      that site in a browser, and every example of the pages that is marked `run`
#   make pictures       the pictures of docs/images, of the page that the default model answers
#   make five-minutes   a newcomer's way in a fresh clone, timed: from nothing to a paced answer
#   make ten-minutes    docs/start/gateway-in-ten-minutes.md followed with the default model, timed: from one engine to
#                       a gateway whose engines are killed
#   make format         apply the formatter and the safe lint fixes
#   make model          download the default model
#   make bench-batching, make bench-scheduler, make bench-goodput     (QUICK=1 for a short run;
#                       LONG=10 adds so many minutes beyond capacity to the last)
#   make bench-overload what is kept of promises for as long as more is asked than can be done, in virtual time
#                       and live (QUICK=1; PARTS=rates,mixes,... POLICIES=a,b LOADS=1.2,2 SEEDS=5 MINUTES=10)
#   make bench-sim      the simulator's predictions against real servers (VLLM_RUNS=FOLDER;
#                       MODEL_SHAPE=FILE for models it does not know, PARTS=vllm for that part alone)
#   make studies        simulate the claims of docs/studies and renew its tables and plots
#   make bench-accuracy   what reduced precision changes on real text; the gate, on every level of
#                         the native kernels that runs here
#   make bench-levels     steps of every format on every such level, and the gate; WRITE=1 renews the
#                         table that `auto` chooses formats by (LEVEL=avx2: of one level alone)
#   make bench-kinds      the same gate on GGUF's kinds of 4 and 6 bits, made of the default model by
#                         llama.cpp's tool (KINDS=Q4_K_M LEVELS=avx2)
#   make bench-kernels    products, steps and sampling of the CPU kernels beside what the machine can do
#                         (ISA=avx2 picks a variant, PARTS=products,steps,sampling, QUICK=1);
#                         ISA=avxvnni,avx2 computes the same with several, in turns, by processor time
#   make bench-peers      the same work on other engines, each set up in a cache folder the first time
#                         (QUICK=1: under 10 minutes; PEERS=a,b ROWS=x,y RATES=1,2 ROUNDS=n choose;
#                         LEVEL=avx2 holds all engines to one level of instructions)
#   make bench-sizes      random weights of larger shapes beside llama.cpp: rates, memory, seconds to
#                         ready (SIZES=0.6b,1.7b,moe KINDS=Q4_0 ROWS=x,y ROUNDS=n LEVEL=avx2; QUICK=1: the smallest, once)
#   make bench-grammars   what constrained output costs, and that all of it is valid
#   make bench-metrics    how long /metrics takes under load
#   make bench-background what a large batch in the background does to those who wait for tokens (LONG=1: five minutes)
#   make bench-speculation  what guessing tokens brings, with and without in turns (PROMPTS=FILE, PARTS=NAME:TURNS,...)
#   make bench-drafters     tokens a step by what guesses them, of recorded answers (RECORD=FILE or ANSWERS=FILE)
#   make bench-gaps       how long streams stop when a long prompt comes
#   make bench-neighbours a server whose processors others use, and one with a quota of 1.5: are predictions true, promises kept?
#   make bench-faults     what clients see when something breaks, and how long until it is well
#   make bench-startup    seconds to the first token, where they go, and memory
#   make bench-memory     what a server holds, by kind, beside what 'plan memory' says (MODELS=a,b)
#   make bench-gateway  what the gateway adds, streams whose engine dies, where requests go
#                       (LITELLM=install or COMMAND, ROUTERS=install beside it; PARTS=overhead,routing,live_routing,
#                       failover; TIMES, MODEL_TIMES, MINUTES=6 of failover; POOLS=N,SEED; QUICK=1)
#   make bench-templates  what rendering chat templates in a process adds, and what attacks are felt of
#   make bench-ui       what the page at /ui costs the engine, streams and the browser (PARTS=tap,viewers,page; QUICK=1)
#   make bench-overhead   processor time of the server beyond the engine (BASELINE=CHECKOUT compares)
#   make clean          remove caches and build output;  clean-venv removes the environment too
#
# Variables: PORT, DOCS_PORT, ARGS, MODEL, QUICK, VENV (.venv), DOCS_VENV (.venv-docs),
# PYTHON (a 3.11+ interpreter to use), WORKERS (test processes of `make test`: 2; each file runs in one of them), TORCH_INDEX (a package
# index with the torch build you want, for instance a CPU-only one; the default index's Linux build
# brings several gigabytes of CUDA libraries).

VENV ?= .venv
# what builds the docs is no dependency of anything else
DOCS_VENV ?= .venv-docs
PORT ?= 8000
DOCS_PORT ?= 8001
MODEL ?= smollm2-135m
ARGS ?=
QUICK ?=
WORKERS ?= 2
VLLM_RUNS ?=
PEERS ?=
ROWS ?=
ROUNDS ?=
CLIENTS ?=
KINDS ?=
RATES ?=
BASE ?=
SEEDS ?=
LEVEL ?=
WRITE ?=
CONSTRAINTS ?= constraints.txt
TORCH_INDEX ?=

BIN := $(VENV)/bin
QUICK_TESTS := tests/core tests/speculation tests/property tests/contract tests/replay tests/checkpoints \
	tests/routing tests/test_public.py tests/test_rooms.py
STAMP := $(VENV)/.installed
# tests start many processes, each of which would compile the package anew
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
# what every test of the last `make test` took
DURATIONS := build/tests.xml
NATIVE := paceline/backends/native/_lib.so
READY := $(STAMP) $(NATIVE)
DOCS_STAMP := $(DOCS_VENV)/.installed

export QUICK VLLM_RUNS PEERS ROWS ROUNDS RATES LEVEL TORCH_INDEX LITELLM PARTS POOLS SIZES

.PHONY: serve test test-all test-thorough test-seconds wheel wheel-aarch64 test-wheel test-clients test-upstreams test-ui test-services test-emulator test-docs \
	docs docs-serve pictures five-minutes ten-minutes quick check rooms api-tables replay format model venv clean clean-venv \
	studies bench-batching bench-scheduler bench-goodput bench-overload bench-sim bench-accuracy bench-levels \
	bench-kernels bench-peers bench-grammars \
	bench-metrics bench-background bench-gaps bench-neighbours bench-faults bench-overhead bench-startup bench-templates \
	bench-gateway bench-speculation bench-drafters bench-sizes bench-ui bench-kinds bench-memory
.DEFAULT_GOAL := test

serve: $(READY)
	@exec $(BIN)/paceline serve $(MODEL) --port $(PORT) $(ARGS)

# pytest comes last, so its summary is the last thing printed. In the order of the files: by default
# those with many tests come first, and the model's, few and long, at the end by themselves
test: check $(READY) model test-services
	@$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not thorough" --junitxml=$(DURATIONS)

test-thorough: $(READY) model test-services test-emulator
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m thorough

test-seconds: $(STAMP)
	@$(BIN)/python -m tests.seconds $(DURATIONS)

test-all: test test-thorough test-wheel test-docs

# by way of the source distribution, so what that lacks is missed; older wheels would be tested too
wheel: $(STAMP)
	@rm -rf dist
	@PACELINE_KERNELS=required $(BIN)/python -m build --outdir dist . >/dev/null
	@ls -l dist

# beside the other; CMake looks for a cross compiler (Debian: g++-aarch64-linux-gnu)
wheel-aarch64: $(STAMP)
	@CMAKE_TOOLCHAIN_FILE=$(CURDIR)/scripts/aarch64.cmake PACELINE_KERNELS=required \
		$(BIN)/python -m build --wheel --outdir dist . >/dev/null
	@ls -l dist

test-wheel: wheel model
	@$(BIN)/python -m tests.wheel dist/*.whl --constraint $(CONSTRAINTS)

# Debian programs that some tests start for themselves; those tests skip without them
test-services:
	@scripts/test-services

# a processor with AVX2 and nothing better, of which the kernels' tests are run on any other
test-emulator:
	@scripts/test-services qemu-x86_64:qemu-user

# npm's client wants node; without it, it is reported absent
test-clients: $(READY) model
	@$(BIN)/python -m tests.server.schemathesis_run
	@$(BIN)/python -m tests.clients $(CLIENTS)
	@$(BIN)/python -m tests.clients.vectors
	@$(BIN)/python -m tests.clients.typescript

# the gateway before llama.cpp's server and vLLM's CPU build, which bench-peers sets up as well
test-upstreams: $(READY) model
	@$(BIN)/python -m tests.upstreams $(KINDS)

# the page at /ui: all of its tests, its types among them, none skipped, and its bundle made anew; wants
# node and npm
test-ui: $(READY) test-services
	@scripts/vendor-ui --check
	@PACELINE_UI_TESTS=require $(PYTEST) tests/ui tests/server/test_ui.py

docs: $(DOCS_STAMP)
	@scripts/docs-demo
	@$(DOCS_VENV)/bin/zensical build --strict --clean

docs-serve: $(DOCS_STAMP)
	@scripts/docs-demo
	@exec $(DOCS_VENV)/bin/zensical serve --dev-addr 127.0.0.1:$(DOCS_PORT)

test-docs: $(READY) model test-services docs
	@PACELINE_DOCS_TESTS=all PACELINE_UI_TESTS=require $(BIN)/python -m pytest tests/docs

pictures: $(READY) model test-services
	@$(BIN)/python -m tests.ui.pictures

# makes an environment of its own in a temporary folder, which goes again
five-minutes:
	@scripts/five-minutes

ten-minutes: $(READY) model
	@$(BIN)/python -m tests.docs.follow docs/start/gateway-in-ten-minutes.md

quick: $(READY) check
	@$(PYTEST) -n $(WORKERS) -m "not slow and not thorough" $(QUICK_TESTS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

api-tables: $(STAMP)
	@$(BIN)/python scripts/api_tables.py --write

rooms: $(STAMP)
	@$(BIN)/python scripts/rooms.py --write

replay: $(STAMP)
	@$(BIN)/python -m tests.replay.side_by_side --processes $(WORKERS) \
		$(if $(BASE),--base $(BASE)) $(if $(SEEDS),--seeds $(SEEDS))

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(STAMP)
	@$(BIN)/paceline pull smollm2-135m

bench-batching: $(READY) model
	@$(BIN)/python -m benchmarks.batching

bench-scheduler: $(STAMP)
	@$(BIN)/python -m benchmarks.scheduler

bench-goodput: $(READY) model
	@$(BIN)/python -m benchmarks.goodput

bench-overload: $(READY)
	@$(BIN)/python -m benchmarks.overload

bench-sim: $(READY) model
	@$(BIN)/python -m benchmarks.sim $(VLLM_RUNS)

studies: $(STAMP)
	@$(BIN)/python -m benchmarks.studies --write

bench-accuracy: $(READY) model
	@$(BIN)/python -m benchmarks.accuracy

bench-levels: $(READY) model
	@$(BIN)/python -m benchmarks.levels $(if $(LEVEL),--levels $(LEVEL)) \
		$(if $(WRITE),--write)

bench-kinds: $(READY) model
	@$(BIN)/python -m benchmarks.kinds

bench-kernels: $(READY)
	@$(BIN)/python -m benchmarks.kernels

bench-peers: $(READY) model
	@$(BIN)/python -m benchmarks.peers

bench-sizes: $(READY)
	@$(BIN)/python -m benchmarks.sizes

bench-grammars: $(READY) model
	@$(BIN)/python -m benchmarks.grammars

bench-metrics: $(STAMP)
	@$(BIN)/python -m benchmarks.metrics_latency

bench-background: $(READY) model
	@$(BIN)/python -m benchmarks.background

bench-gaps: $(READY) model
	@$(BIN)/python -m benchmarks.gaps

bench-neighbours: $(READY) model
	@$(BIN)/python -m benchmarks.neighbours

bench-speculation: $(READY) model
	@PROMPTS=$(PROMPTS) $(BIN)/python -m benchmarks.speculation

bench-drafters: $(READY) model
	@PROMPTS=$(PROMPTS) $(BIN)/python -m benchmarks.drafters

bench-faults: $(READY) model
	@$(BIN)/python -m benchmarks.faults

bench-overhead: $(READY) model
	@$(BIN)/python -m benchmarks.overhead

bench-gateway: $(READY) model
	@$(BIN)/python -m benchmarks.gateway

bench-ui: $(READY) test-services
	@$(BIN)/python -m benchmarks.ui

bench-templates: $(READY) model
	@$(BIN)/python -m benchmarks.templates

bench-startup: $(READY) model
	@$(BIN)/python -m benchmarks.startup

bench-memory: $(READY) model
	@$(BIN)/python -m benchmarks.memory

venv: $(READY)

$(STAMP): pyproject.toml $(CONSTRAINTS) scripts/make-venv
	@VENV="$(VENV)" CONSTRAINTS="$(CONSTRAINTS)" TORCH_INDEX="$(TORCH_INDEX)" scripts/make-venv
	@touch $@

$(DOCS_STAMP): pyproject.toml $(CONSTRAINTS) scripts/make-docs-venv
	@VENV="$(DOCS_VENV)" CONSTRAINTS="$(CONSTRAINTS)" scripts/make-docs-venv
	@touch $@

# Without a compiler everything works but --compute native; the next make tries again.
$(NATIVE): $(wildcard csrc/*) paceline/backends/native/build.py | $(STAMP)
	@$(BIN)/python -m paceline.backends.native.build >&2 || \
		echo "paceline: the native kernels were not built (see above); --compute torch serves" >&2

clean:
	rm -rf $(NATIVE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache build dist *.egg-info
	find paceline tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: clean
	@[ ! -e "$(VENV)" ] || [ -e "$(VENV)/pyvenv.cfg" ] || { \
		echo "paceline: $(VENV) is no virtual environment, so it stays" >&2; exit 1; }
	rm -rf "$(VENV)"
	[ ! -e "$(DOCS_VENV)/pyvenv.cfg" ] || rm -rf "$(DOCS_VENV)"
