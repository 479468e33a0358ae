"""A real pretrained chat model through the whole system, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace.models.loading import load_model
from support import journalled, read_lines, run_command

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(800)]

STEPS = 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2") / "run"
    result = subprocess.run(
        [
            sys.executable, "-m", "outpace.cli", "train", "--quiet", "--model.path=smollm2-135m",
            "--tasks.name=arithmetic", f"--run.dir={directory}", f"--run.steps={STEPS}", "--rollout.group_size=4",
            "--rollout.max_tokens=8", "--pacing.groups_per_step=4", "--pacing.chunk_groups=2", "--engine.slots=16",
            "--engine.context=128", "--filter.uniform=false", "--learner.lr=1e-6", "--eval.count=0",
        ],
        capture_output=True, text=True, timeout=700, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return directory


def test_ten_asynchronous_steps_complete(run: Path) -> None:
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
    lags = [line["lag/max"] for line in read_lines(run / "metrics.jsonl")]
    assert 1 <= max(lags) <= 4, "some tokens were sampled by an older policy, none by one beyond the bound"


def test_sampler_and_learner_agree_within_the_noise_of_float32(run: Path) -> None:
    first = read_lines(run / "metrics.jsonl")[0]
    assert first["lag/max"] == 0
    assert first["offpolicy/kl"] == pytest.approx(0, abs=1e-6)
    assert first["offpolicy/ratio_max"] == pytest.approx(1, abs=1e-3)


def test_recorded_logprobs_are_those_of_a_plain_forward_under_the_weights_that_sampled(run: Path) -> None:
    model = load_model("smollm2-135m", device="cpu")
    rows = [row for record in journalled(run / "journal").values() for row in record.rows]
    compared = 0
    for row in [row for row in rows if set(row.versions[row.mask].tolist()) == {0}][:8]:
        with torch.inference_mode():
            logits = model(torch.from_numpy(row.tokens[None].astype(np.int64))).logits[0].float()
        expected = torch.log_softmax(logits[:-1], -1).gather(1, torch.from_numpy(row.tokens[1:, None].astype(np.int64)))
        trained = row.mask[1:]
        np.testing.assert_allclose(row.logprobs[1:][trained], expected[:, 0].numpy()[trained], atol=1e-3)
        compared += int(trained.sum())
    assert compared > 0


def test_an_export_loads_in_transformers_and_generates_the_same_tokens(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    result = run_command("export", str(run), str(out))
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    [checkpoint] = sorted((run / "checkpoints").iterdir())[-1:]
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        torch.testing.assert_close(model.state_dict()[name].float(), tensor.float(), rtol=0, atol=0)
    messages = [{"role": "user", "content": "What is 7 + 5? Answer with the number only."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    theirs = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :].tolist()
    assert theirs == _engine_tokens(out, inputs["input_ids"][0].numpy())


def _engine_tokens(model: Path, prompt: np.ndarray) -> list[int]:
    import asyncio

    from outpace.engines.embedded.engine import EmbeddedEngine
    from outpace.models.loading import eos_ids
    from outpace.types import Sampling

    async def generate() -> list[int]:
        engine = EmbeddedEngine(str(model), slots=4, context=128, device="cpu")
        greedy = Sampling(max_tokens=8, seed=0, temperature=0.0, stop_ids=eos_ids(str(model)))
        generation = await engine.generate("one", prompt.astype(np.int32), greedy, 0, None)
        await engine.close()
        return generation.tokens.tolist()

    return asyncio.run(generate())
