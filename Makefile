# Everything lives in .venv; every target sets it up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.jurybox-setup
DEMO_STAMP := $(VENV)/.jurybox-demo

# How many tests run at once; each worker takes whole files, and has a folder of shared memory of its own.
WORKERS ?= 4

# Where torch comes from: PyTorch's CPU builds where there is no NVIDIA driver, since PyPI's brings 4 GB of CUDA along.
TORCH_INDEX ?= $(if $(wildcard /proc/driver/nvidia/version),,https://download.pytorch.org/whl/cpu)

.PHONY: setup demo test test-runs test-slow test-gpu test-containers test-browser test-native fuzz fuzz-native chaos soak lint licences audit wheel pythons test-fresh matrix release-check lock test-native-aarch64 format bench bench-full bench-crossover bench-peers gpu gpu-wheels monitoring reference proto sbom docs reward-kills door-kills clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

SOURCES := pyproject.toml constraints.txt CMakeLists.txt native/CMakeLists.txt $(wildcard native/*.?pp native/*/*.?pp)
# In a terminal pip shows what it downloads.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/pip install $(if $(MAKE_TERMOUT),,--quiet)

setup: $(STAMP)  ## make .venv with everything in it

$(STAMP): $(SOURCES) | $(VENV)/.jurybox-torch
	@echo "installing what tests and tools need: some 220 packages, 600 MB, and building the native part"
	$(PIP) -e '.[server,training,dev]'
	@touch $(DEMO_STAMP) $@

$(DEMO_STAMP): $(SOURCES) | $(VENV)/.jurybox-torch
	@echo "installing what the demo needs: some 75 packages, 300 MB, and building the native part"
	$(PIP) -e '.[server,training]'
	@touch $@

# Before anything is downloaded: what would fail after minutes.
$(VENV)/.jurybox-torch: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11")'
	@command -v $${CXX:-c++} >/dev/null || { echo "a C++17 compiler is needed: apt install g++, or set CXX" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; p = os.path.join(s.get_paths()["include"], "Python.h"); sys.exit(not os.path.exists(p) and f"the headers of this Python are needed ({p}): apt install python3-dev")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { echo "Python's module venv is needed: apt install python3-venv" >&2; exit 1; }
	@test -z "$(TORCH_INDEX)" || echo "installing torch for the CPU: 200 MB"
	@test -z "$(TORCH_INDEX)" || $(PIP) --retries 1 --no-deps --index-url "$(TORCH_INDEX)" torch || { \
	  echo "no torch from $(TORCH_INDEX). make TORCH_INDEX=URL takes another index of builds for the CPU;" \
	       "make TORCH_INDEX= takes PyPI's torch with CUDA's libraries, 5 GB installed" >&2; exit 1; }
	@touch $@

demo: $(DEMO_STAMP)  ## improve a photo editor against its juror; leaves demo-out/report.html
	$(BIN)/jurybox demo photo --out demo-out

test: setup  ## the whole default suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-runs: setup  ## whole trainings in their processes and what follows them; CI runs them, too
	$(BIN)/python -m pytest -m 'runs and not slow' --timeout 400 -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: setup  ## the longer proofs
	$(BIN)/python -m pytest -m slow --timeout 1800

test-gpu: setup  ## needs a CUDA device
	$(BIN)/python -m pytest -m gpu --timeout 600

# Not from setup: a machine with a GPU may have no network. What is there is used, ours where it was set up.
GPU_ENV_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON))
# The Python of that machine, for which wheels are carried along.
GPU_PYTHON ?= 3.12
GPU_WHEELS := build/gpu-wheels

gpu:  ## tests/gpu and the GPU measurements with the torch and CUDA that are there, no network; PART=1, 2, 3 or all; gpu-out/
	$(GPU_ENV_PYTHON) -m benchmarks.gpu $(if $(PART),--part $(PART)) $(GPU_OPTIONS)

