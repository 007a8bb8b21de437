# make demo     train on real data with tables 37 times larger than their memory budget, and check every bit
# make test     run the tests, JOBS files at a time     (PYTEST_ARGS="tests/cli -x" picks some)
# make lint     ruff, mypy, clang-format (what CI checks); make format mends what they can
# make docs     build the documents as a site in build/site, warnings as errors
# make wheel    build the wheel in an isolated environment, without torch
# make sanitize    the native tests of the store and the thread pool, and fuzzing, under ASan, UBSan and TSan
# make crash-test  100,000 crash states of the store, 20,000 random steps on each engine, 1,000 trainings killed,
#                  200,000 steps of processes under attack (CI: 2,400, 600, 32, 1,500), and all places that CI thins
#                  (tests/density.py)
# make gpu-build, gpu-check, gpu-bench    on a machine with a GPU and without a network, with the packages of PYTHON:
#                  docs/how-to/gpu.md
# make gpu-pack    what these would compile, into gpu-pack/, on a machine without a GPU: the core for GPU_PYTHON, and the
#                  kernels for GPU_ARCH by the release GPU_NVRTC of NVRTC
# make clean    remove everything that these made
#
# Everything is installed in .venv, in place: an edit of a Python file needs no reinstall, one under csrc/ makes the
# next call compile that file, and a header under csrc/ all of them. Objects lie in build/, and all builds share them.
# PYTHON and TORCH choose the interpreter and the torch release, JOBS the number of test processes (one more than CI has
# cores, since tests wait for disks, timers and one another; 0: in pytest's own, for a debugger).

PYTHON ?= python3
TORCH ?= 2.13.0
JOBS ?= 3
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CSRC := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
INSTALLED := $(VENV)/installed-torch-$(TORCH)
PACKAGES := $(VENV)/packages-torch-$(TORCH)
TESTABLE := $(VENV)/testable-torch-$(TORCH)

# Python keeps what it compiled, whatever the environment says: hundreds of tests start an interpreter.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: gpu-pack gpu-build gpu-check gpu-bench
.PHONY: demo test lint format docs wheel clean sanitize
.PHONY: crash-test crash-states crash-steps crash-kills crash-attack crash-places
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	@rm -rf demo-out/store && mkdir -p demo-out
	$(BIN)/tierstore train --data flights --hbm 1/37 --store demo-out/store --policy lookahead --depth auto \
	  --epochs 1 --compare in-memory --json demo-out/result.json $(ARGS)

# A file's tests run in one process, in their order. Our modules are compiled before: all processes begin with them.
test: $(TESTABLE)
	$(BIN)/python -m compileall -q tierstore cache_policies bench
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Tests that run on a GPU alone: elsewhere they are only compared with what they call.
ON_GPU := tests/cuda/test_on_gpu.py tests/cuda/test_training_on_gpu.py

lint: $(PACKAGES)
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/python -m mypy || failed=1; \
	$(BIN)/python -m mypy --follow-imports=silent $(ON_GPU) || failed=1; \
	$(BIN)/clang-format --dry-run -Werror $(CSRC) || failed=1; \
	exit $$failed

