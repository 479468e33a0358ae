"""Each kind of disagreement between engine and learner logprobs gets its own verdict."""

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
from outpace.controller import logprob_check
from outpace.controller.logprob_check import (
    MAX_PROMPT_TOKENS,
    PROBE_PROMPTS,
    PROBE_TOKENS,
    TOLERANCES,
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
    """A table of logits by last token: small, with the entropy of a language model."""

    def __init__(self, seed: int = 0, scale: float = 2.0) -> None:
        self.table = np.random.default_rng(seed).normal(0, scale, (VOCABULARY, VOCABULARY))

    def moved(self, by: float) -> Policy:
        other = Policy()
        other.table = self.table + np.random.default_rng(99).normal(0, by, self.table.shape)
        return other

    def logprobs(self, tokens: Ints, temperature: float) -> Floats:
        """Return one logprob per token but the first, computed like the learner does."""
        if tokens.max() >= VOCABULARY:
            return np.full(len(tokens) - 1, np.nan, dtype=np.float32)
        rows = log_softmax(self.table[tokens[:-1]], temperature)
        return rows[np.arange(len(rows)), tokens[1:]].astype(np.float32)


class TableEngine:
    """An engine over a table, with every fault that a server can have."""

    def __init__(self, policy: Policy, version: Version = 0, rounding: float = 0.0) -> None:
        self.policy, self.version, self.rounding = policy, version, rounding
        self.raw = False
        self.top_k = VOCABULARY
        self.distort: Callable[[Generation], Generation] = lambda generation: generation
        self.requests: list[tuple[Ints, Sampling]] = []
        self.loaded: list[Manifest] = []

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        self.requests.append((token_ids, sampling))
        noise = np.random.default_rng([sampling.seed, len(self.requests)])
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


class TableLearner:
    """A learner over a table."""

    def __init__(self, policy: Policy, version: Version = 0) -> None:
        self.policy, self.version = policy, version

    async def logprobs(self, sequences: list[Ints], temperature: float) -> list[Floats]:
        return [self.policy.logprobs(tokens, temperature) for tokens in sequences]

    async def publish(self, leased: list[Version]) -> Manifest:
        return Manifest("run", self.version, "", [])


class PromptSource:
    def __init__(self, first_prompts: list[Ints]) -> None:
        self._prompts = first_prompts

    async def first_prompts(self, count: int) -> list[Ints]:
        return self._prompts[:count]


def random_prompt(length: int = 5, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


PROMPTS = [random_prompt(5, seed) for seed in range(PROBE_PROMPTS)]


async def compare_with(
    engine: TableEngine,
    learner: Policy,
    version: Version = 0,
    dtype: str = "float32",
    temperature: float = 1.0,
    kind: str = "vllm",
    **options: Any,
) -> LogprobComparison:
    return await compare_engine(
        engine,  # type: ignore[arg-type]
        TableLearner(learner),  # type: ignore[arg-type]
        PROMPTS,
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
    engine = TableEngine(Policy(), version=4, rounding=ROUNDING[dtype])
    found = await compare_with(engine, Policy(), 4, dtype, temperature)
    assert found.agrees, found.line
    assert 0 < found.mean < found.high < found.largest
    assert dtype in found.line


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_logprobs_taken_before_the_temperature_are_detected_at_every_temperature(
    dtype: str, temperature: float
) -> None:
    engine = TableEngine(Policy(), rounding=ROUNDING[dtype])
    engine.raw = True
    found = await compare_with(engine, Policy(), dtype=dtype, temperature=temperature)
    assert found.verdict == "raw"
    assert "--logprobs-mode processed_logprobs" in found.line


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [5, 10])
async def test_a_truncated_distribution_is_detected(dtype: str, top_k: int) -> None:
    engine = TableEngine(Policy(), rounding=ROUNDING[dtype])
    engine.top_k = top_k
    found = await compare_with(engine, Policy(), dtype=dtype)
    assert found.verdict == "cut"
    assert "--generation-config vllm" in found.line


async def test_coarser_arithmetic_than_that_of_the_learner_is_reported_as_another_dtype() -> None:
    found = await compare_with(TableEngine(Policy(), rounding=ROUNDING["bfloat16"]), Policy())
    assert found.verdict == "dtype"
    assert "--dtype float32" in found.line


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", [0.3, 1.0, 3.0])
async def test_different_weights_are_detected_even_if_the_version_matches(dtype: str, by: float) -> None:
    found = await compare_with(TableEngine(Policy(), rounding=ROUNDING[dtype]), Policy().moved(by), dtype=dtype)
    assert found.verdict == "weights", found.line
    assert "version 0" in found.line


@pytest.mark.parametrize("claimed", [6, 8])
async def test_a_version_off_by_one_is_detected_even_if_the_logprobs_match(claimed: Version) -> None:
    found = await compare_with(TableEngine(Policy(), version=claimed), Policy(), version=7)
    assert found.verdict == "weights"
    assert f"version {claimed}" in found.line
    assert "version 7" in found.line


async def test_a_single_token_far_off_is_tolerated() -> None:
    engine = TableEngine(Policy(), rounding=ROUNDING["bfloat16"])

    def shift_one_token(drawn: Generation) -> Generation:
        first = len(engine.requests) == 1
        return msgspec.structs.replace(drawn, logprobs=drawn.logprobs - 0.25 * (first * (np.arange(PROBE_TOKENS) == 4)))

    engine.distort = shift_one_token
    found = await compare_with(engine, Policy(), dtype="bfloat16")
    assert found.agrees, found.line
    assert found.largest > 0.2


def ids_out_of_range(drawn: Generation) -> Generation:
    return msgspec.structs.replace(drawn, tokens=drawn.tokens + np.int32(VOCABULARY))


async def test_token_ids_outside_the_vocabulary_are_reported_as_another_vocabulary() -> None:
    engine = TableEngine(Policy())
    engine.distort = ids_out_of_range
    found = await compare_with(engine, Policy())
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
async def test_completions_that_cannot_be_compared_are_reported_with_the_reason(
    distort: Callable[[Generation], Generation], keys: tuple[str, ...]
) -> None:
    engine = TableEngine(Policy())
    engine.distort = distort
    found = await compare_with(engine, Policy())
    assert found.verdict == "answers"
    assert all(key in found.line for key in keys), found.line


@pytest.mark.parametrize("stop", ["lost", "interrupted"])
async def test_a_completion_that_the_engine_did_not_finish_is_repeated(
    stop: Literal["lost", "interrupted"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_check, "FIRST_BACKOFF_S", 0.0)
    engine, failures = TableEngine(Policy()), 2

    def unfinished(generation: Generation) -> Generation:
        nonlocal failures
        failures -= 1
        empty = generation.tokens[:0], generation.logprobs[:0], generation.versions[:0]
        return generation if failures < 0 else Generation(*empty, stop)

    engine.distort = unfinished
    assert (await compare_with(engine, Policy())).verdict == "agrees"


async def test_an_engine_that_never_responds_times_out() -> None:
    class UnresponsiveEngine(TableEngine):
        async def generate(self, *_: Any) -> Generation:
            await asyncio.Event().wait()
            raise AssertionError

    found = await compare_with(UnresponsiveEngine(Policy()), Policy(), deadline_s=0.01)
    assert found.verdict == "answers"
    assert "0.01 s" in found.line


async def test_an_error_of_the_engine_is_part_of_the_report() -> None:
    class ContextFullEngine(TableEngine):
        async def generate(self, *_: Any) -> Generation:
            raise ContextFull("the prompt fills the context of 8 tokens")

    found = await compare_with(ContextFullEngine(Policy()), Policy())
    assert found.verdict == "answers"
    assert "the prompt fills the context of 8 tokens" in found.line


async def test_temperature_1_is_probed_together_with_0_7_to_tell_raw_from_processed_logprobs() -> None:
    engine = TableEngine(Policy())
    await compare_with(engine, Policy(), temperature=1.0)
    assert [sampling.temperature for _, sampling in engine.requests] == [1.0] * PROBE_PROMPTS + [0.7] * PROBE_PROMPTS
    engine.requests.clear()
    await compare_with(engine, Policy(), temperature=1.2)
    assert [sampling.temperature for _, sampling in engine.requests] == [1.2] * PROBE_PROMPTS
    assert all((s.top_p, s.top_k, s.stop_ids, s.stop_strings) == (1.0, 0, [], []) for _, s in engine.requests)


def test_the_remedy_for_the_embedded_engine_does_not_mention_server_flags() -> None:
    found = compare_logprobs([], 0, "float32", "embedded")
    assert found.verdict == "answers"
    assert "report" in found.line
    assert "server" not in found.line
    assert "--" not in found.line


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("verdict", ["answers", "vocabulary", "raw", "cut", "dtype", "weights"])
def test_every_server_verdict_has_a_one_line_remedy(kind: str, verdict: Verdict) -> None:
    text = logprob_check.remedy(verdict, "float32", kind)
    assert text
    assert "\n" not in text


# ----------------------------------------------------------------------------------------------------------- properties


def scored_completions(
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
def test_rounding_errors_of_either_sign_always_agree(dtype: str, seed: int, share: float, count: int) -> None:
    noise = np.random.default_rng(seed)
    rounding = noise.normal(0, share * TOLERANCES[dtype].mean, count)
    found = compare_logprobs(scored_completions(rounding, -1 - noise.exponential(1.0, count), 1.0), 0, dtype, "vllm")
    assert found.agrees, found.line


@given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.floats(0.3, 20.0), st.integers(64, 256))
@settings(deadline=None)
def test_large_differences_of_either_sign_never_agree(dtype: str, seed: int, by: float, count: int) -> None:
    noise = np.random.default_rng(seed)
    found = compare_logprobs(
        scored_completions(noise.normal(0, by, count), np.full(count, -30.0), 1.0), 0, dtype, "vllm"
    )
    assert found.verdict == "weights"


# ---------------------------------------------------------------------------------------------------------- all engines


def check(
    engines: dict[str, TableEngine], learner: TableLearner, config: Config, version: Version, warnings: list[str]
) -> Any:
    first_prompts = PromptSource(PROMPTS)
    return check_engine_logprobs(engines, learner, first_prompts, config, version, warnings.append)  # type: ignore[arg-type]


@pytest.fixture
def server_config() -> Config:
    config = resolved()
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "vllm"})})


