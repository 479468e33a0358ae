"""Logprob check: compare an engine's logprobs with the learner's on the same tokens.

    engine: a few short completions ──▶ learner: logprobs of the same tokens ──▶ `compare_logprobs` ──▶ a verdict

Every importance weight uses the sampler's logprobs. If an engine computes them before temperature, from a truncated
distribution or with other weights, the run is ruined without an error, so every engine is checked before training.

Each cause has its own pattern. The check tests them in this order, the most specific first:

    answers     lengths that do not match, or numbers that are not logprobs
    vocabulary  token ids that the learner's model does not have
    weights     the engine itself reports another version
    raw         at a temperature other than 1, the engine's logprobs match the softmax at temperature 1
    cut         the engine's logprobs are higher on nearly all tokens: renormalized after top_p, top_k or min_p
    agrees      differences within the rounding of the run's dtype
    dtype       larger differences, but no larger than lower precision explains
    weights     even larger differences

Each temperature is judged separately, so that a match at one cannot hide a mismatch at another.

Legend: _N sampled tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import numpy as np

from outpace.config import Config
from outpace.errors import BadInput, RequestFailed, plural
from outpace.protocols import Engine, Learner, Worker
from outpace.runtime.async_tools import backoff_s, gather_or_cancel
from outpace.types import Floats, Generation, Ints, Sampling, Version

Verdict = Literal["agrees", "answers", "vocabulary", "raw", "cut", "dtype", "weights"]


@dataclass(frozen=True)
class LogprobTolerance:
    """Expected differences between two correct implementations, as absolute differences of logprobs."""

    mean: float
    high: float  # the HIGH_QUANTILE quantile; single tokens may differ much more
    one_sided: float  # mean beyond rounding if nearly all differences have the same sign
    coarse: float  # mean at lower precision


TOLERANCES = {
    "float32": LogprobTolerance(mean=2e-3, high=1e-2, one_sided=2e-3, coarse=0.1),
    "bfloat16": LogprobTolerance(mean=0.08, high=0.4, one_sided=0.03, coarse=0.15),
}
"""Measured with vLLM against the learner, plus a margin.

float32 on both: mean 1e-6, maximum 2e-5 on a CPU; GPU kernels that round products to TF32 reach about 1e-3.
bfloat16 on both: mean 0.01 with the starter model and 0.04 with SmolLM2-135M, where 95 % of the tokens are within 0.16
and some differ by 0.5: a logit of 16 to 32 is rounded to a multiple of 1/8 on either side, and temperature 0.7
amplifies it. Different dtypes: 0.01 and 0.03, which only a float32 learner can detect."""

HIGH_QUANTILE = 0.95

SAME_SIGN = 0.8
"""For `cut`: minimum ratio of the mean difference to the mean absolute difference. Rounding gives 0 ± 0.1 over a
hundred tokens. Different weights reach this ratio only with differences too large for truncation."""

MAX_TRUNCATION = 1.0
"""Sampling from a third of the probability mass raises all logprobs by about this much; more has other causes."""

RAW_FIT_RATIO = 0.25
"""For `raw`: maximum error of the softmax at temperature 1, relative to the error at the requested temperature."""


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion from the engine, with the learner's logprobs at the sampling temperature and at temperature 1."""

    temperature: float
    max_tokens: int  # requested tokens
    generation: Generation
    learner_N: Floats
    plain_N: Floats


@dataclass(frozen=True)
class LogprobComparison:
    """The result of a comparison. `line` describes it and names a remedy; the numbers are absolute logprob
    differences."""

    verdict: Verdict
    line: str
    tokens: int = 0
    mean: float = 0.0
    high: float = 0.0
    largest: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.verdict == "agrees"


def compare_logprobs(samples: Sequence[ScoredCompletion], version: Version, dtype: str, kind: str) -> LogprobComparison:
    """Compare the samples with the learner at `version` and return a verdict. The run's `dtype` sets the tolerance, the
    engine `kind` decides the flags named in the remedy."""
    if fault := next(filter(None, map(_malformed, samples)), "" if samples else "no completion was requested"):
        return LogprobComparison("answers", f"{fault}; {remedy('answers', dtype, kind)}")
    learner_N = np.concatenate([sample.learner_N for sample in samples])
    if not np.isfinite(learner_N).all():
        largest = max(int(sample.generation.tokens.max()) for sample in samples)
        text = f"it returns token ids that the model does not have (the largest is {largest})"
        return LogprobComparison("vocabulary", f"{text}; {remedy('vocabulary', dtype, kind)}", tokens=len(learner_N))
    difference_N = np.concatenate([sample.generation.logprobs for sample in samples]) - learner_N
    verdict, text = _classify(samples, difference_N, version, dtype)
    return LogprobComparison(
        verdict,
        text if verdict == "agrees" else f"{text}; {remedy(verdict, dtype, kind)}",
        tokens=len(difference_N),
        mean=float(np.abs(difference_N).mean()),
        high=float(np.quantile(np.abs(difference_N), HIGH_QUANTILE)),
        largest=float(np.abs(difference_N).max()),
    )


