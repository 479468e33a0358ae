# Two commands to know: `make demo` and `make test`. Both make the environment first, once.
PYTHON ?= python3
# Extra arguments for pip, for instance an --extra-index-url with CPU builds of torch,
# where the plain package would bring CUDA and you do not want it.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo agents test check format slow clean

demo: $(STAMP)
	$(BIN)/outpace train examples/demo.toml

agents: $(STAMP)
	$(BIN)/outpace train examples/calculator.toml
	$(BIN)/outpace train examples/guess.toml

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu and not smollm2"

slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu and not smollm2"

check: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev,datasets]"
	@touch $@

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
