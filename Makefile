# `make serve` and `make test` do everything on a fresh machine with Python >= 3.11 and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
PORT ?= 8000
ARGS ?=

.PHONY: install serve test test-all test-clients check format bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tokserve needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' || \
	  { echo "WARNING: the C++ extension did not build; installing with the torch reference ops only"; \
	    $(BIN)/pip install --quiet --disable-pip-version-check -Ccmake.define.TOKSERVE_NATIVE=OFF -e '.[dev]'; }
	touch $@

serve: install
	$(BIN)/tokserve serve $(MODEL) --port $(PORT) $(ARGS)

test: install check
	$(BIN)/python -m pytest -q

test-all: install check
	$(BIN)/python -m pytest -q -m 'not gpu and not multi_gpu and not network'

test-clients: install
	$(BIN)/python -m tests.clients.run $(CLIENTS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist
