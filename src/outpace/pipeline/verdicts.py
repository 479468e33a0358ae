"""MERGED"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outpace.types import Floats, Generation, Version
from outpace.wording import plural

Verdict = Literal["agrees", "answers", "vocabulary", "raw", "cut", "dtype", "weights"]


@dataclass(frozen=True)
class Noise:
    """Expected differences between two correct implementations, as absolute differences of logprobs."""

    mean: float
    high: float  # the HIGH_QUANTILE quantile; single tokens may differ much more
    one_sided: float  # mean beyond rounding if nearly all differences have the same sign
    coarse: float  # mean at lower precision


NOISE = {
    "float32": Noise(mean=2e-3, high=1e-2, one_sided=2e-3, coarse=0.1),
    "bfloat16": Noise(mean=0.08, high=0.4, one_sided=0.03, coarse=0.15),
}
"""Measured with vLLM against the learner, plus a margin.

float32 on both: mean 1e-6, maximum 2e-5 on a CPU; GPU kernels that round products to TF32 reach about 1e-3.
bfloat16 on both: mean 0.01 with the starter model and 0.04 with SmolLM2-135M, where 95 % of the tokens are within 0.16
and some differ by 0.5: a logit of 16 to 32 is rounded to a multiple of 1/8 on either side, and temperature 0.7
amplifies it. Different dtypes: 0.01 and 0.03, which only a float32 learner can detect."""

HIGH = 0.95

ALL_ON_ONE_SIDE = 0.8
"""Ratio of the mean difference to the mean absolute difference. Rounding gives about 0, plus or minus 0.1 over a
hundred tokens. Different weights reach this only together with differences too large for truncation."""

MOST_CUT = 1.0
"""Sampling from a third of the probability mass raises all logprobs by about this much; more has other causes."""

RAW_FITS_BETTER = 0.25
"""The softmax at temperature 1 must explain the logprobs this much better than the requested temperature."""


@dataclass(frozen=True)
class Sample:
    """A completion from the engine, with the learner's logprobs at the sampling temperature and at temperature 1."""

    temperature: float
    most: int  # requested tokens
    generation: Generation
    learner_N: Floats
    plain_N: Floats


@dataclass(frozen=True)
class Agreement:
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


@dataclass(frozen=True)
class Terms:
    """The run's dtype, which sets the tolerance, and the engine kind, which decides the flags named in the remedy."""

    dtype: str
    kind: str = "embedded"

    @property
    def noise(self) -> Noise:
        return NOISE[self.dtype]


def compare(samples: Sequence[Sample], version: Version, terms: Terms) -> Agreement:
    """Compare the samples with the learner at `version` and return a verdict."""
    if fault := next(filter(None, map(_malformed, samples)), "" if samples else "no completion was requested"):
        return Agreement("answers", f"{fault}; {remedy('answers', terms)}")
    learner_N = np.concatenate([sample.learner_N for sample in samples])
    if not np.isfinite(learner_N).all():
        largest = max(int(sample.generation.tokens.max()) for sample in samples)
        text = f"it returns token ids that the model does not have (the largest is {largest})"
        return Agreement("vocabulary", f"{text}; {remedy('vocabulary', terms)}", tokens=len(learner_N))
    difference_N = np.concatenate([sample.generation.logprobs for sample in samples]) - learner_N
    verdict, text = _classify(samples, difference_N, version, terms)
    return Agreement(
        verdict,
        text if verdict == "agrees" else f"{text}; {remedy(verdict, terms)}",
        tokens=len(difference_N),
        mean=float(np.abs(difference_N).mean()),
        high=float(np.quantile(np.abs(difference_N), HIGH)),
        largest=float(np.abs(difference_N).max()),
    )


def _malformed(sample: Sample) -> str:
    """Return why this completion cannot be compared at all, or ""."""
    given = sample.generation
    counts = (len(given.tokens), len(given.logprobs), len(given.versions))
    if len(set(counts)) > 1:
        return "it returns {} tokens with {} logprobs and {} versions".format(*counts)
    if not 0 < counts[0] <= sample.most:
        return f"it returns {plural(counts[0], 'token')}, 1 to {sample.most} were requested (stop reason: {given.stop})"
    if not (np.isfinite(given.logprobs) & (given.logprobs <= _MAX_LOGPROB)).all():
        return "it returns logprobs that are positive or not finite"
    return ""


_MAX_LOGPROB = 1e-3
"""A certain token has logprob 0, up to rounding."""


def _classify(samples: Sequence[Sample], difference_N: Floats, version: Version, terms: Terms) -> tuple[Verdict, str]:
    absolute_N, noise = np.abs(difference_N), terms.noise
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
        return "agrees", f"logprobs match within {terms.dtype} rounding ({numbers}, {tokens} of version {version})"
    if all(np.abs(some_N).mean() <= noise.coarse for some_N in by_temperature):
        return "dtype", f"it computes in a different dtype, or its weights differ slightly ({numbers})"
    return "weights", f"its weights differ from the learner's although both report version {reported} ({numbers})"


def _within(absolute_N: Floats, mean: float, high: float) -> bool:
    return bool(absolute_N.mean() <= mean and np.quantile(absolute_N, HIGH) <= high)


def _is_raw(samples: Sequence[Sample], noise: Noise) -> bool:
    """Return whether logprobs are reported before temperature. Temperatures 0 and 1 do not count: the two agree
    there."""
    informative = [sample for sample in samples if sample.temperature not in (0.0, 1.0)]
    if not informative:
        return False
    engine_N = np.concatenate([sample.generation.logprobs for sample in informative])
    requested = float(np.abs(engine_N - np.concatenate([sample.learner_N for sample in informative])).mean())
    plain = float(np.abs(engine_N - np.concatenate([sample.plain_N for sample in informative])).mean())
    return requested > noise.one_sided and plain <= noise.coarse and plain < RAW_FITS_BETTER * requested


def _is_truncated(difference_N: Floats, noise: Noise) -> bool:
    higher = float(difference_N.mean())
    one_sided = higher >= ALL_ON_ONE_SIDE * float(np.abs(difference_N).mean())
    return one_sided and higher > noise.one_sided and float(np.quantile(difference_N, HIGH)) <= MOST_CUT


def remedy(verdict: Verdict, terms: Terms) -> str:
    """Return what to change, for this kind of engine."""
    if terms.kind == "embedded":
        return "this is a bug in the embedded engine: please report it"
    raw = {
        "vllm": "start the server with --logprobs-mode processed_logprobs",
        "sglang": "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB",
    }
    cut = {
        "vllm": "start the server with --generation-config vllm and without logits processors",
        "sglang": "start the server with --sampling-defaults openai and without logit processors",
    }
    remedies: dict[Verdict, str] = {
        "answers": "see the server's log",
        "vocabulary": "serve the model in model.path, with its own tokenizer",
        "raw": raw[terms.kind],
        "cut": cut[terms.kind],
        "dtype": f"start the server with --dtype {terms.dtype}, without quantized weights or KV cache",
        "weights": "serve the model in model.path, or restart the server",
    }
    return remedies[verdict]
