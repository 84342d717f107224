# thinwire on a fresh machine: `make demo`. Needs Python 3.11 to 3.13 and make; everything else goes in .venv.
#
#   make demo [DATA=PATH] [DEMO_ARGS=...]   train on this machine: a coordinator and four nodes
#   make test [TEST_ARGS=...]               tests that need no GPU
#   make test-gpu                           tests that need one
#   make check                              lint, types, generated code
#   make bench [BENCH_ARGS=...]             codec speeds
#   make proto                              generate wire/v1 from proto/
#   make constraints                        pin what .venv holds, after trying newer versions there
#   make clean                              remove .venv and caches; never runs/
#
# PYTHON=python3.12 chooses the interpreter for a new .venv.

PYTHON = python3
VENV = .venv
DATA =
DEMO_ARGS =
TEST_ARGS =
BENCH_ARGS =

.PHONY: demo test test-gpu check bench proto constraints clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(VENV)/bin/thinwire demo $(if $(DATA),--data "$(DATA)") $(DEMO_ARGS)

test: $(VENV)/installed-dev
	scripts/test $(TEST_ARGS)

test-gpu: $(VENV)/installed-dev
	scripts/test -m gpu $(TEST_ARGS)

check: $(VENV)/installed-dev
	scripts/check

bench: $(VENV)/installed
	$(VENV)/bin/python scripts/bench_codecs.py $(BENCH_ARGS)

proto: $(VENV)/installed-dev
	scripts/proto

# The local project has no version to pin, and a build suffix such as torch's +cpu names no public release.
constraints: $(VENV)/installed-dev
	{ grep '^#' constraints.txt; \
	  $(VENV)/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+.*//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kernels wire node tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are older than what they were made from when it changes, so the next command installs again.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(VENV)/installed $@

# pip comes last into a new environment, so it is there only if the environment is whole.
$(VENV)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not on the path: install Python 3.11 to 3.13, or name one, as in PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "$(PYTHON) is `$(PYTHON) --version 2>&1`, but thinwire needs 3.11 to 3.13: name one, as in PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) lacks venv: install it (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
