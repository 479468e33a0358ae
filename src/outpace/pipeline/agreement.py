"""Logprob check: compare an engine's logprobs with the learner's on the same tokens.

    engine: a few short completions ──▶ learner: logprobs of the same tokens ──▶ `compare_logprobs` ──▶ a verdict

The sampler's logprobs are half of every importance weight. An engine that reports them before temperature, from
truncated distributions or from other weights ruins a run without any error, so every engine is checked before training.

Each cause leaves its own pattern. They are tested in this order, the most specific first:

    answers     lengths that do not match, or numbers that are not logprobs
    vocabulary  token ids that the learner's model does not have
    weights     the engine itself reports another version
    raw         at a temperature other than 1, the engine's logprobs match the softmax at temperature 1
    cut         the engine's logprobs are higher on nearly all tokens: renormalized after top_p, top_k or min_p
    agrees      differences within the rounding of the run's dtype
    dtype       larger differences, but no larger than lower precision explains
    weights     anything beyond

Each temperature is judged separately, so that a match at one cannot hide a mismatch at another.

Legend: _N sampled tokens.
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
"""Longer prompts keep their last tokens only: the comparison does not depend on where a sequence starts."""

OTHER_TEMPERATURE = 0.7
"""Sampled in addition to temperature 1, where logprobs before and after temperature are the same."""

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Question:
    """A request for a short completion to compare."""

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
    """Compare one engine's logprobs with those of the learner at `version`."""
    terms = Terms(dtype, kind)
    requests = questions(openings, temperature, seed)
    try:
        async with asyncio.timeout(deadline_s):
            answers = await together(*(_generate(engine, number, request) for number, request in enumerate(requests)))
    except TimeoutError:
        return Agreement("answers", f"it did not reply within {deadline_s:g} s; {remedy('answers', terms)}")
    except RequestFailed as error:
        return Agreement("answers", f"it rejected a request: {error}")
    return compare(await _score(learner, requests, answers), version, terms)


def questions(openings: Sequence[Ints], temperature: float, seed: int) -> list[Question]:
    """Build the requests, without stop tokens: text after the end of an answer is less certain and so more
    informative."""
    temperatures = [temperature] if temperature != 1.0 else [temperature, OTHER_TEMPERATURE]
    return [
        Question(opening, Sampling(max_tokens=COMPLETION, seed=(seed + number) % 2**63, temperature=each))
        for each in temperatures
        for number, opening in enumerate(openings)
    ]


async def _generate(engine: Engine, number: int, request: Question) -> Generation:
    """Generate with whatever version the engine has: waiting for the learner's version could block."""
    return await engine.generate(f"agreement-{number}", request.opening, request.sampling, 0, None)


async def _score(learner: Learner, requests: Sequence[Question], answers: Sequence[Generation]) -> list[Sample]:
    sequences = [np.concatenate((q.opening, a.tokens)).astype(np.int32) for q, a in zip(requests, answers, strict=True)]
    plain = await learner.logprobs(sequences, 1.0)
    by_temperature = {1.0: plain}
    for temperature in {request.sampling.temperature for request in requests} - {1.0}:
        by_temperature[temperature] = await learner.logprobs(sequences, temperature)
    return [
        Sample(
            temperature=request.sampling.temperature,
            most=request.sampling.max_tokens,
            generation=answer,
            learner_N=by_temperature[request.sampling.temperature][number][len(request.opening) - 1 :],
            plain_N=plain[number][len(request.opening) - 1 :],
        )
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]


# --------------------------------------------------------------------------------------------------- all engines


async def check_engines(
    engines: Mapping[str, Engine],
    learner: Learner,
    worker: Worker,
    config: Config,
    version: Version,
    say: Callable[[str], None],
) -> None:
    """Raise `BadInput` if an engine's logprobs cannot be the learner's. Afterwards every engine has `version`.

    Lower precision is only reported, because the importance weights correct for it."""
    found = await agreements(engines, learner, worker, config, version)
    for name, result in found.items():
        if result.verdict == "dtype":
            say(f"{name}: logprobs differ from the learner's: {result.line}")
        elif not result.agrees:
            raise BadInput(f"{name}: logprobs do not match the learner's: {result.line}")


async def agreements(
    engines: Mapping[str, Engine], learner: Learner, worker: Worker, config: Config, version: Version
) -> dict[str, Agreement]:
    """Compare every engine with the learner, which is at `version`. Engines that serve anything else load the learner's
    weights first."""
    await _load_version(engines.values(), learner, version)
    given = await worker.openings(OPENINGS)
    openings = [_crop(opening, config.engine.context) for opening in islice(cycle(given), OPENINGS)]

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


async def _load_version(engines: Iterable[Engine], learner: Learner, version: Version) -> None:
    behind = [engine for engine in engines if (await engine.stats()).version != version]
    if behind:
        manifest = await learner.publish([])
        await together(*(engine.load(manifest, False) for engine in behind))


def _crop(opening: Ints, context: int | None) -> Ints:
    room = LONGEST_OPENING if context is None else min(LONGEST_OPENING, context - COMPLETION)
    return opening[-max(room, 1) :]