gpu-wheels:  ## what a bare machine for `make gpu` lacks, to carry along: wheels for its Python (GPU_PYTHON) in build/gpu-wheels
	rm -rf $(GPU_WHEELS) && mkdir -p $(GPU_WHEELS)
	$(PYTHON) -m benchmarks.gpu.prepare NAMES > build/gpu-names.txt
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
	  $(foreach v,_2_28 _2_27 _2_26 _2_24 _2_17 2014 2010 1,--platform manylinux$(v)_x86_64) -d $(GPU_WHEELS) -r build/gpu-names.txt
	git describe --always --dirty --abbrev=12 --exclude '*' > $(GPU_WHEELS)/commit.txt
	du -sh $(GPU_WHEELS)

test-containers: setup  ## needs a container engine
	$(BIN)/python -m pytest -m containers --timeout 1800

test-browser: setup  ## needs chromium
	$(BIN)/python -m pytest -m browser --timeout 600

fuzz: setup  ## the long fuzzing: 100,000 inputs at each ZeroMQ transport, over gRPC, to HTTP's infer and into shared memory; HTTP by its description; 100,000 requests on the fast paths beside the general ones; the ZMTP parser under the sanitizers
	for s in address undefined; do \
	  $(BIN)/cmake -S . -B build/native-$$s -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DJURYBOX_NATIVE_TESTS=ON -DJURYBOX_SANITIZE=$$s -DCMAKE_BUILD_TYPE=RelWithDebInfo && \
	  $(BIN)/cmake --build build/native-$$s --target test_zmtp && \
	  JURYBOX_FUZZ_ROUNDS=100000 $(BIN)/ctest --test-dir build/native-$$s -R test_zmtp --output-on-failure --no-tests=error --timeout 1800 || exit 1; \
	done
	FUZZ_FIGURES=1 $(BIN)/python -m pytest tests/fuzz -m slow --timeout 3000

# Seconds for each parser, and a compiler with libFuzzer (apt install clang libclang-rt-14-dev).
FUZZ_SECONDS ?= 300
CLANG ?= clang++

