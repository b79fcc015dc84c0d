# make sweep   set up and run the published comparison on this machine
# make test    set up and run all tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
FAST := not ray and not mlflow and not browser and not slow

.PHONY: sweep test test-fast lint ui clean

sweep: $(VENV)/.installed
	$(BIN)/python sweeps/speed_grid.py $(ARGS)

# the slow ones start clusters, servers and browsers that use every CPU: one after the other
test: test-fast
	$(BIN)/python -m pytest -q -m "not ($(FAST))" $(ARGS)

# a minute, without Ray, MLflow and compilers
test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m "$(FAST)" $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

ui: $(VENV)/.installed
	$(BIN)/python -m tinydit_ray.tracking ui $(ARGS)

# pip may keep quiet for minutes while it unpacks torch
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
