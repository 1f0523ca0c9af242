# make run: a server with the demo model. make test: the tests. Both set up .venv when pyproject.toml has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: run test fast lint bench clean
.SUFFIXES:

# `exec`, so that Ctrl-C reaches the program and its exit status is ours
run: $(VENV)/.installed
	@exec $(BIN)/pagedray serve $(ARGS)

test: $(VENV)/.test-installed
	@$(BIN)/python -m pagedray.cluster.demo_model
	@exec $(BIN)/python -m pytest $(ARGS)

fast: $(VENV)/.test-installed
	@exec $(BIN)/python -m pytest -m "not slow and not serve" $(ARGS)

lint: $(VENV)/.test-installed $(VENV)/types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@cd $(VENV)/types && exec ../bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p pagedray

# of a server that runs: make run in another terminal
bench: $(VENV)/.installed
	@exec $(BIN)/pagedray bench serve $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "PagedRay needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Say make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "pagedray: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "pagedray: installing; the first time takes minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test-installed: pyproject.toml | $(VENV)/bin/python
	@echo "pagedray: installing, with what the tests need; the first time takes minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check -e ".[test]"
	@touch $@ $(VENV)/.installed

# the folders as the package they are installed as: type checkers do not follow an editable install
$(VENV)/types: | $(VENV)/bin/python
	@mkdir -p $@/pagedray
	@ln -sfn $(CURDIR)/pagedray/__init__.py $(CURDIR)/pagedray/__main__.py $@/pagedray/
	@for folder in kernels scheduler workers cluster; do ln -sfn $(CURDIR)/$$folder $@/pagedray/$$folder; done
