"""Asking an engine and the learner for the logprobs of the same tokens.

    engine: a few short completions ──▶ learner: the same tokens ──▶ `verdicts.compare`

The sampler's logprobs are half of every importance weight. One that reports them before the temperature, from cut-off
distributions or from other weights spoils a run without failing anywhere, so each engine is checked before training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from outpace.config import Config
from outpace.errors import BadInput, RequestFailed
from outpace.pipeline.verdicts import Agreement, Sample, Terms, compare, remedy
from outpace.protocols import Engine, Learner, Worker
from outpace.runtime.together import together
from outpace.types import Generation, Ints, Sampling, Version

OPENINGS = 8
COMPLETION = 16  # tokens
LONGEST_OPENING = 256
"""Of a longer one the end is taken: what is compared does not depend on where a sequence began."""

OTHER_TEMPERATURE = 0.7
"""Asked for besides temperature 1, at which logprobs before and after the temperature are the same."""

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Question:
    opening: Ints
    sampling: Sampling


async def agreement(
    engine: Engine,
    learner: Learner,
    openings: Sequence[Ints],
    version: Version,
    *,
    dtype: str,
    temperature: float,
    seed: int,
    kind: str = "embedded",
    deadline_s: float = DEADLINE_S,
) -> Agreement:
    """Whether the engine samples with what the learner has at `version`."""
    terms = Terms(dtype, kind)
    asked = questions(openings, temperature, seed)
    try:
        async with asyncio.timeout(deadline_s):
            answers = await together(*(_ask(engine, number, question) for number, question in enumerate(asked)))
    except TimeoutError:
        return Agreement("answers", f"it gave no answer within {deadline_s:g} s; {remedy('answers', terms)}")
    except RequestFailed as error:
        return Agreement("answers", f"it refused a request: {error}")
    return compare(await _scored(learner, asked, answers), version, terms)


def questions(openings: Sequence[Ints], temperature: float, seed: int) -> list[Question]:
    """Without stop tokens: what comes after the end of an answer is less certain, and so tells more."""
    temperatures = [temperature] if temperature != 1.0 else [temperature, OTHER_TEMPERATURE]
    return [
        Question(opening, Sampling(max_tokens=COMPLETION, seed=(seed + number) % 2**63, temperature=each))
        for each in temperatures
        for number, opening in enumerate(openings)
    ]


async def _ask(engine: Engine, number: int, question: Question) -> Generation:
    """Of whatever version it has: an engine that lacks the learner's would have to be waited for."""
    return await engine.generate(f"agreement-{number}", question.opening, question.sampling, 0, None)


async def _scored(learner: Learner, asked: Sequence[Question], answers: Sequence[Generation]) -> list[Sample]:
    sequences = [np.concatenate((q.opening, a.tokens)).astype(np.int32) for q, a in zip(asked, answers, strict=True)]
    plain = await learner.logprobs(sequences, 1.0)
    by_temperature = {1.0: plain}
    for temperature in {question.sampling.temperature for question in asked} - {1.0}:
        by_temperature[temperature] = await learner.logprobs(sequences, temperature)
    return [
        Sample(
            temperature=question.sampling.temperature,
            most=question.sampling.max_tokens,
            generation=answer,
            learner_N=by_temperature[question.sampling.temperature][number][len(question.opening) - 1 :],
            plain_N=plain[number][len(question.opening) - 1 :],
        )
        for number, (question, answer) in enumerate(zip(asked, answers, strict=True))
    ]


# ------------------------------------------------------------------------------------------------------- all engines


async def check_engines(
    engines: Mapping[str, Engine],
    learner: Learner,
    worker: Worker,
    config: Config,
    version: Version,
    say: Callable[[str], None],
) -> None:
    """Refuse to train on an engine whose logprobs cannot be the learner's. Coarser arithmetic is corrected for by the
    importance weights, and is only told of. Afterwards all have `version`, which is the learner's."""
    found = await agreements(engines, learner, worker, config, version)
    for name, result in found.items():
        if result.verdict == "dtype":
            say(f"{name} and the learner differ: {result.line}")
        elif not result.agrees:
            raise BadInput(f"{name} does not agree with the learner: {result.line}")


async def agreements(
    engines: Mapping[str, Engine], learner: Learner, worker: Worker, config: Config, version: Version
) -> dict[str, Agreement]:
    """What each engine and the learner, which is at `version`, say of the same tokens. Engines that have another
    version, or whatever was served before, get the learner's first."""
    await _bring_up(engines.values(), learner, version)
    given = await worker.openings(OPENINGS)
    openings = [_cropped(opening, config.engine.context) for opening in islice(cycle(given), OPENINGS)]

    def one(engine: Engine) -> Coroutine[None, None, Agreement]:
        return agreement(
            engine,
            learner,
            openings,
            version,
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            kind=config.engine.kind,
            deadline_s=max(DEADLINE_S, config.engine.idle_s),
        )

    return dict(zip(engines, await together(*map(one, engines.values())), strict=True))


async def _bring_up(engines: Iterable[Engine], learner: Learner, version: Version) -> None:
    behind = [engine for engine in engines if (await engine.stats()).version != version]
    if behind:
        manifest = await learner.publish([])
        await together(*(engine.load(manifest, False) for engine in behind))


def _cropped(opening: Ints, context: int | None) -> Ints:
    room = LONGEST_OPENING if context is None else min(LONGEST_OPENING, context - COMPLETION)
    return opening[-max(room, 1) :]
