"""A scripted engine, and tokenizers with two different chat templates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from outpace.config import Config
from outpace.models.chat_format import TemplateChatFormat
from outpace.models.loading import load_tokenizer
from outpace.rollouts.client import PolicyClient
from outpace.types import EngineStats, Generation, GroupOrder, Ints, LoadReport, Manifest, Sampling, StopReason, Version
from rollouts_support import rollout_config

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class ScriptedEngine:
    """`outpace.protocols.Engine`: returns the prepared answers in request order, per episode.

    Token i of an answer has logprob -(i + 1) / 100 and version `version`, which goes up by one after every request.
    An answer can be an exception, which is raised, or None, which blocks until the request is aborted (it then
    returns `partial`) or cancelled.
    """

    def __init__(self, tokenizer: Any, answers: Callable[[int, int], str | Exception | None]) -> None:
        self._tokenizer = tokenizer
        self.answers = answers
        self.version: Version = 3
        self.stop: StopReason = "stop"
        self.prompts: dict[str, list[int]] = {}
        self.samplings: dict[str, Sampling] = {}
        self.bounds: list[tuple[Version, Version | None]] = []
        self.partial = ""
        self.aborted: list[str] = []
        self._hanging: dict[str, asyncio.Event] = {}
        self.started = asyncio.Event()
        self.before_failing: Callable[[], Awaitable[None]] | None = None

    async def generate(
        self, request_id: str, token_ids: Ints, sampling: Sampling, min_version: Version, pinned: Version | None
    ) -> Generation:
        assert request_id not in self.prompts, "a request id is used once"
        self.prompts[request_id] = token_ids.tolist()
        self.samplings[request_id] = sampling
        self.bounds.append((min_version, pinned))
        self.started.set()
        _, episode, turn = request_id.rsplit(".", 2)
        answer = self.answers(int(episode), int(turn))
        if answer is None:
            await self._hanging.setdefault(request_id, asyncio.Event()).wait()
            return self._generation(self.partial, self.version, "aborted")
        if isinstance(answer, Exception):
            if self.before_failing is not None:
                await self.before_failing()
            raise answer
        version, self.version = self.version, self.version + 1
        return self._generation(str(answer), version, self.stop)

    def _generation(self, answer: str, version: Version, stop: StopReason) -> Generation:
        tokens = self._tokenizer.encode(answer, add_special_tokens=False)
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=(-np.arange(1, len(tokens) + 1) / 100).astype(np.float32),
            versions=np.full(len(tokens), version, np.int32),
            stop=stop,
        )

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self._hanging.setdefault(request_id, asyncio.Event()).set()

    async def load(self, manifest: Manifest, pinned: bool) -> LoadReport:
        raise NotImplementedError

    async def release_pinned(self) -> None:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        raise NotImplementedError


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The starter model's tokenizer: bytes, plus tags for turns and tool calls."""
    return load_tokenizer("starter")


@pytest.fixture(scope="session")
def chatml() -> Any:
    """A BPE tokenizer with a ChatML template: newline after the end of a turn, tool results in user turns."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = ["the answer is stand-in tool response user assistant system result error add numbers"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")  # type: ignore[no-untyped-call]
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(params=["starter", "chatml"])
def any_tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each of the two tokenizers in turn."""
    return request.getfixturevalue("tokenizer" if request.param == "starter" else "chatml")


@pytest.fixture
def make_engine(tokenizer: Any) -> Callable[..., ScriptedEngine]:
    """An engine from a list of answers, the same for every episode, or from a function of episode and turn."""

    def make(answers: Any, with_tokenizer: Any = None) -> ScriptedEngine:
        script = answers if callable(answers) else lambda episode, turn: answers[turn]
        return ScriptedEngine(with_tokenizer or tokenizer, script)

    return make


@pytest.fixture
def make_settings() -> Callable[..., Config]:
    return rollout_config


@pytest.fixture
def make_client(tokenizer: Any, make_settings: Callable[..., Config]) -> Callable[..., PolicyClient]:
    def make(
        engine: Any,
        episode: int = 0,
        with_tokenizer: Any = None,
        min_version: int = 2,
        gateway: Any = None,
        **changes: Any,
    ) -> PolicyClient:
        chosen = with_tokenizer or tokenizer
        order = GroupOrder(7, task=0, epoch=0, min_version=min_version, size=2)
        chat_format = TemplateChatFormat(chosen, (chosen.eos_token_id,))
        return PolicyClient(engine, chat_format, make_settings(**changes), order, episode, gateway=gateway)

    return make