def _malformed(sample: ScoredCompletion) -> str:
    """Return why this completion cannot be compared at all, or ""."""
    given = sample.generation
    counts = (len(given.tokens), len(given.logprobs), len(given.versions))
    if len(set(counts)) > 1:
        return "it returns {} tokens with {} logprobs and {} versions".format(*counts)
    if not 0 < counts[0] <= sample.max_tokens:
        tokens = plural(counts[0], "token")
        return f"it returns {tokens}, 1 to {sample.max_tokens} were requested (stop reason: {given.stop})"
    if not (np.isfinite(given.logprobs) & (given.logprobs <= _MAX_LOGPROB)).all():
        return "it returns logprobs that are positive or not finite"
    return ""


_MAX_LOGPROB = 1e-3
"""A token with probability 1 has logprob 0, up to rounding."""


def _classify(
    samples: Sequence[ScoredCompletion], difference_N: Floats, version: Version, dtype: str
) -> tuple[Verdict, str]:
    absolute_N, noise = np.abs(difference_N), TOLERANCES[dtype]
    numbers = f"mean logprob difference {absolute_N.mean():.2g}, largest {absolute_N.max():.2g}"
    versions = sorted({int(each) for sample in samples for each in sample.generation.versions})
    reported = ", ".join(map(str, versions))
    if versions != [version]:
        return "weights", f"it samples with version {reported}, but the learner is at version {version} ({numbers})"
    if _is_raw(samples, noise):
        return "raw", "its logprobs are computed before temperature is applied"
    temperature_N = np.concatenate([np.full(len(each.learner_N), each.temperature) for each in samples])
    by_temperature = [difference_N[temperature_N == each] for each in np.unique(temperature_N)]
    if any(_is_truncated(some_N, noise) for some_N in by_temperature):
        return (
            "cut",
            f"it samples from a truncated distribution: its logprobs are higher by {difference_N.mean():.2g}",
        )
    if all(_within(np.abs(some_N), noise.mean, noise.high) for some_N in by_temperature):
        tokens = plural(len(absolute_N), "token")
        return "agrees", f"logprobs match within {dtype} rounding ({numbers}, {tokens} of version {version})"
    if all(np.abs(some_N).mean() <= noise.coarse for some_N in by_temperature):
        return "dtype", f"it computes in a different dtype, or its weights differ slightly ({numbers})"
    return "weights", f"its weights differ from the learner's although both report version {reported} ({numbers})"


def _within(absolute_N: Floats, mean: float, high: float) -> bool:
    return bool(absolute_N.mean() <= mean and np.quantile(absolute_N, HIGH_QUANTILE) <= high)


def _is_raw(samples: Sequence[ScoredCompletion], noise: LogprobTolerance) -> bool:
    """Return whether logprobs are reported before temperature. Ignores temperatures 0 and 1, where the two are the
    same."""
    informative = [sample for sample in samples if sample.temperature not in (0.0, 1.0)]
    if not informative:
        return False
    engine_N = np.concatenate([sample.generation.logprobs for sample in informative])
    requested = float(np.abs(engine_N - np.concatenate([sample.learner_N for sample in informative])).mean())
    plain = float(np.abs(engine_N - np.concatenate([sample.plain_N for sample in informative])).mean())
    return requested > noise.one_sided and plain <= noise.coarse and plain < RAW_FIT_RATIO * requested


def _is_truncated(difference_N: Floats, noise: LogprobTolerance) -> bool:
    higher = float(difference_N.mean())
    one_sided = higher >= SAME_SIGN * float(np.abs(difference_N).mean())
    return one_sided and higher > noise.one_sided and float(np.quantile(difference_N, HIGH_QUANTILE)) <= MAX_TRUNCATION


_RAW_REMEDY = {
    "vllm": "start the server with --logprobs-mode processed_logprobs",
    "sglang": "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB",
}
_CUT_REMEDY = {
    "vllm": "start the server with --generation-config vllm and without logits processors",
    "sglang": "start the server with --sampling-defaults openai and without logit processors",
}


def remedy(verdict: Verdict, dtype: str, kind: str) -> str:
    """Return what to change, for this kind of engine."""
    if kind == "embedded":
        return "this is a bug in the embedded engine: please report it"
    remedies: dict[Verdict, str] = {
        "answers": "see the server's log",
        "vocabulary": "serve the model in model.path, with its own tokenizer",
        "raw": _RAW_REMEDY[kind],
        "cut": _CUT_REMEDY[kind],
        "dtype": f"start the server with --dtype {dtype}, without quantized weights or KV cache",
        "weights": "serve the model in model.path, or restart the server",
    }
    return remedies[verdict]


PROBE_PROMPTS = 8
PROBE_TOKENS = 16  # per completion
MAX_PROMPT_TOKENS = 256
"""Longer prompts are cropped to their last tokens: the comparison does not depend on where a sequence starts."""

OTHER_TEMPERATURE = 0.7
"""Sampled in addition to temperature 1, where logprobs before and after temperature are the same."""

DEADLINE_S = 120.0
ATTEMPTS = 3
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 1.0


ProbeRequest = tuple[Ints, Sampling]
"""A request for a short completion to compare: its prompt and sampling parameters."""