format: $(PACKAGES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

docs: $(TESTABLE)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/site

wheel: $(VENV)/created
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

# Plain programs, so that nothing but the store and what it uses is instrumented.
SANITIZED := $(addprefix csrc/common/,crc32c.cc float_mode.cc fork.cc huge_pages.cc key.cc page_allocator.cc \
  thread_pool.cc) \
  $(wildcard csrc/io/*.cc csrc/store/*.cc)
SANITIZE_OUT := build/sanitize

# Objects are compiled once in each of these ways, and link with every program. `small`: the index has a thousandth
# of its limits. `fuzzed`: the fuzzer counts which edges of the code its inputs reach.
ADDRESS := -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZERS := address thread small fuzzed
FLAGS_address := $(ADDRESS)
FLAGS_thread := -fsanitize=thread
FLAGS_small := $(ADDRESS) -DTIERSTORE_SMALL_INDEX
FLAGS_fuzzed := $(ADDRESS) -fsanitize-coverage=trace-pc

define sanitizer
$(SANITIZE_OUT)/$(1)/%.o: csrc/%.cc $(filter %.h,$(CSRC))
	@mkdir -p $$(@D)
	$(CXX) -std=c++20 -g -O1 $(FLAGS_$(1)) $(CXXFLAGS) -pthread -Icsrc -c $$< -o $$@

$(SANITIZE_OUT)/%-$(1): $(SANITIZE_OUT)/$(1)/store/tests/%.o $(SANITIZED:csrc/%.cc=$(SANITIZE_OUT)/$(1)/%.o)
	$(CXX) $(FLAGS_$(1)) -pthread $$^ -o $$@

$(SANITIZE_OUT)/%-$(1): $(SANITIZE_OUT)/$(1)/common/tests/%.o $(SANITIZED:csrc/%.cc=$(SANITIZE_OUT)/$(1)/%.o)
	$(CXX) $(FLAGS_$(1)) -pthread $$^ -o $$@

.PRECIOUS: $(SANITIZE_OUT)/$(1)/%.o
endef
$(foreach kind,$(SANITIZERS),$(eval $(call sanitizer,$(kind))))

sanitize: $(addprefix $(SANITIZE_OUT)/,config_test-address auto_reader_test-address gain_test-address \
  index_test-address index_test-small table_locations_test-address store_test-address scan_test-address \
  fuzz_formats-fuzzed store_test-thread scan_test-thread thread_pool_test-address thread_pool_test-thread)
	$(SANITIZE_OUT)/thread_pool_test-address 50
	$(SANITIZE_OUT)/thread_pool_test-thread 20
	$(SANITIZE_OUT)/config_test-address
	@mkdir -p $(SANITIZE_OUT)/stores
	$(SANITIZE_OUT)/auto_reader_test-address $(SANITIZE_OUT)/stores
	$(SANITIZE_OUT)/gain_test-address
	$(SANITIZE_OUT)/index_test-address 200000
	$(SANITIZE_OUT)/index_test-small 200000
	$(SANITIZE_OUT)/table_locations_test-address 200000
	$(SANITIZE_OUT)/store_test-address $(SANITIZE_OUT)/stores 300
	$(SANITIZE_OUT)/store_test-thread $(SANITIZE_OUT)/stores 200
	$(SANITIZE_OUT)/scan_test-address $(SANITIZE_OUT)/stores
	$(SANITIZE_OUT)/scan_test-thread $(SANITIZE_OUT)/stores
	$(SANITIZE_OUT)/fuzz_formats-fuzzed csrc/store/tests/corpus 100000

crash-test: $(TESTABLE)
	@$(MAKE) --no-print-directory --jobs 3 --keep-going --output-sync=target \
	  crash-states crash-steps crash-kills crash-attack crash-places

# However long one of these tests takes.
PATIENT := $(BIN)/python -m pytest -o faulthandler_timeout=0 --timeout 86400

crash-states: $(TESTABLE)
	TIERSTORE_CRASH_STATES=100000 $(PATIENT) tests/store/native/test_crash_states.py

crash-steps: $(TESTABLE)
	TIERSTORE_STATEFUL_STEPS=20000 $(PATIENT) tests/store/test_stateful.py

crash-kills: $(TESTABLE)
	TIERSTORE_CRASH_KILLS=1000 $(PATIENT) tests/checkpoint/test_killed.py

crash-attack: $(TESTABLE)
	TIERSTORE_ATTACK_STEPS=200000 $(PATIENT) tests/attack

crash-places: $(TESTABLE)
	TIERSTORE_THOROUGH=1 $(PATIENT) $(shell grep -rl 'from tests.density' tests)

# On a machine without a GPU: what the targets below would have to compile. The core is compiled in a copy of the
# source, so that the one of .venv stays, by the Python that the machine with the GPU has.
GPU_PYTHON ?= python3.12
GPU_ARCH ?= 90
GPU_NVRTC ?= 13.0.88
PACKING := build/gpu-pack
gpu-pack: $(TESTABLE)
	rm -rf gpu-pack $(PACKING)/source $(PACKING)/venv $(PACKING)/core $(PACKING)/nvrtc
	mkdir -p gpu-pack $(PACKING)/source $(PACKING)/objects
	cp -pr setup.py pyproject.toml README.md LICENSE csrc tierstore cache_policies bench $(PACKING)/source
	ln -s ../objects $(PACKING)/source/build
	$(GPU_PYTHON) -m venv $(PACKING)/venv
	$(PACKING)/venv/bin/python -m pip --disable-pip-version-check install --quiet "setuptools>=77" "pybind11>=3.0"
	cd $(PACKING)/source && TIERSTORE_CORE= TIERSTORE_BUILD_JOBS=$$(nproc) ../venv/bin/python setup.py --quiet \
	  build_ext --build-lib ../core
	cp $(PACKING)/core/tierstore/_core*.so gpu-pack
	$(PIP) install --quiet --no-deps --target $(PACKING)/nvrtc nvidia-cuda-nvrtc==$(GPU_NVRTC)
	$(BIN)/python -m tests.cuda.pack compile --arch $(GPU_ARCH) --nvrtc $(PACKING)/nvrtc
	@du -sh gpu-pack
	@echo "Copy gpu-pack into the checkout on the machine with the GPU: make gpu-build uses it. By hand: gpu-pack/_core*.so"
	@echo "goes to tierstore/, and gpu-pack/cubins/* to ~/.cache/tierstore/cubins (XDG_CACHE_HOME/tierstore/cubins if set)."

# For a machine that is lent by the minute: nothing is downloaded, the packages are those that PYTHON has, and each
# target ends within ten minutes, whatever hangs.
GPU_OUT ?= gpu-out
gpu-build:
	$(PYTHON) -m tests.cuda.check_gpu --needs
	$(PYTHON) -m tests.cuda.pack install
	TIERSTORE_CORE=$$($(PYTHON) -m tests.cuda.pack core) TIERSTORE_BUILD_JOBS=$$(nproc) timeout -k 10 570 \
	  $(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .

gpu-check:
	timeout -k 10 580 $(PYTHON) -m tests.cuda.check_gpu --minutes 9 --out $(GPU_OUT)

gpu-bench:
	mkdir -p $(GPU_OUT)
	timeout -k 10 580 $(PYTHON) -m tierstore.cli bench gpu --json $(GPU_OUT)/bench.json

clean:
	rm -rf $(VENV) build dist demo-out gpu-pack *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f tierstore/_core*.so docs/reference/commands.md docs/reference/measurements.md
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "tierstore needs Python 3.10 or newer as '$(PYTHON)'; name another with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || { \
	  echo "the headers of '$(PYTHON)' are missing; on Debian: apt-get install python3-dev"; exit 1; }
	@set -- $${CXX:-g++}; command -v "$$1" >/dev/null || { \
	  echo "no C++20 compiler found; on Debian: apt-get install g++"; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(INSTALLED): $(VENV)/created pyproject.toml setup.py $(CSRC)
	@echo "Installing torch $(TORCH) and tierstore in $(VENV): minutes the first time, mostly downloads and the compiler."
	$(PIP) install --quiet "torch==$(TORCH)" -e ".[plot,data]"
	@rm -f $(OTHERS) && touch $@

# Stamps of other releases of torch, which an installation replaces.
OTHERS = $(filter-out %-torch-$(TORCH),$(wildcard $(VENV)/*-torch-*))

# torchrec and fbgemm are the peers that tests compare with. torchrec asks for the CUDA build of fbgemm, so the two are
# installed without what they ask for, and what `import torchrec` needs is named here. Each release goes with one of torch.
PEERS := fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
ifneq ($(filter 2.11.%,$(TORCH)),)
PEERS := fbgemm-gpu-cpu==1.6.0 torchrec==1.6.1 iopath portalocker
else ifneq ($(filter 2.12.%,$(TORCH)),)
PEERS := fbgemm-gpu-cpu==1.7.0 torchrec==1.7.0 iopath portalocker
else ifneq ($(filter 2.14.%,$(TORCH)),)
PEERS := fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2
endif
# Frameworks that tests train with, without the servers, hubs and the second copy of Lightning that they ask for.
FRAMEWORKS := lightning==2.6.6 accelerate==1.15.0
# What tests import first, of packages that have twice as much code: Python compiles what is imported, where pip would
# compile all. Several processes that began with them would each compile them.
IMPORTED := lightning, matplotlib.pyplot, pandas, pyarrow.parquet, scipy.stats, sklearn.metrics, torchmetrics, \
  torchrec, torch._inductor.compile_fx, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run
# Everything that tests and linters use but tierstore, which a compiler can work on meanwhile.
$(PACKAGES): $(VENV)/created pyproject.toml
	@echo "Installing torch $(TORCH) and other packages in $(VENV): a minute or two, mostly downloads."
	$(PIP) install --quiet --no-compile "torch==$(TORCH)" tensordict pyre-extensions torchmetrics==1.0.3 tqdm \
	  lightning-utilities fsspec $$($(BIN)/python .ci/requirements.py plot data test lint docs)
	$(PIP) install --quiet --no-compile --no-deps $(PEERS) $(FRAMEWORKS)
	$(BIN)/python -W ignore -c 'import $(IMPORTED)'
	@rm -f $(OTHERS) && touch $@

$(TESTABLE): $(PACKAGES) setup.py $(CSRC)
	@echo "Installing tierstore in $(VENV): minutes if its core is not compiled yet."
	$(PIP) install --quiet --no-deps --editable .
	@touch $@
