"""examples/plain_grpo.py computes bitwise the same as the learner and the embedded engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outpace.config import Config
from outpace.config.validation import resolve
from outpace.engines.embedded.decode_batch import DecodeBatch
from outpace.learner.core import LearnerCore
from outpace.models.loading import load_model
from outpace.runtime.rng import request_seed
from outpace.types import Generation, Sampling, Task

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_grpo.py"
CONFIG = {
    "pacing": {"max_lag": 0, "groups_per_step": 5, "chunk_groups": 2},
    "learner": {"lr": 1e-2, "tokens_per_pass": 100, "max_grad_norm": 0.5},
    "rollout": {"max_tokens": 12, "group_size": 4, "temperature": 0.9},
    "engine": {"slots": 8, "context": 64},
    "run": {"steps": 2, "threads": 1, "deterministic": True},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_grpo"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config() -> Config:
    return resolve(Config.model_validate(CONFIG))


def test_the_learner_of_the_script_makes_the_same_updates(
    script: ModuleType, config: Config, make_llama: Callable[..., LlamaForCausalLM]
) -> None:
    noise = np.random.default_rng(0)

    def answer() -> object:
        count = int(noise.integers(1, 12))
        tokens = noise.integers(0, 48, count).astype(np.int32)
        return script.Answer(tokens, noise.normal(-3, 0.5, count).astype(np.float32))

    def group(number: int) -> object:
        prompt = noise.integers(0, 48, 6).astype(np.int32)
        return script.Group(number, Task("t", ""), prompt, [answer() for _ in range(4)], noise.random(4).tolist())

    plain = script.Learner(config, make_llama().eval())
    # The script has no mask. The default mask rejects nothing on policy, but these random answers are off policy.
    correction = config.correction.model_copy(update={"masks": []})
    core = LearnerCore(make_llama(), config.model_copy(update={"correction": correction}))
    for version in range(3):
        batch = [group(number) for number in range(5)]
        loss, norm = plain.train(batch, version)
        for start in range(0, 5, 2):
            core.accumulate([row for g in batch[start : start + 2] for row in script.rows_of(g, version)])
        report = core.step()
        assert (loss, norm) == (report.loss, report.grad_norm)
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, core.parameters[name]), name


def test_the_sampler_of_the_script_draws_the_same_tokens_as_a_decode_batch(script: ModuleType, config: Config) -> None:
    model = load_model(config.model.path, dtype="float32", device="cpu")
    sampler = script.Sampler(config, model)
    tasks = script.Countdown("train", 0)
    groups = sampler.roll_out([(number, tasks[number]) for number in range(5)])

    decode_batch = DecodeBatch(sampler.decoder.sibling(sampler.decoder.prepare(model.state_dict())), 0, "keep", None)
    for group in groups:
        for episode in range(4):
            sampling = Sampling(
                max_tokens=12,
                seed=request_seed(config.run.seed, group.number, episode, 0),
                temperature=0.9,
                stop_ids=sorted(sampler.stops),
            )
            decode_batch.submit(f"{group.number}.{episode}", group.prompt, sampling, 0)
    results: dict[str, Generation] = {}
    while decode_batch.has_work:
        for done in decode_batch.advance():
            assert isinstance(done.result, Generation)
            results[done.id] = done.result
    for group in groups:
        for episode, answer in enumerate(group.answers):
            expected = results[f"{group.number}.{episode}"]
            assert answer.tokens.tolist() == expected.tokens.tolist()
            assert answer.logprobs.tobytes() == expected.logprobs.tobytes()


def test_the_script_replaces_groups_with_uniform_rewards(script: ModuleType) -> None:
    config = resolve(Config.model_validate({**CONFIG, "learner": {"lr": 1e-4}}))
    steps = list(script.run(config))
    assert [step["step"] for step in steps] == [1, 2]
    numbers = [group["group"] for step in steps for group in step["groups"]]
    assert numbers == list(range(len(numbers)))
    for step in steps:
        trained = [group for group in step["groups"] if group["trained"]]
        assert len(trained) == 5
        assert all(len(set(group["rewards"])) > 1 for group in trained)
        assert all(len(set(g["rewards"])) == 1 for g in step["groups"] if not g["trained"])
