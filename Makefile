# Python 3.11+ and make are all that these need: each target makes its own environment first.
#
#   make demo    train, be killed in the middle of a commit, resume bit-exact, branch; under three minutes
#   make test    the test suite            make check   ruff, mypy --strict, import contracts
#   make test-fast  the rooms below the verbs, without what is slow: about two minutes
#   make bench   the benchmark, into docs/benchmarks/   make fix     what ruff can mend by itself
#   make search  the searches with all their numbers, of which `make test` tries a part
#   make soak    tests that take minutes: a simulated year, a hundred thousand schedules
#   make oldest  the test suite with the oldest versions that pyproject.toml admits
#   make newest  the test suite with a newer torch than that of `make test`
#   make test-frameworks  trainings by transformers, Lightning and others, killed and resumed; brings all of them
#   make docs    docs/ as a site with search, the reference from docstrings, into build/site; warnings are errors
#   make pyright the calls of tests/test_types.py as pyright, which editors use, judges them; brings Node
#   make check-native  the native core by itself, under sanitizers, against what is plainly right; needs a C compiler

PYTHON ?= python3
# Arguments for a single run: make test ARGS='tests/objects -k pack', make bench ARGS=--quick
ARGS ?=
# Processes that run the tests side by side: more than there are cores, as tests wait for disks and for processes that
# are killed or late. 0: this one alone, as a debugger needs it.
JOBS ?= 3
# What `make test-fast` runs: the rooms that all others rest on.
FAST := $(addprefix tests/,objects layout storage parallel transfer index core repository)

# What `make search` runs: what hypothesis searches, or asks tests/searches.py how often to try.
SEARCHED := $(shell grep -rlE --include=test_*.py '(tests.searches|hypothesis[a-z.]*) import' tests)

# What `make test-pure` runs: who hashes, reads verified, copies or sums by way of cas_ckpt/native.py, each once.
PURE := $(addprefix tests/,native golden training/device training/test_restore.py training/test_frozen.py)
PURE += $(addprefix tests/transfer/test_,hashing.py sums.py extents.py fetch.py scatter.py saving_copies.py staging.py)
PURE += $(addprefix tests/ops/,commit/test_commit_checkout.py commit/test_frozen_trust.py checkout/test_read.py)
PURE += $(addprefix tests/,storage/test_memory_store.py properties/test_same_state_same_id.py)

# A test run starts dozens of interpreters: they share what is compiled.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BENCH := .venv-bench
OLDEST := .venv-oldest
NEWEST := .venv-newest
FRAMEWORKS := .venv-frameworks
DOCS := .venv-docs
PYRIGHT := .venv-pyright
STAMP := .cas-ckpt-installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-pure test-frameworks search soak check check-native check-native-aarch64 fix bench bench-ranks oldest newest docs pyright wheel clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n 1,14p

demo: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m examples.demo $(ARGS)

test: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-fast: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not soak" $(FAST) $(ARGS)

test-pure: $(VENV)/$(STAMP)
	CAS_CKPT_NATIVE=0 $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not soak" $(PURE) $(ARGS)

# Frameworks warn of one another and of torch: of warnings in cas_ckpt `make test` knows.
test-frameworks: $(FRAMEWORKS)/$(STAMP)
	$(FRAMEWORKS)/bin/python -m pytest -n $(JOBS) --dist worksteal -W default tests/frameworks $(ARGS)

search: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal --hypothesis-profile=full $(SEARCHED) $(ARGS)

soak: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m pytest -m soak $(ARGS)

