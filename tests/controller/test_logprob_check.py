"""Each way in which a sampler can disagree with the learner is told apart from all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outpace.config import Config
from outpace.controller import logprob_check as asking
from outpace.controller.logprob_check import (
    MAX_PROMPT_TOKENS,
    PROBE_PROMPTS,
    PROBE_TOKENS,
    TOLERANCES,
    ComparisonContext,
    LogprobComparison,
    ScoredCompletion,
    Verdict,
    check_engine_logprobs,
    compare_engine,
    compare_engines,
    compare_logprobs,
)
from outpace.errors import BadInput, ContextFull
from outpace.types import EngineStats, Floats, Generation, Ints, LoadReport, Manifest, Sampling, Version
from support import naming, resolved

VOCABULARY = 40
Logits = NDArray[np.float64]

DTYPES: list[Literal["float32", "bfloat16"]] = ["float32", "bfloat16"]
ROUNDING = {"float32": 1e-5, "bfloat16": 0.045}


def log_softmax(logits: Logits, temperature: float) -> Logits:
    scaled = logits / (temperature or 1.0)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


class Policy:
    """A table of logits by last token: small, and as uncertain as a language model."""

    def __init__(self, seed: int = 0, scale: float = 2.0) -> None:
        self.table = np.random.default_rng(seed).normal(0, scale, (VOCABULARY, VOCABULARY))

    def moved(self, by: float) -> Policy:
        other = Policy()
        other.table = self.table + np.random.default_rng(99).normal(0, by, self.table.shape)
        return other

    def logprobs(self, tokens: Ints, temperature: float) -> Floats:
        """One per token but the first; as the learner does it."""
        if tokens.max() >= VOCABULARY:
            return np.full(len(tokens) - 1, np.nan, dtype=np.float32)
        rows = log_softmax(self.table[tokens[:-1]], temperature)
        return rows[np.arange(len(rows)), tokens[1:]].astype(np.float32)


class Sampler:
    """An engine over a table, with every fault that a server may have."""

    def __init__(self, policy: Policy, version: Version = 0, rounding: float = 0.0) -> None:
        self.policy, self.version, self.rounding = policy, version, rounding
        self.raw = False
        self.top_k = VOCABULARY
        self.distort: Callable[[Generation], Generation] = lambda generation: generation
        self.asked: list[tuple[Ints, Sampling]] = []
        self.loaded: list[Manifest] = []

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        self.asked.append((token_ids, sampling))
        noise = np.random.default_rng([sampling.seed, len(self.asked)])
        last, tokens, logprobs = int(token_ids[-1]), [], []
        for _ in range(sampling.max_tokens):
            row = log_softmax(self.policy.table[last], sampling.temperature)
            kept = np.where(row >= np.sort(row)[-self.top_k], row, -np.inf)
            kept -= np.log(np.exp(kept).sum())
            chosen = int(noise.choice(VOCABULARY, p=np.exp(kept)))
            reported = log_softmax(self.policy.table[last], 1.0) if self.raw else kept
            tokens.append(chosen)
            logprobs.append(min(reported[chosen] + noise.normal(0, self.rounding), 0.0))
            last = chosen
        versions = np.full(len(tokens), self.version, dtype=np.int32)
        drawn = Generation(np.array(tokens, np.int32), np.array(logprobs, np.float32), versions, "length")
        return self.distort(drawn)

    async def stats(self) -> EngineStats:
        return EngineStats(self.version, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 4, 1)

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        self.loaded.append(manifest)
        self.version = manifest.version
        return LoadReport(manifest.version, 0.0, 0.0, 0)


class Trained:
    """A learner over a table."""

    def __init__(self, policy: Policy, version: Version = 0) -> None:
        self.policy, self.version = policy, version

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        return [self.policy.logprobs(tokens, temperature) for tokens in sequences]

    async def publish(self, leased: list[Version]) -> Manifest:
        return Manifest("run", self.version, "", [])


class Opener:
    def __init__(self, first_prompts: list[Ints]) -> None:
        self._openings = first_prompts

    async def first_prompts(self, count: int) -> list[Ints]:
        return self._openings[:count]


def an_opening(length: int = 5, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


SOME = [an_opening(5, seed) for seed in range(PROBE_PROMPTS)]


async def verdict_on(
    engine: Sampler,
    learner: Policy,
    version: Version = 0,
    dtype: str = "float32",
    temperature: float = 1.0,
    kind: str = "vllm",
    **options: Any,
) -> LogprobComparison:
    return await compare_engine(
        engine,  # type: ignore[arg-type]
        Trained(learner),  # type: ignore[arg-type]
        SOME,
        version,
        dtype=dtype,
        temperature=temperature,
        seed=3,
        kind=kind,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_the_same_weights_agree_within_the_rounding_of_their_dtype(dtype: str, temperature: float) -> None:
    engine = Sampler(Policy(), version=4, rounding=ROUNDING[dtype])
    found = await verdict_on(engine, Policy(), 4, dtype, temperature)
    assert found.agrees, found.line
    assert 0 < found.mean < found.high < found.largest
    assert dtype in found.line


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_logprobs_before_the_temperature_are_found_out_whatever_the_temperature(
    dtype: str, temperature: float
) -> None:
    engine = Sampler(Policy(), rounding=ROUNDING[dtype])
    engine.raw = True
    found = await verdict_on(engine, Policy(), dtype=dtype, temperature=temperature)
    assert found.verdict == "raw"
    assert "--logprobs-mode processed_logprobs" in found.line


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [5, 10])
async def test_a_distribution_that_was_cut_is_higher_everywhere(dtype: str, top_k: int) -> None:
    engine = Sampler(Policy(), rounding=ROUNDING[dtype])
    engine.top_k = top_k
    found = await verdict_on(engine, Policy(), dtype=dtype)
    assert found.verdict == "cut"
    assert "--generation-config vllm" in found.line


async def test_coarser_arithmetic_than_the_learners_is_another_dtype() -> None:
    found = await verdict_on(Sampler(Policy(), rounding=ROUNDING["bfloat16"]), Policy())
    assert found.verdict == "dtype"
    assert "--dtype float32" in found.line


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", [0.3, 1.0, 3.0])
async def test_other_weights_are_other_weights_even_if_the_version_is_right(dtype: str, by: float) -> None:
    found = await verdict_on(Sampler(Policy(), rounding=ROUNDING[dtype]), Policy().moved(by), dtype=dtype)
    assert found.verdict == "weights", found.line
    assert "version 0" in found.line


@pytest.mark.parametrize("claimed", [6, 8])
async def test_a_version_off_by_one_is_wrong_even_if_the_numbers_fit(claimed: Version) -> None:
    found = await verdict_on(Sampler(Policy(), version=claimed), Policy(), version=7)
    assert found.verdict == "weights"
    assert f"version {claimed}" in found.line
    assert "version 7" in found.line


async def test_a_single_token_far_off_is_no_reason_for_alarm() -> None:
    engine = Sampler(Policy(), rounding=ROUNDING["bfloat16"])

    def one_off(drawn: Generation) -> Generation:
        first = len(engine.asked) == 1
        return msgspec.structs.replace(drawn, logprobs=drawn.logprobs - 0.25 * (first * (np.arange(PROBE_TOKENS) == 4)))

    engine.distort = one_off
    found = await verdict_on(engine, Policy(), dtype="bfloat16")
    assert found.agrees, found.line
    assert found.largest > 0.2


def ids_out_of_range(drawn: Generation) -> Generation:
    return msgspec.structs.replace(drawn, tokens=drawn.tokens + np.int32(VOCABULARY))


async def test_ids_that_the_model_does_not_have_are_another_vocabulary() -> None:
    engine = Sampler(Policy())
    engine.distort = ids_out_of_range
    found = await verdict_on(engine, Policy())
    assert found.verdict == "vocabulary"
    assert "model.path" in found.line


@pytest.mark.parametrize(
    ("distort", "keys"),
    [
        (lambda g: msgspec.structs.replace(g, logprobs=g.logprobs[1:]), ("16 tokens", "15 logprobs", "16 versions")),
        (lambda g: msgspec.structs.replace(g, versions=g.versions[:3]), ("16 tokens", "16 logprobs", "3 versions")),
        (lambda g: msgspec.structs.replace(g, logprobs=-g.logprobs), ("positive",)),
        (lambda g: msgspec.structs.replace(g, logprobs=g.logprobs * np.float32(np.nan)), ("finite",)),
        (lambda g: Generation(g.tokens[:0], g.logprobs[:0], g.versions[:0], "lost"), ("0 tokens", "16", "lost")),
        (
            lambda g: Generation(*(np.repeat(each, 2) for each in (g.tokens, g.logprobs, g.versions)), "length"),
            ("32 tokens", "16", "length"),
        ),
    ],
)
async def test_answers_that_cannot_be_compared_say_why(
    distort: Callable[[Generation], Generation], keys: tuple[str, ...]
) -> None:
    engine = Sampler(Policy())
    engine.distort = distort
    found = await verdict_on(engine, Policy())
    assert found.verdict == "answers"
    assert all(key in found.line for key in keys), found.line


async def test_an_engine_that_never_answers_is_not_waited_for() -> None:
    class Silent(Sampler):
        async def generate(self, *_: Any) -> Generation:
            await asyncio.Event().wait()
            raise AssertionError

    found = await verdict_on(Silent(Policy()), Policy(), deadline_s=0.01)
    assert found.verdict == "answers"
    assert "0.01 s" in found.line


async def test_a_refusal_is_passed_on() -> None:
    class Full(Sampler):
        async def generate(self, *_: Any) -> Generation:
            raise ContextFull("the prompt fills the context of 8 tokens")

    found = await verdict_on(Full(Policy()), Policy())
    assert found.verdict == "answers"
    assert "the prompt fills the context of 8 tokens" in found.line


async def test_temperature_1_is_asked_for_together_with_one_that_tells_raw_from_processed() -> None:
    engine = Sampler(Policy())
    await verdict_on(engine, Policy(), temperature=1.0)
    assert [sampling.temperature for _, sampling in engine.asked] == [1.0] * PROBE_PROMPTS + [0.7] * PROBE_PROMPTS
    engine.asked.clear()
    await verdict_on(engine, Policy(), temperature=1.2)
    assert [sampling.temperature for _, sampling in engine.asked] == [1.2] * PROBE_PROMPTS
    assert all((s.top_p, s.top_k, s.stop_ids, s.stop_strings) == (1.0, 0, [], []) for _, s in engine.asked)


def test_the_embedded_engine_is_not_told_to_change_a_servers_flags() -> None:
    found = compare_logprobs([], 0, ComparisonContext("float32", "embedded"))
    assert found.verdict == "answers"
    assert "report" in found.line
    assert "server" not in found.line
    assert "--" not in found.line


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("verdict", ["answers", "vocabulary", "raw", "cut", "dtype", "weights"])
def test_every_verdict_on_a_server_has_a_remedy_of_one_line(kind: str, verdict: Verdict) -> None:
    words = asking.remedy(verdict, ComparisonContext("float32", kind))
    assert words
    assert "\n" not in words


# -------------------------------------------------------------------------------------------------- what always holds


def samples_of(
    difference_N: NDArray[np.float64], logprobs_N: NDArray[np.float64], temperature: float
) -> list[ScoredCompletion]:
    engine_N = np.minimum(logprobs_N + difference_N, 0).astype(np.float32)
    count = len(engine_N)
    drawn = Generation(np.zeros(count, np.int32), engine_N, np.zeros(count, np.int32), "length")
    return [ScoredCompletion(temperature, count, drawn, logprobs_N.astype(np.float32), logprobs_N.astype(np.float32))]


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
    st.floats(0.0, 1.0),
    st.integers(64, 256),
)
@settings(deadline=None)
def test_rounding_of_either_sign_is_never_an_alarm(dtype: str, seed: int, share: float, count: int) -> None:
    noise = np.random.default_rng(seed)
    rounding = noise.normal(0, share * TOLERANCES[dtype].mean, count)
    found = compare_logprobs(
        samples_of(rounding, -1 - noise.exponential(1.0, count), 1.0), 0, ComparisonContext(dtype, "vllm")
    )
    assert found.agrees, found.line


@given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.floats(0.3, 20.0), st.integers(64, 256))
@settings(deadline=None)
def test_large_differences_of_either_sign_never_pass(dtype: str, seed: int, by: float, count: int) -> None:
    noise = np.random.default_rng(seed)
    found = compare_logprobs(
        samples_of(noise.normal(0, by, count), np.full(count, -30.0), 1.0), 0, ComparisonContext(dtype, "vllm")
    )
    assert found.verdict == "weights"


# -------------------------------------------------------------------------------------------------------- all engines


def check(engines: dict[str, Sampler], learner: Trained, config: Config, version: Version, said: list[str]) -> Any:
    first_prompts = Opener(SOME)
    return check_engine_logprobs(engines, learner, first_prompts, config, version, said.append)  # type: ignore[arg-type]


@pytest.fixture
def server_config() -> Config:
    config = resolved()
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "vllm"})})


async def test_engines_that_agree_are_taken_without_a_word(server_config: Config) -> None:
    said: list[str] = []
    engines = {"engine-0": Sampler(Policy()), "engine-1": Sampler(Policy())}
    await check(engines, Trained(Policy()), server_config, 0, said)
    assert said == []
    assert all(engine.loaded == [] for engine in engines.values())


async def test_one_that_cannot_be_trained_on_is_refused_by_name(server_config: Config) -> None:
    wrong = Sampler(Policy())
    wrong.raw = True
    with pytest.raises(BadInput, match=naming("engine-1", "--logprobs-mode")):
        await check({"engine-0": Sampler(Policy()), "engine-1": wrong}, Trained(Policy()), server_config, 0, [])


async def test_another_dtype_is_told_of_and_taken(server_config: Config) -> None:
    said: list[str] = []
    coarse = Sampler(Policy(), rounding=ROUNDING["bfloat16"])
    await check({"engine-0": coarse}, Trained(Policy()), server_config, 0, said)
    assert len(said) == 1
    assert "engine-0" in said[0]
    assert f"--dtype {server_config.model.dtype}" in said[0]


@pytest.mark.parametrize(("held", "version"), [(0, 5), (31, 0), (-1, 0)])
async def test_engines_that_hold_another_version_get_the_learners_weights_first(
    held: Version, version: Version, server_config: Config
) -> None:
    """Those of a resumed run, and servers that were running before."""
    behind, good = Sampler(Policy(), version=held), Sampler(Policy(), version=version)
    await check({"engine-0": behind, "engine-1": good}, Trained(Policy(), version), server_config, version, [])
    assert [manifest.version for manifest in behind.loaded] == [version]
    assert good.loaded == []


@pytest.mark.parametrize(
    ("context", "longest"), [(None, MAX_PROMPT_TOKENS), (4096, MAX_PROMPT_TOKENS), (100, 100 - PROBE_TOKENS), (4, 1)]
)
async def test_openings_leave_room_for_an_answer_and_are_repeated_where_there_are_few(
    context: int | None, longest: int, server_config: Config
) -> None:
    engine, opening = Sampler(Policy()), an_opening(900)
    limited = server_config.engine.model_copy(update={"context": context})
    config = server_config.model_copy(update={"engine": limited})
    found = await compare_engines({"engine-0": engine}, Trained(Policy()), Opener([opening]), config, 0)  # type: ignore[dict-item,arg-type]
    assert found["engine-0"].agrees
    asked: Sequence[Ints] = [tokens for tokens, _ in engine.asked]
    assert len(asked) == 2 * PROBE_PROMPTS
    assert all(np.array_equal(tokens, opening[-longest:]) for tokens in asked)
