# make quickstart      from nothing to a report, in runs/quickstart/
# make test            the test suite
# make lint types      ruff, mypy
#
# Each makes .venv with what it needs, and does not do twice what is done. PYTHON is the interpreter that .venv is made with (3.11 or later).

PYTHON ?= python3
BIN := .venv/bin
STAMPS := .venv/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.PHONY: quickstart test lint types
.DELETE_ON_ERROR:

quickstart: $(STAMPS)/base
	$(BIN)/draftsmith quickstart

test: $(STAMPS)/dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest -n auto --dist loadfile

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev
	$(BIN)/mypy

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "PYTHON: wanted Python 3.11 or later, got '$(PYTHON)' ($$($(PYTHON) --version 2>&1 | tail -n 1)); name one: make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	mkdir -p $(STAMPS)
	touch $@

# torch on its own and first: the rest then settles for the build that is there, instead of choosing one.
$(STAMPS)/base: $(STAMPS)/venv pyproject.toml constraints.txt
	$(PIP) $(shell grep '^torch==' constraints.txt)
	$(PIP) -e .
	touch $@

$(STAMPS)/dev: $(STAMPS)/base
	$(PIP) -e '.[dev]'
	touch $@
