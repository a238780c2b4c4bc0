# `make demo`, `make test` and `make test-system` work on a fresh machine with Python 3.11-3.13, git and make.
# Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
WORKERS ?= 2

.PHONY: campaign demo docs lint sanitize test test-system venv
venv: $(STAMP)

KERNELS := $(wildcard kernels/*.cpp kernels/*.h)

$(STAMP): setup.cfg setup.py pyproject.toml constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v[:2] <= (3, 13) else \
	"error: FST needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d: choose one with PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[det,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python tools/demo.py $(DEMO_ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

test-system: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "system and not exhaustive" $(PYTEST_ARGS)

docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W -n --keep-going -q -d build/doctrees docs build/docs

campaign: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign $(CAMPAIGN_ARGS)

sanitize: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign.sanitize

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
