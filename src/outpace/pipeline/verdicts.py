"""Do an engine and the learner say the same of the same tokens? The comparison alone: numbers in, a verdict out.

Causes are told apart by the pattern that they leave, the telling ones first:

    answers     lengths that do not match, or numbers that are no logprobs
    vocabulary  ids that the learner's model does not have
    weights     the engine itself says that another version has sampled
    raw         at a temperature other than 1, the engine's logprobs are those of the softmax at 1
    cut         the engine's are higher on nearly all tokens: it shares out what top_p, top_k or min_p left over
    agrees      no more apart than rounding in the dtype of the run explains
    dtype       more than that, but only as much as coarser arithmetic explains
    weights     anything beyond

Each temperature is judged by itself, so that one that fits cannot hide another that does not.

Legend: _N sampled tokens.
"""

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
    """How far apart two correct implementations are, in absolute differences of logprobs."""

    mean: float
    high: float  # the quantile HIGH; single tokens may be much further apart
    one_sided: float  # a mean that rounding, which goes both ways, does not reach if nearly all signs are the same
    coarse: float  # the mean of what computes with fewer bits


NOISE = {
    "float32": Noise(mean=2e-3, high=1e-2, one_sided=2e-3, coarse=0.1),
    "bfloat16": Noise(mean=0.08, high=0.4, one_sided=0.03, coarse=0.15),
}
"""From measurement of vLLM against the learner, with room above it.

float32, both: mean 1e-6, largest 2e-5 on a CPU; kernels of a GPU that round products to TF32 come to about 1e-3.
bfloat16, both: mean 0.01 with the starter and 0.04 with SmolLM2-135M, of whose tokens 95 % are within 0.16 and some 0.5
apart: a logit of 16 to 32 is rounded to a multiple of 1/8 on either side, and temperature 0.7 makes more of it.
Another dtype: 0.01 and 0.03, which only a learner in float32 can tell."""

HIGH = 0.95

ALL_ON_ONE_SIDE = 0.8
"""The mean difference over the mean absolute one. Rounding: about 0, give or take 0.1 over a hundred tokens. Weights
that differ reach this only together with differences that no cut explains."""

MOST_CUT = 1.0
"""Sampling from a third of the probability raises all logprobs by about so much; what is more has other causes."""

RAW_FITS_BETTER = 0.25
"""The softmax at temperature 1 explains the logprobs so much better than the one that was asked for."""


@dataclass(frozen=True)
class Sample:
    """One completion as the engine gave it, and the learner's word on its tokens: at the temperature of sampling and
    at temperature 1."""

    temperature: float
    most: int  # tokens that were asked for
    generation: Generation
    learner_N: Floats
    plain_N: Floats


@dataclass(frozen=True)
class Agreement:
    """What came of it. `line` says it in words, with a remedy; the numbers are absolute differences of logprobs."""

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
    """What the two are held to: the dtype of the run, and who samples (for the remedy to name the right flag)."""

    dtype: str
    kind: str = "embedded"

    @property
    def noise(self) -> Noise:
        return NOISE[self.dtype]


def compare(samples: Sequence[Sample], version: Version, terms: Terms) -> Agreement:
    """`version` is the learner's."""
    if fault := next(filter(None, map(_fault, samples)), "" if samples else "it was asked for nothing"):
        return Agreement("answers", f"{fault}; {remedy('answers', terms)}")
    learner_N = np.concatenate([sample.learner_N for sample in samples])
    if not np.isfinite(learner_N).all():
        largest = max(int(sample.generation.tokens.max()) for sample in samples)
        words = f"it gives token ids that the model does not have (the largest is {largest})"
        return Agreement("vocabulary", f"{words}; {remedy('vocabulary', terms)}", tokens=len(learner_N))
    difference_N = np.concatenate([sample.generation.logprobs for sample in samples]) - learner_N
    verdict, words = _verdict(samples, difference_N, version, terms)
    return Agreement(
        verdict,
        words if verdict == "agrees" else f"{words}; {remedy(verdict, terms)}",
        tokens=len(difference_N),
        mean=float(np.abs(difference_N).mean()),
        high=float(np.quantile(np.abs(difference_N), HIGH)),
        largest=float(np.abs(difference_N).max()),
    )