async def test_engines_that_agree_are_accepted_silently(server_config: Config) -> None:
    warnings: list[str] = []
    engines = {"engine-0": TableEngine(Policy()), "engine-1": TableEngine(Policy())}
    await check(engines, TableLearner(Policy()), server_config, 0, warnings)
    assert warnings == []
    assert all(engine.loaded == [] for engine in engines.values())


async def test_an_engine_with_unusable_logprobs_is_rejected_by_name(server_config: Config) -> None:
    wrong = TableEngine(Policy())
    wrong.raw = True
    with pytest.raises(BadInput, match=naming("engine-1", "--logprobs-mode")):
        await check(
            {"engine-0": TableEngine(Policy()), "engine-1": wrong}, TableLearner(Policy()), server_config, 0, []
        )


async def test_an_engine_with_another_dtype_is_accepted_with_a_warning(server_config: Config) -> None:
    warnings: list[str] = []
    coarse = TableEngine(Policy(), rounding=ROUNDING["bfloat16"])
    await check({"engine-0": coarse}, TableLearner(Policy()), server_config, 0, warnings)
    assert len(warnings) == 1
    assert "engine-0" in warnings[0]
    assert f"--dtype {server_config.model.dtype}" in warnings[0]


@pytest.mark.parametrize(("current", "version"), [(0, 5), (31, 0), (-1, 0)])
async def test_engines_with_another_version_load_the_weights_of_the_learner_first(
    current: Version, version: Version, server_config: Config
) -> None:
    """Engines of a resumed run, and servers that were already running."""
    behind, good = TableEngine(Policy(), version=current), TableEngine(Policy(), version=version)
    await check({"engine-0": behind, "engine-1": good}, TableLearner(Policy(), version), server_config, version, [])
    assert [manifest.version for manifest in behind.loaded] == [version]
    assert good.loaded == []


@pytest.mark.parametrize(
    ("context", "longest"), [(None, MAX_PROMPT_TOKENS), (4096, MAX_PROMPT_TOKENS), (100, 100 - PROBE_TOKENS), (4, 1)]
)
async def test_probe_prompts_leave_room_for_a_completion_and_are_repeated_if_there_are_few(
    context: int | None, longest: int, server_config: Config
) -> None:
    engine, prompt = TableEngine(Policy()), random_prompt(900)
    limited = server_config.engine.model_copy(update={"context": context})
    config = server_config.model_copy(update={"engine": limited})
    found = await compare_engines({"engine-0": engine}, TableLearner(Policy()), PromptSource([prompt]), config, 0)  # type: ignore[dict-item,arg-type]
    assert found["engine-0"].agrees
    prompts: Sequence[Ints] = [tokens for tokens, _ in engine.requests]
    assert len(prompts) == 2 * PROBE_PROMPTS
    assert all(np.array_equal(tokens, prompt[-longest:]) for tokens in prompts)