check: $(VENV)/$(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

fix: $(VENV)/$(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(BENCH)/$(STAMP)
	$(BENCH)/bin/python -m benchmarks.harness $(ARGS)

# Four gloo processes against DCP (benchmarks/ranks.py); virtual ranks: python -m benchmarks.resharding
bench-ranks: $(BENCH)/$(STAMP)
	$(BENCH)/bin/python -m benchmarks.ranks $(ARGS)

oldest: $(OLDEST)/$(STAMP)
	$(OLDEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

newest: $(NEWEST)/$(STAMP)
	$(NEWEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# By a file of its own list: nothing of cas_ckpt is imported, and `make test` installs nothing of this.
docs: $(DOCS)/$(STAMP)
	PATH=$(DOCS)/bin:$$PATH $(DOCS)/bin/mkdocs build --strict $(ARGS)

pyright: $(VENV)/$(STAMP) $(PYRIGHT)/$(STAMP)
	PATH=$(PYRIGHT)/bin:$$PATH $(VENV)/bin/python -m pytest tests/test_types.py

wheel: $(VENV)/$(STAMP)
	$(VENV)/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(BENCH) $(OLDEST) $(NEWEST) $(FRAMEWORKS) $(DOCS) $(PYRIGHT) build dist demo-out bench-out .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The core and BLAKE3 without Python, compared with the plain way by tests/native/fuzz.c; ARGS: seconds.
BLAKE3 := $(addprefix native/blake3/blake3,.c _dispatch.c _portable.c)
BLAKE3_HERE := $(if $(filter aarch64 arm64,$(shell uname -m)),native/blake3/blake3_neon.c,$(wildcard native/blake3/*.S))
STRICT := -std=gnu11 -O2 -g -Wall -Wextra -Werror -DBLAKE3_TESTING -DBLAKE3_NO_SSE2
SANITIZED := -fsanitize=address,undefined -fno-sanitize-recover=all
FUZZED := tests/native/fuzz.c native/core.c $(BLAKE3)

check-native: $(VENV)/$(STAMP)
	mkdir -p build
	headers=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))') && \
	    $(CC) $(STRICT) -fsyntax-only -I$$headers native/module.c
	$(CC) $(STRICT) $(SANITIZED) $(FUZZED) $(BLAKE3_HERE) -o build/fuzz
	build/fuzz $(ARGS)

# Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
check-native-aarch64:
	mkdir -p build
	aarch64-linux-gnu-gcc $(STRICT) -static $(FUZZED) native/blake3/blake3_neon.c -o build/fuzz-aarch64
	qemu-aarch64 build/fuzz-aarch64 $(ARGS)

# An environment is made once for its list of pins: the stamp is newer than the lists and than what the native core is
# built from, or it is made again.
BUILT_FROM := pyproject.toml setup.py $(wildcard native/*.[ch] native/blake3/*.[chS])

define install
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-build.txt -r $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(@D)/bin/python -m compileall -q cas_ckpt  # else, under PYTHONDONTWRITEBYTECODE, each process compiles it anew
	touch $@
endef

$(VENV)/$(STAMP): requirements-dev.txt requirements-build.txt $(BUILT_FROM)
	$(install)

$(OLDEST)/$(STAMP): requirements-oldest.txt requirements-build.txt $(BUILT_FROM)
	$(install)

# The list of the environment of `make test`, but for what a list of their own has pins of.
$(NEWEST)/requirements.txt: requirements-newest.txt requirements-dev.txt
$(FRAMEWORKS)/requirements.txt: requirements-frameworks.txt requirements-dev.txt
$(NEWEST)/requirements.txt $(FRAMEWORKS)/requirements.txt:
	mkdir -p $(@D)
	awk -F== '!/^#/ && NF && !seen[$$1]++' $^ > $@

$(NEWEST)/$(STAMP): $(NEWEST)/requirements.txt requirements-build.txt $(BUILT_FROM)
	$(install)

$(FRAMEWORKS)/$(STAMP): $(FRAMEWORKS)/requirements.txt requirements-build.txt $(BUILT_FROM)
	$(install)

$(DOCS)/$(STAMP): requirements-docs.txt
$(PYRIGHT)/$(STAMP): requirements-pyright.txt
$(DOCS)/$(STAMP) $(PYRIGHT)/$(STAMP):
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(BENCH)/$(STAMP): benchmarks/requirements.txt requirements-build.txt $(BUILT_FROM)
	$(install)