def _fault(sample: Sample) -> str:
    """Why this answer cannot be compared at all."""
    given = sample.generation
    counts = (len(given.tokens), len(given.logprobs), len(given.versions))
    if len(set(counts)) > 1:
        return "it gives {} tokens with {} logprobs and {} versions".format(*counts)
    if not 0 < counts[0] <= sample.most:
        return (
            f"it gives {plural(counts[0], 'token')} where 1 to {sample.most} were asked for (stop reason: {given.stop})"
        )
    if not (np.isfinite(given.logprobs) & (given.logprobs <= _LARGEST_LOGPROB)).all():
        return "it gives logprobs that are positive or not finite"
    return ""


_LARGEST_LOGPROB = 1e-3
"""A certain token has 0, give or take rounding."""


def _verdict(samples: Sequence[Sample], difference_N: Floats, version: Version, terms: Terms) -> tuple[Verdict, str]:
    apart_N, noise = np.abs(difference_N), terms.noise
    numbers = f"mean difference of logprobs {apart_N.mean():.2g}, largest {apart_N.max():.2g}"
    claimed = sorted({int(each) for sample in samples for each in sample.generation.versions})
    said = ", ".join(map(str, claimed))
    if claimed != [version]:
        return "weights", f"it samples with version {said}, the learner is at version {version} ({numbers})"
    if _is_raw(samples, noise):
        return "raw", "its logprobs are those before the temperature is applied"
    temperature_N = np.concatenate([np.full(len(each.learner_N), each.temperature) for each in samples])
    parts = [difference_N[temperature_N == each] for each in np.unique(temperature_N)]
    if any(_is_cut(part_N, noise) for part_N in parts):
        return (
            "cut",
            f"it samples from fewer tokens than there are: its logprobs are higher by {difference_N.mean():.2g}",
        )
    if all(_within(np.abs(part_N), noise.mean, noise.high) for part_N in parts):
        return (
            "agrees",
            f"within the rounding of {terms.dtype} ({numbers}, {plural(len(apart_N), 'token')} of version {version})",
        )
    if all(np.abs(part_N).mean() <= noise.coarse for part_N in parts):
        return "dtype", f"it computes in another dtype, or its weights are slightly other ones ({numbers})"
    return "weights", f"it has other weights, though it says version {said} as the learner does ({numbers})"


def _within(apart_N: Floats, mean: float, high: float) -> bool:
    return bool(apart_N.mean() <= mean and np.quantile(apart_N, HIGH) <= high)


def _is_raw(samples: Sequence[Sample], noise: Noise) -> bool:
    """Temperatures 0 and 1 tell nothing: there the two are the same."""
    telling = [sample for sample in samples if sample.temperature not in (0.0, 1.0)]
    if not telling:
        return False
    engine_N = np.concatenate([sample.generation.logprobs for sample in telling])
    asked = float(np.abs(engine_N - np.concatenate([sample.learner_N for sample in telling])).mean())
    plain = float(np.abs(engine_N - np.concatenate([sample.plain_N for sample in telling])).mean())
    return asked > noise.one_sided and plain <= noise.coarse and plain < RAW_FITS_BETTER * asked


def _is_cut(difference_N: Floats, noise: Noise) -> bool:
    higher = float(difference_N.mean())
    one_sided = higher >= ALL_ON_ONE_SIDE * float(np.abs(difference_N).mean())
    return one_sided and higher > noise.one_sided and float(np.quantile(difference_N, HIGH)) <= MOST_CUT


def remedy(verdict: Verdict, terms: Terms) -> str:
    """What to change, for this kind of engine."""
    if terms.kind == "embedded":
        return "the embedded engine should never do this: please report it"
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
        "vocabulary": "serve the model that model.path names, with its own tokenizer",
        "raw": raw[terms.kind],
        "cut": cut[terms.kind],
        "dtype": f"start the server with --dtype {terms.dtype}, and with neither weights nor cache quantised",
        "weights": "serve the model that model.path names, or start the server again",
    }
    return remedies[verdict]
