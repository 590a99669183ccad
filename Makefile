# Everything is installed into $(VENV), made with $(PYTHON): make demo PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-night lint types docs bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo ## train a small GPT at stage 3 on 8 simulated devices (a few minutes)
	$(VENV)/bin/zerojax train --stage 3 --devices 8 $(ARGS)

test: $(VENV)/.test ## the ordinary tests (under ten minutes on two cores)
	$(VENV)/bin/python -m pytest -n $(WORKERS) $(ARGS)

test-all: $(VENV)/.test ## the ordinary tests and the long ones
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m "not night" $(ARGS)

test-night: $(VENV)/.test ## thousands of random trees, meshes and configurations, every optimizer at every stage
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m night $(ARGS)
	$(VENV)/bin/python -m pytest -n $(WORKERS) tests/test_properties.py tests/test_rows.py tests/test_across.py -k "properties or random" --hypothesis-profile=night $(ARGS)

lint: $(VENV)/.dev ## style and likely mistakes
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.dev ## static types
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/.docs ## the documentation, in build/docs
	$(VENV)/bin/python -m sphinx --quiet --nitpicky --fail-on-warning --keep-going -d build/doctrees docs build/docs

bench: $(VENV)/.demo ## time and memory of the stages
	$(VENV)/bin/python benchmarks/steps.py $(ARGS)

clean: ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One mark for each extra, made again when pyproject.toml changes.
$(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.dev: $(VENV)/.%: pyproject.toml $(VENV)/.made
	@echo "Installing zerojax[$*] into $(VENV); the first time this takes a minute or more"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(VENV)/.made:
	@case "$$("$(PYTHON)" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" in True) ;; *) \
		found=$$("$(PYTHON)" --version 2>&1) || found="no working Python"; \
		echo "zerojax needs Python 3.11 or newer, but $(PYTHON) is $$found; name another: make PYTHON=python3.12" >&2; \
		exit 1;; esac
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "zerojax needs Python's venv module, but $(PYTHON) lacks it; on Debian: apt install python3-venv" >&2; \
		exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@