async def compare_engine(
    engine: Engine,
    learner: Learner,
    first_prompts: Sequence[Ints],
    version: Version,
    *,
    dtype: str,
    temperature: float,
    seed: int,
    kind: str = "embedded",
    deadline_s: float = DEADLINE_S,
) -> LogprobComparison:
    """Compare one engine's logprobs with those of the learner at `version`."""
    requests = probe_requests(first_prompts, temperature, seed)
    try:
        async with asyncio.timeout(deadline_s):
            answers = await gather_or_cancel(
                *(_generate(engine, number, request) for number, request in enumerate(requests))
            )
    except TimeoutError:
        return LogprobComparison(
            "answers", f"it did not reply within {deadline_s:g} s; {remedy('answers', dtype, kind)}"
        )
    except RequestFailed as error:
        return LogprobComparison("answers", f"it rejected a request: {error}")
    return compare_logprobs(await _score(learner, requests, answers), version, dtype, kind)


def probe_requests(first_prompts: Sequence[Ints], temperature: float, seed: int) -> list[ProbeRequest]:
    """Build the requests. They have no stop tokens: text after the end of an answer is less certain, so it tells
    more."""
    temperatures = [temperature] if temperature != 1.0 else [temperature, OTHER_TEMPERATURE]
    return [
        (opening, Sampling(max_tokens=PROBE_TOKENS, seed=(seed + number) % 2**63, temperature=each))
        for each in temperatures
        for number, opening in enumerate(first_prompts)
    ]


async def _generate(engine: Engine, number: int, request: ProbeRequest) -> Generation:
    """Generate with whatever version the engine has: waiting for the learner's version could block. Retry generations
    that the engine did not complete."""
    prompt, sampling = request
    for failures in range(1, ATTEMPTS + 1):
        answer = await engine.generate(f"agreement-{number}", prompt, sampling, 0, None)
        if answer.stop not in ("interrupted", "lost") or failures == ATTEMPTS:
            break
        await asyncio.sleep(backoff_s(failures, FIRST_BACKOFF_S, MAX_BACKOFF_S))
    return answer


async def _score(
    learner: Learner, requests: Sequence[ProbeRequest], answers: Sequence[Generation]
) -> list[ScoredCompletion]:
    sequences = [
        np.concatenate((prompt, answer.tokens)).astype(np.int32)
        for (prompt, _), answer in zip(requests, answers, strict=True)
    ]
    plain = await learner.logprobs(sequences, 1.0)
    by_temperature = {1.0: plain}
    for temperature in {sampling.temperature for _, sampling in requests} - {1.0}:
        by_temperature[temperature] = await learner.logprobs(sequences, temperature)
    return [
        ScoredCompletion(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            generation=answer,
            learner_N=by_temperature[sampling.temperature][number][len(prompt) - 1 :],
            plain_N=plain[number][len(prompt) - 1 :],
        )
        for number, ((prompt, sampling), answer) in enumerate(zip(requests, answers, strict=True))
    ]


# --------------------------------------------------------------------------------------------------- all engines


async def check_engine_logprobs(
    engines: Mapping[str, Engine],
    learner: Learner,
    worker: Worker,
    config: Config,
    version: Version,
    say: Callable[[str], None],
) -> None:
    """Raise `BadInput` if an engine's logprobs do not match the learner's. Afterwards every engine has `version`.

    Differences due to lower precision are only reported, because importance weights correct for them."""
    found = await compare_engines(engines, learner, worker, config, version)
    for name, result in found.items():
        if result.verdict == "dtype":
            say(f"{name}: logprobs differ from the learner's: {result.line}")
        elif not result.agrees:
            raise BadInput(f"{name}: logprobs do not match the learner's: {result.line}")


async def compare_engines(
    engines: Mapping[str, Engine], learner: Learner, worker: Worker, config: Config, version: Version
) -> dict[str, LogprobComparison]:
    """Compare every engine with the learner, which is at `version`. Engines that serve anything else load the learner's
    weights first."""
    await _load_version(engines.values(), learner, version)
    given = await worker.first_prompts(PROBE_PROMPTS)
    first_prompts = [_crop(opening, config.engine.context) for opening in islice(cycle(given), PROBE_PROMPTS)]

    def one(engine: Engine) -> Coroutine[None, None, LogprobComparison]:
        return compare_engine(
            engine,
            learner,
            first_prompts,
            version,
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            kind=config.engine.kind,
            deadline_s=max(DEADLINE_S, config.engine.idle_s),
        )

    return dict(zip(engines, await gather_or_cancel(*map(one, engines.values())), strict=True))


async def _load_version(engines: Iterable[Engine], learner: Learner, version: Version) -> None:
    behind = [engine for engine in engines if (await engine.stats()).version != version]
    if behind:
        manifest = await learner.publish([])
        await gather_or_cancel(*(engine.load(manifest, False) for engine in behind))


def _crop(opening: Ints, context: int | None) -> Ints:
    room = MAX_PROMPT_TOKENS if context is None else min(MAX_PROMPT_TOKENS, context - PROBE_TOKENS)
    return opening[-max(room, 1) :]
