# The verbs of this repository. `make serve` and `make test` work on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=

.PHONY: install serve test check fix bench soak demo-watchdog clean

# Only .venv with the `ullage` command in it, and the CPU kernels compiled.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Ullage needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/ullage warm
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

install: $(VENV)/.installed

serve: $(VENV)/.installed
	@exec $(BIN)/ullage serve $(if $(MODEL),--model '$(MODEL)')

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'slow or not slow' --timeout 3600

# A card that leaks, a watchdog that sees it, a reload, a stream that goes on: 90 seconds, no GPU.
demo-watchdog: $(VENV)/.installed
	@$(BIN)/python -P -m benchmarks.demo_watchdog $(if $(MODEL),'$(MODEL)')

clean:
	rm -rf $(VENV)
