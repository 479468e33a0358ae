"""Synchronous GRPO in one script, for reading.

    python examples/plain_grpo.py --steps 30

A small model learns countdown on the CPU: reach a target from a few numbers, using each exactly once. One step:

    1. rollout      take the next puzzles and sample a group of completions for each
    2. rewards      1 if the expression is right, else 0
    3. advantages   reward minus the group mean. Groups with equal rewards have no training signal and are replaced by
                    further puzzles
    4. loss         gradient of -min(w, cap) * advantage * log pi, summed over all sampled tokens and divided once by
                    their number. w = pi / sampling policy
    5. update       clip, AdamW, copy the new weights to the sampler

outpace runs these five concurrently: engines sample while the learner trains, a few versions behind. With
`--pacing.max_lag 0 --run.deterministic true` it computes exactly what this script computes: the same tokens, rewards
and losses, bit for bit. The script shares pure functions (noise, sampling, packing, loss) and the decoder with outpace;
every scheduling decision is spelled out below.

Legend: _S decoder slots, _N trained tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from outpace.algorithms.advantages import GroupReturns, dr_grpo, is_uniform
from outpace.algorithms.losses import Tokens
from outpace.config import Config
from outpace.config.algorithm import configured_policy_loss
from outpace.config.validation import resolve
from outpace.engines.embedded.decode_batch import sample
from outpace.engines.embedded.decoder import Decoder
from outpace.engines.embedded.load_decoder import build_decoder
from outpace.hardware.cores import learner_threads
from outpace.learner.forward import Forward, ForwardOptions, choose_forward
from outpace.learner.packing import pack
from outpace.models.chat import render
from outpace.models.loading import eos_ids, load_model, load_tokenizer
from outpace.rewards.builtin import countdown
from outpace.runtime.rng import request_seed, uniform_noise
from outpace.tasks.countdown import Countdown
from outpace.tasks.order import TaskOrder
from outpace.types import OBSERVED, Floats, Ints, Row, Task


@dataclass(frozen=True)
class Answer:
    """A completion: its tokens, and the logprobs they were sampled with."""

    tokens: Ints
    logprobs: Floats


@dataclass(frozen=True)
class Group:
    """All completions of one puzzle. `number` counts puzzles from the start of the run."""

    number: int
    task: Task
    prompt: Ints
    answers: list[Answer]
    rewards: list[float]


# ---------------------------------------------------------------------------------------------------------- sampling


class Sampler:
    """Samples and grades groups with its current weights."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.stops = frozenset(eos_ids(config.model.path))
        self.decoder: Decoder = build_decoder(
            model, config.engine.slots, config.engine.context, deterministic=True, path=config.engine.decoder
        )

    def load_weights(self, model: PreTrainedModel) -> None:
        self.decoder.install(self.decoder.prepare(model.state_dict()))

    def roll_out(self, numbered_tasks: list[tuple[int, Task]]) -> list[Group]:
        """Sample and grade one group per puzzle. Each completion has its own seed."""
        size, seed = self.config.rollout.group_size, self.config.run.seed
        prompts = [self._prompt(task) for _, task in numbered_tasks]
        answers = self._generate(
            [prompt for prompt in prompts for _ in range(size)],
            [request_seed(seed, number, episode, 0) for number, _ in numbered_tasks for episode in range(size)],
        )
        groups = []
        for (number, task), prompt in zip(numbered_tasks, prompts, strict=True):
            completions = [next(answers) for _ in range(size)]
            groups.append(Group(number, task, prompt, completions, self._grade(task, completions)))
        return groups

    def _prompt(self, task: Task) -> Ints:
        return np.array(render(self.tokenizer, task.prompt, self.config.model.system_prompt), dtype=np.int32)

    def _grade(self, task: Task, answers: list[Answer]) -> list[float]:
        texts = [str(self.tokenizer.decode(a.tokens.tolist(), skip_special_tokens=True)) for a in answers]
        columns = {name: [value] * len(texts) for name, value in task.columns.items()}
        return countdown([task.prompt] * len(texts), texts, **columns)

    def _generate(self, prompts: list[Ints], seeds: list[int]) -> Iterator[Answer]:
        """Yield completions in prompt order, one batch of slots at a time. Their noise depends only on seed and token
        index, so batching does not change them."""
        slots = self.decoder.slots
        for start in range(0, len(prompts), slots):
            yield from self._generate_batch(prompts[start : start + slots], seeds[start : start + slots])

    def _generate_batch(self, prompts: list[Ints], seeds: list[int]) -> list[Answer]:
        slots, rollout = self.decoder.slots, self.config.rollout
        assert rollout.max_tokens is not None
        # Prefill all but the last prompt token. The first decode step processes that one and gives the first logits.
        prefixes = {row: prompt[:-1] for row, prompt in enumerate(prompts) if len(prompt) > 1}
        self.decoder.prefill(list(prefixes), list(prefixes.values()))
        # Step all slots, idle ones included (token 0 at position 0), so that shapes never change.
        tokens_S, positions_S, seeds_S = (np.zeros(slots, dtype=np.int64) for _ in range(3))
        tokens_S[: len(prompts)] = [prompt[-1] for prompt in prompts]
        positions_S[: len(prompts)] = [len(prompt) - 1 for prompt in prompts]
        seeds_S[: len(prompts)] = seeds
        temperature_S = np.full(slots, rollout.temperature, dtype=np.float32)
        no_top_k_S, no_top_p_S = np.zeros(slots, dtype=np.int64), np.ones(slots, dtype=np.float32)
        completions: list[list[tuple[int, float]]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        index = 0
        while running:
            logits = self.decoder.step(tokens_S, positions_S)
            uniform_S = uniform_noise(seeds_S, np.full(slots, index))
            chosen, logprobs = sample(logits, temperature_S, no_top_k_S, no_top_p_S, uniform_S)
            index += 1
            for row in sorted(running):
                token = int(chosen[row])
                completions[row].append((token, float(logprobs[row])))
                tokens_S[row], positions_S[row] = token, positions_S[row] + 1
                limit = min(rollout.max_tokens, self.decoder.context - len(prompts[row]))
                if token in self.stops or index >= limit:
                    running.remove(row)
                    tokens_S[row] = positions_S[row] = 0
        return [
            Answer(np.array([t for t, _ in pairs], dtype=np.int32), np.array([p for _, p in pairs], dtype=np.float32))
            for pairs in completions
        ]


# ---------------------------------------------------------------------------------------------------------- learning


def rows_of(group: Group, version: int) -> list[Row]:
    """Return the training rows of a group: exact tokens, sampling logprobs, versions and an advantage per token."""
    rows = []
    lengths = np.array([float(len(answer.tokens)) for answer in group.answers])
    advantages = dr_grpo(GroupReturns(np.array(group.rewards), lengths)).astype(np.float32)
    for answer, advantage in zip(group.answers, advantages, strict=True):
        prompt_length, count = len(group.prompt), len(answer.tokens)
        mask = np.arange(prompt_length + count) >= prompt_length
        rows.append(
            Row(
                tokens=np.concatenate([group.prompt, answer.tokens]),
                mask=mask,
                logprobs=np.concatenate([np.zeros(prompt_length, dtype=np.float32), answer.logprobs]),
                versions=np.where(mask, version, OBSERVED).astype(np.int32),
                advantages=np.where(mask, advantage, np.float32(0)),
            )
        )
    return rows


class Learner:
    """Makes one update of the model per batch of groups."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        self.config = config
        self.model = model
        self.forward: Forward = choose_forward(model, ForwardOptions(config.rollout.temperature))
        self.policy_loss = configured_policy_loss(config.policy_loss)
        learner = config.learner
        matrices = {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": learner.weight_decay}
        vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
        assert learner.lr is not None
        self.optimizer = torch.optim.AdamW(
            [matrices, vectors], lr=learner.lr, betas=(learner.beta1, learner.beta2), fused=True
        )

    def train(self, groups: list[Group], version: int) -> tuple[float, float]:
        """Train on a batch. Return the loss (mean over all sampled tokens) and the gradient norm."""
        size = self.config.pacing.chunk_groups
        loss_sum, tokens = 0.0, 0
        for start in range(0, len(groups), size):
            rows = [row for group in groups[start : start + size] for row in rows_of(group, version)]
            chunk_loss, chunk_tokens = self._accumulate(rows)
            loss_sum += chunk_loss
            tokens += chunk_tokens
        return loss_sum / tokens, self._update(tokens)

    def _accumulate(self, rows: list[Row]) -> tuple[float, int]:
        """Add the gradient of the unnormalized loss. Sums do not depend on how the batch is split; means would."""
        loss_sum, tokens = 0.0, 0
        for packed in pack(rows, self.config.learner.resolved_tokens_per_pass, min_shared=self.forward.min_shared):
            sampler_logp_N = torch.from_numpy(packed.sampler_logp_N)
            tokens_N = Tokens(
                logp_N=self.forward(packed).logp_N,
                old_logp_N=sampler_logp_N,
                sampler_logp_N=sampler_logp_N,
                advantages_N=torch.from_numpy(packed.advantages_N),
                sequence_N=torch.from_numpy(packed.sequence_N),
                sequences=packed.rows,
            )
            loss = self.policy_loss(tokens_N).sum(dtype=torch.float64)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
            tokens += len(packed.targets_N)
        return loss_sum, tokens

    def _update(self, tokens: int) -> float:
        """Normalize and clip the accumulated gradient, take an optimizer step, and return the gradient norm."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / tokens
        assert math.isfinite(norm)
        clip = min(1.0, self.config.learner.max_grad_norm / (norm + 1e-6))
        torch._foreach_mul_(gradients, clip / tokens)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm


# ----------------------------------------------------------------------------------------------------- training loop


def collect(sampler: Sampler, tasks: Countdown, order: TaskOrder, first: int) -> list[Group]:
    """Sample the groups of one step in puzzle order, until `groups_per_step` of them have a training signal."""
    config = sampler.config
    groups: list[Group] = []
    while (needed := config.pacing.groups_per_step - sum(has_signal(group, config) for group in groups)) > 0:
        numbers = range(first + len(groups), first + len(groups) + needed)
        groups += sampler.roll_out([(number, tasks[order.task(number)[1]]) for number in numbers])
    return groups


def has_signal(group: Group, config: Config) -> bool:
    """Return whether rewards differ within the group, so that advantages are not all zero."""
    assert config.filter.tolerance is not None
    return not is_uniform(group.rewards, config.filter.tolerance)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Train and yield a report of every step."""
    torch.set_num_threads(learner_threads(config))
    model = load_model(config.model.path, dtype="float32", device="cpu")
    sampler, learner = Sampler(config, model), Learner(config, model)
    tasks = Countdown("train", config.run.seed)
    order = TaskOrder(len(tasks), config.run.seed, config.tasks.shuffle)
    taken = 0
    assert config.run.steps is not None
    for version in range(config.run.steps):
        started = time.perf_counter()
        groups = collect(sampler, tasks, order, first=taken)
        taken += len(groups)
        batch = [group for group in groups if has_signal(group, config)]
        loss, norm = learner.train(batch, version)
        sampler.load_weights(model)
        yield {
            "step": version + 1,
            "loss": loss,
            "grad_norm": norm,
            "accuracy": float(np.mean([reward for group in groups for reward in group.rewards])),
            "seconds": time.perf_counter() - started,
            "groups": [
                {
                    "group": group.number,
                    "task": group.task.id,
                    "trained": has_signal(group, config),
                    "rewards": group.rewards,
                    "tokens": [answer.tokens.tolist() for answer in group.answers],
                }
                for group in groups
            ],
        }


def parse() -> tuple[Config, str | None]:
    parser = argparse.ArgumentParser(description="Synchronous GRPO on countdown, in one script.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=64, help="puzzles per step")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--context", type=int, help="maximum sequence length; default: the model's limit")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--json", metavar="FILE", help="write tokens, rewards and losses of every step to FILE")
    options = parser.parse_args()
    overrides = {
        "model": {"path": options.model},
        "pacing": {"max_lag": 0, "groups_per_step": options.groups},
        "engine": {"context": options.context},
        "run": {"steps": options.steps, "seed": options.seed, "threads": options.threads, "deterministic": True},
    }
    return resolve(Config.model_validate(overrides)), options.json


def main() -> None:
    config, path = parse()
    steps = []
    for step in run(config):
        print(
            f"step {step['step']:4d}  accuracy {step['accuracy']:.3f}  loss {step['loss']:+.4f}  "
            f"grad norm {step['grad_norm']:.3f}  groups {len(step['groups'])}  {step['seconds']:.1f} s",
            flush=True,
        )
        steps.append(step)
    if path is not None:
        with open(path, "w") as file:
            json.dump({"config": config.model_dump(), "steps": steps}, file)


if __name__ == "__main__":
    main()
