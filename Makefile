# thinwire on a fresh machine: `make demo`. Needs Python 3.11 to 3.13 and make; everything else goes in .venv.
#
#   make demo [DATA=PATH] [DEMO_ARGS=...]   train on this machine: a coordinator and four nodes
#   make test [TEST_ARGS=...]               tests that need no GPU
#   make test-gpu                           tests that need one
#   make check                              lint, types, generated code
#   make bench [BENCH_ARGS=...]             codec speeds
#   make fuzz [FUZZ=20]                     properties on other examples, 3 × FUZZ times as many as in make test
#   make soak [SOAK_ARGS=...]               random deaths of one row and of several, results compared bit for bit
#   make attack [ATTACK_ARGS=...]           members that lie and strangers at the ports, at full size
#   make proto                              generate wire/v1 from proto/
#   make constraints                        pin what .venv holds, after trying newer versions there
#   make clean                              remove .venv and caches; never runs/
#
# PYTHON=python3.12 chooses the interpreter for a new .venv.

PYTHON = python3
DATA =
DEMO_ARGS =
TEST_ARGS =
BENCH_ARGS =
SOAK_ARGS =
ATTACK_ARGS =
FUZZ = 20
# Triton's kernels are tested under its interpreter. torch brings Triton where it brings CUDA: that one is used.
TRITON = triton==3.6.0

.PHONY: demo test test-gpu check bench fuzz soak attack proto constraints clean
# Two installations at once would spoil each other.
.NOTPARALLEL:

demo: .venv/installed
	.venv/bin/thinwire demo $(if $(DATA),--data "$(DATA)") $(DEMO_ARGS)

test: .venv/installed-dev
	scripts/test $(TEST_ARGS)

test-gpu: .venv/installed-dev
	scripts/test -m gpu $(TEST_ARGS)

check: .venv/installed-dev
	scripts/check

bench: .venv/installed
	.venv/bin/python -m scripts.bench.codecs $(BENCH_ARGS)

fuzz: .venv/installed-dev
	THINWIRE_FUZZ=$(FUZZ) scripts/test -m "hypothesis and not gpu" --timeout 36000 tests/unit

soak: .venv/installed-dev
	.venv/bin/python -m scripts.checks.soak $(SOAK_ARGS)

attack: .venv/installed-dev
	.venv/bin/python -m scripts.checks.attack $(ATTACK_ARGS)

proto: .venv/installed-dev
	scripts/proto

# The local project has no version to pin, and a build suffix such as torch's +cpu names no public release.
constraints: .venv/installed-dev
	{ grep '^#' constraints.txt; \
	  .venv/bin/python -m pip freeze --all --exclude-editable --exclude pip --exclude triton | sed 's/+.*//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kernels wire node tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are older than what they were made from when it changes, so the next command installs again. Most modules of
# what is installed are never imported, and pip would compile all of them for a minute: only what a node imports is compiled.
PIP_INSTALL = .venv/bin/python -m pip install --disable-pip-version-check --no-compile
IMPORT = import node.processes.coordinator, node.processes.node
# The pip of Python 3.11 takes half a minute longer to choose versions. Where no newer one is to be had, it will do.
INSTALL = $(PIP_INSTALL) 'pip>=25' || true; $(PIP_INSTALL) -c constraints.txt -e .
unexport PYTHONDONTWRITEBYTECODE

.venv/installed: pyproject.toml constraints.txt | .venv/bin/pip
	$(INSTALL)
	.venv/bin/python -c '$(IMPORT)'
	touch $@

# While one core installs, the other compiles: first what is here, then what nodes import, and the codecs, as
# scripts/test would.
.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/pip
	.venv/bin/python -m compileall -q kernels node scripts tests/support wire & \
	{ $(INSTALL); }; installed=$$?; wait $$! && exit $$installed
	{ .venv/bin/python -c '$(IMPORT); from tests.support.compile_codecs import main; main()' && \
	  touch .venv/compiled; } & \
	{ $(PIP_INSTALL) -c constraints.txt 'thinwire[dev]' && { \
	  [ "`uname -s`" != Linux ] || .venv/bin/python -c 'import importlib.util as it, sys; sys.exit(it.find_spec("triton") is None)' || \
	  $(PIP_INSTALL) --no-deps $(TRITON); }; }; installed=$$?; wait $$! && exit $$installed
	touch .venv/installed $@

# pip comes last into a new environment, so it is there only if the environment is whole.
.venv/bin/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not on the path: install Python 3.11 to 3.13, or name one, as in PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "$(PYTHON) is `$(PYTHON) --version 2>&1`, but thinwire needs 3.11 to 3.13: name one, as in PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) lacks venv: install it (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
