# Two commands are all a newcomer needs: `make demo` speaks, `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes of the tests, each with up to 3 GB of memory: one a core, four at most; `make test WORKERS=0`: in one process.
WORKERS ?= auto

.PHONY: demo test lint types contracts unit format clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/vivace say --out demo.wav \
	  "Hello! This is Vivace, speaking on your own computer." \
	  "It is 8:05, and the answer is 42." \
	  "Would you like to hear 3 more sentences?"

test: $(STAMP) lint types contracts unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo.wav
