# Two targets do all set-up by themselves: `make run` and `make test`. The second time they cost nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One worker for what shares a file, an engine's life or a page (tests/conftest.py): it is made once.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Without its caches Python compiles every module again in each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test slow timing browser containers thorough promises lint types contract check accuracy findings clean

help:  ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

run: $(VENV)/.run  ## Fire 1000 x 512 tokens at the embedded engine and write the report
	@$(BIN)/burstline run --engine reference || [ $$? -eq 4 ] # 4: done, but not VALID, and the page says why

test: $(VENV)/.dev  ## The quick test suite
	@$(BIN)/python -m pytest -q -n auto $(BY_FILE)

slow: $(VENV)/.slow  ## Minutes: numerics against transformers, real engines on a CPU, long simulations
	@$(BIN)/python -m pytest -q -m 'slow and not measures and not thorough' -n 3 $(BY_FILE) --timeout 1200

timing: $(VENV)/.slow  ## Tests that judge times, one at a time; undecided on a busy machine
	@$(BIN)/python -m pytest -q -m 'measures and not thorough' --timeout 1200

browser: $(VENV)/.slow  ## The pages in a real headless Chromium
	@$(BIN)/python -m pytest -q -m browser -n 2 $(BY_FILE) --timeout 600

containers: $(VENV)/.dev  ## The image, and a profile of docker-compose.yml, by a daemon that the tests start (root)
	@BURSTLINE_DOCKERD=1 $(BIN)/python -m pytest -q -m 'containers and not thorough' tests/test_containers.py tests/test_containers_live.py

thorough: $(VENV)/.slow  ## What CI has no time for: PARTS="oracle faults ..." of docs/thorough.md
	@$(BIN)/python scripts/thorough.py $(PARTS)

promises: $(VENV)/.slow  ## What README promises and whether it is proved; FROM=FOLDER: by pytest's XML there
	@$(BIN)/python -m tests.promises $(FROM)

lint: $(VENV)/.dev  ## Style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev  ## Strict types
	@$(BIN)/mypy

contract: $(VENV)/.dev  ## Imports go downwards only
	@$(BIN)/lint-imports

check: lint types contract test  ## What a change must pass

accuracy: $(VENV)/.run  ## The roofline model against measured data
	@$(BIN)/python -m research

findings:  ## Surprises in other packages: which of them changed (by hand; installs each into a temporary folder)
	@sh findings/all.sh

clean:  ## Remove the environment; runs stay
	rm -rf $(VENV)

$(VENV)/.run: pyproject.toml scripts/environment.sh
	@sh scripts/environment.sh $(PYTHON) $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@sh scripts/environment.sh $(PYTHON) $(VENV) dev
	@# Compiles what the tests import: their workers begin with the same modules, and each would compile them.
	@$(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 || true
	@touch $@

$(VENV)/.slow: $(VENV)/.dev
	@sh scripts/environment.sh $(PYTHON) $(VENV) dev slow
	@touch $@