fuzz-native: setup  ## libFuzzer on every native parser under the sanitizers, FUZZ_SECONDS (300) each; build/native-fuzz/*/ keeps what it finds
	$(BIN)/cmake -S . -B build/native-fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_CXX_COMPILER=$(CLANG) -DJURYBOX_NATIVE_FUZZ=ON
	$(BIN)/cmake --build build/native-fuzz
	for fuzzer in build/native-fuzz/native/fuzz_*; do \
	  name=$${fuzzer##*/fuzz_} && mkdir -p build/native-fuzz/$$name && \
	  $$fuzzer -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=build/native-fuzz/$$name- \
	    build/native-fuzz/$$name native/tests/fuzz/seeds/$$name || exit 1; \
	done

chaos: setup  ## CHAOS_KILLS (default 1000) kills of anyone under load, half an hour on two cores of its own, CHAOS_SECONDS (3600) at most; goes on where it was broken off; build/chaos/table.md
	nice -n 5 $(BIN)/python -m pytest -s -m slow -k thousand tests/faults/test_kills.py

reward-kills: setup  ## REWARD_KILLS (default 1000) kills of engine and gateway under all dialects, REWARD_SECONDS (6000) at most; then REWARD_REQUESTS (100000) and whether memory grew
	nice -n 5 $(BIN)/python -m pytest -s -m slow tests/faults/test_killed_dialects.py

door-kills: setup  ## DOOR_KILLS (default 1000) kills of engine and gateway under all dialects and robots at once, DOOR_SECONDS (6000) at most
	nice -n 5 $(BIN)/python -m pytest -s -m slow tests/faults/test_killed_doors.py

soak: setup  ## mixed load for SOAK_SECONDS (default 1800), then whether anything grew; benchmarks/soak/results
	$(BIN)/python -m benchmarks.soak

test-native: setup  ## the C++ tests, plain and under the thread, address and undefined-behaviour sanitizers
	for s in "" thread address undefined; do \
	  $(BIN)/cmake -S . -B build/native-$${s:-plain} -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DJURYBOX_NATIVE_TESTS=ON -DJURYBOX_WARNINGS_ARE_ERRORS=ON -DJURYBOX_SANITIZE=$$s -DCMAKE_BUILD_TYPE=RelWithDebInfo && \
	  $(BIN)/cmake --build build/native-$${s:-plain} && $(BIN)/ctest --test-dir build/native-$${s:-plain} --output-on-failure --no-tests=error || exit 1; \
	done

test-native-aarch64: setup  ## the C++ tests for aarch64, cross-compiled and under qemu's user emulation
	$(BIN)/cmake -S . -B build/native-aarch64 --toolchain $(CURDIR)/native/aarch64.cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DJURYBOX_NATIVE_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build build/native-aarch64 && $(BIN)/ctest --test-dir build/native-aarch64 --output-on-failure --no-tests=error --timeout 600

lint: setup  ## ruff, mypy --strict, import directions, a licence for every file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/reuse lint --quiet || $(BIN)/reuse lint

licences: setup  ## may what an install brings along be shipped with Apache-2.0? Needs no network
	$(BIN)/python .ci/licences.py

audit: setup  ## asks the vulnerability service about every pinned dependency; needs the network
	$(BIN)/python .ci/audit.py

wheel: setup  ## what is published, in dist/: a source distribution and wheels, looked at by auditwheel, abi3audit and twine
	$(BIN)/python .ci/wheels.py

pythons: wheel  ## every Python of 3.10 to 3.14 that is here: builds without warnings, serves, is asked over every transport and trains; CI runs it
	TORCH_INDEX="$(TORCH_INDEX)" WORKERS=$(WORKERS) $(BIN)/python .ci/pythons.py

# The releases of Debian, and README's commands.
FRESH ?= 12 13
FRESH_COMMANDS ?= demo test

test-fresh:  ## README's two commands in minimal roots of Debian, as a plain user; needs root and mmdebstrap; docs/install.md
	$(PYTHON) .ci/fresh.py --debian $(FRESH) --commands $(FRESH_COMMANDS) --page

matrix: setup  ## the wheel beside others' packages and in the Pythons that are here; minutes, and the package index
	$(BIN)/python -m pytest -m matrix --timeout 900 tests/wheel tests/integration/test_interpreters.py

release-check: setup  ## may this commit be released? Version, changelog, tag, what is shipped, twice the same bytes
	$(BIN)/python .ci/release.py

lock: setup  ## .ci/development.lock: every package of a development environment but torch, with hashes
	echo "torch; python_version < '3'" > build/no-torch.txt
	$(BIN)/uv pip compile --quiet --no-config pyproject.toml --extra server --extra training --extra dev -c constraints.txt \
	  --override build/no-torch.txt --generate-hashes --universal --python-version 3.11 --no-header --no-annotate -o .ci/development.lock

format: setup  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Of a clean tree only, on a machine that does nothing else. Each writes its results to benchmarks/serving/results and has
# docs/performance.md cite them. The peers' environments, in ~/.cache/jurybox-bench, are made by the first run.
bench: bench-peers  ## the serving benchmark in 20 minutes on two cores; benchmarks/serving/results and docs/performance.md
	$(BIN)/python -m benchmarks.serving --set bench --page

bench-full: bench-peers  ## the same with everybody and up to 256 clients, 90 minutes
	$(BIN)/python -m benchmarks.serving --set full --page

bench-crossover: setup  ## from which model size on a server beats a copy in every client, 7 minutes; docs/performance.md
	$(BIN)/python -m benchmarks.serving.crossover --page

bench-peers: setup  ## the peers of the benchmarks, each in an environment of its own; 5 GB, left alone where it is there
	-$(BIN)/python -m benchmarks.serving.peers.install

monitoring: setup  ## generate docs/metrics.md, the Grafana dashboard and Prometheus's rules
	$(BIN)/python docker/monitoring/generate.py

reference: setup  ## generate docs/cli.md, docs/settings.md and docs/api from the command line, the settings and the docstrings
	$(BIN)/python .ci/docs_pages.py
	$(BIN)/python training/generate_settings.py

sbom: setup  ## what installs of each kind bring along, as CycloneDX in sbom/; with an engine, of the images too
	$(BIN)/python .ci/sbom.py
	if command -v docker >/dev/null && docker info >/dev/null 2>&1; then docker build -f docker/Dockerfile --target sbom --output sbom .; fi

docs: $(VENV)/.jurybox-docs  ## the documentation as a site in build/site/; a dead link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

$(VENV)/.jurybox-docs: $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet -e '.[docs]'
	touch $@

proto: setup  ## generate the protobuf and gRPC code from protos/
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) build dist demo-out sbom
