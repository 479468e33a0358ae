"""Conversations on a real engine while weights change: every recorded logprob is that of its token given exactly the
preceding tokens of its trajectory, under the recorded version."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.rollouts.client import PolicyClient
from outpace.types import Message, Trajectory
from outpace.weights.shared_memory import SnapshotWriter

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "a tool", "parameters": {"type": "object", "properties": {}}},
}
WORDS = ("ok", "é→", "", "  two  spaces ", "<tool_call>", "12", "line\nbreak", "the answer is stand-in")
VERSIONS = 6


def make_model(vocabulary: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=32,
        max_position_embeddings=768,
        initializer_range=0.2,  # large, so that a misplaced token shows up clearly
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def changed(model: PreTrainedModel, version: int) -> PreTrainedModel:
    """Weights far enough from the original that a token of the wrong version shows up clearly."""
    torch.manual_seed(version)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return other


async def converse(client: PolicyClient, chance: random.Random) -> None:
    """A few turns with tool results, some of them concurrent, with histories that are continued or edited."""
    tools = [TOOL] if chance.random() < 0.5 else []
    history: list[Message] = [{"role": "user", "content": chance.choice(WORDS)}]
    for _ in range(chance.randint(1, 4)):
        answers = await asyncio.gather(
            *(
                client.chat(history, tools=tools, max_tokens=chance.randint(1, 12))
                for _ in range(chance.choice((1, 1, 2)))
            )
        )
        message = chance.choice(answers).message
        if chance.random() < 0.15:
            message = {"role": "assistant", "content": "something that I never said"}
        result = [{"role": "tool", "content": chance.choice(WORDS)} for _ in range(chance.randint(0, 2))]
        history = [*history, message, *result, {"role": "user", "content": chance.choice(WORDS)}]
    conversation = client.conversation("helper")
    await conversation.sample(chance.choice(WORDS), max_tokens=5)
    conversation.observe(" so ")
    await conversation.sample(max_tokens=5)


async def swap_until(done: asyncio.Event, engine: EmbeddedEngine, versions: Sequence[PreTrainedModel], at: Path) -> int:
    """Load one version after another while conversations run; return how many were loaded."""
    writer, loaded = SnapshotWriter(at, "test"), 0
    for version, model in enumerate(versions[1:], start=1):
        await engine.load(writer.publish(version, dict(model.named_parameters()), leased=()), pinned=False)
        loaded = version
        try:
            async with asyncio.timeout(0.02):
                await done.wait()
                break
        except TimeoutError:
            continue
    return loaded


def logprobs_under(model: PreTrainedModel, trajectory: Trajectory) -> np.ndarray:
    """Logprobs of every token but the first, from one forward pass over the whole sequence."""
    tokens = torch.from_numpy(trajectory.tokens).long()
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()  # type: ignore[no-any-return]


def largest_error(trajectory: Trajectory, versions: Sequence[PreTrainedModel]) -> float:
    worst = 0.0
    for version in np.unique(trajectory.versions[trajectory.mask]):
        of_version = (trajectory.mask & (trajectory.versions == version))[1:]
        error = logprobs_under(versions[version], trajectory)[of_version] - trajectory.logprobs[1:][of_version]
        worst = max(worst, float(np.abs(error).max()))
    return worst


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_every_logprob_matches_a_forward_pass_over_the_recorded_tokens(
    count: int, any_tokenizer: Any, make_client: Any, tmp_path: Path
) -> None:
    base = make_model(len(any_tokenizer))
    versions = [base, *(changed(base, version) for version in range(1, VERSIONS))]
    engine = EmbeddedEngine(base, tokenizer=any_tokenizer, slots=32, device="cpu", threads=1, kv="recompute")
    options = {"with_tokenizer": any_tokenizer, "min_version": 0, "temperature": 1.0, "stop_strings": ()}
    clients: list[PolicyClient] = [make_client(engine, episode, **options) for episode in range(count)]
    done = asyncio.Event()
    swaps = asyncio.create_task(swap_until(done, engine, versions, tmp_path))
    try:
        await asyncio.gather(*(converse(client, random.Random(index)) for index, client in enumerate(clients)))
        done.set()
        loaded = await swaps
    finally:
        await engine.close()
    kept = [trajectory for client in clients for trajectory in client.trajectories()]
    torch.set_num_threads(2)
    assert max(largest_error(trajectory, versions) for trajectory in kept) < 1e-4
    assert loaded >= 1
    assert sum(len(set(each.versions[each.mask].tolist())) > 1 for each in kept), "no swap fell inside a trajectory"
    assert sum(client.breaks for client in clients) > 0
    assert sum(int(trajectory.mask.sum()) for trajectory in kept) == sum(client.sampled for client in clients)


async def test_forced_calls_are_context_and_every_sampled_token_has_ratio_one(tokenizer: Any, make_client: Any) -> None:
    model = make_model(len(tokenizer))
    engine = EmbeddedEngine(model, tokenizer=tokenizer, slots=8, device="cpu", threads=1)
    client: PolicyClient = make_client(engine, min_version=0, temperature=1.0, stop_strings=())
    history: list[Message] = [{"role": "user", "content": "ok"}]
    other = {"type": "function", "function": {**TOOL["function"], "name": "g"}}  # type: ignore[dict-item]
    try:
        first = await client.chat(history, tools=[TOOL, other], must_call=["f"], max_tokens=9)
        follow_up: list[Message] = [*history, first.message, {"role": "user", "content": "more"}]
        await client.chat_samples(3, follow_up, tools=[TOOL, other], must_call=["f", "g"], max_tokens=9)
    finally:
        await engine.close()
    kept = client.trajectories()
    openings = ['<|assistant|><tool_call>{"name": "f"', '<|assistant|><tool_call>{"name": "']
    for trajectory in kept:
        starts = np.flatnonzero(np.diff(trajectory.mask.astype(int)) == 1) + 1
        prompts = [tokenizer.decode(trajectory.tokens[:start]) for start in starts]
        assert all(prompt.endswith(tuple(openings)) for prompt in prompts)
        ratios = np.exp(logprobs_under(model, trajectory) - trajectory.logprobs[1:])[trajectory.mask[1:]]
        np.testing.assert_allclose(ratios, 1, atol=1e-4)
    assert len(kept) == 3
    assert sum(int(trajectory.mask.sum()) for trajectory in kept) == client.sampled
