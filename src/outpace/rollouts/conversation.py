"""Conversations of an episode: continue a chat from the exact token ids it was sampled with.

`Conversation` is one growing chat: new messages are appended, and only they are rendered. `ConversationIndex` does the
same for agents that send the full history with every request:

    history ─▶ digest of every prefix ─▶ longest prefix that ends in a known answer ─▶ keep its ids, render the rest

If the agent replaced an answer, or the chat format cannot continue exactly, the whole history is rendered again as the
start of another trajectory. Both cases count as breaks.

Digests (`outpace.rollouts.history_digests`) only find the prefix. Its token ids are always the original ones.

An answer that must call a function starts with tokens that the model does not sample (`outpace.models.call_opening`).
They end the prompt, so they are not trained on, but they are parsed as part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from outpace.errors import RequestFailed
from outpace.models.call_opening import call_opening
from outpace.models.chat import NO_KWARGS, Bridge, Schema, TemplateKwargs, as_messages
from outpace.models.chat_format import AnsweredConversation, ChatFormat, placeholder_for
from outpace.rollouts.history_digests import (
    Digest,
    answer_marks,
    call_digest,
    exact_key,
    extend_digest,
    prefix_digests,
)
from outpace.rollouts.requests import EpisodeRequests, ReservedRequest
from outpace.rollouts.transcript import OBSERVATION, TrajectoryBuilder, Transcript, Turn
from outpace.runtime.async_tools import LoopFairness, PerLoop, gather_or_cancel
from outpace.types import Answer, Generation, Ints, Message, StopReason, Trajectory

RenderedPrompts = dict[Hashable, list[int]]
"""Token ids of rendered conversation starts, by what they are rendered from."""

PROMPT = "prompt"
"""Source of the first tokens of a trajectory."""
FORCED = "forced call"
"""Source of the opening of a forced tool call."""


def role_names(messages: Sequence[Message]) -> str:
    return ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))


@dataclass(frozen=True)
class ConversationPosition:
    """Position of a request: after `parent`'s answer (None: at the start), with the tokens `observed` in between.

    `context` is the conversation so far, with placeholders for the policy's answers. `rendered` is its text, if
    the chat format provided it. `digest` and `marks` belong to the real conversation."""

    parent: Turn | None
    observed: Sequence[int]
    context: tuple[Message, ...]
    digest: Digest
    marks: tuple[Digest, ...]
    rendered: str = ""
    source: str = PROMPT  # origin of the observed tokens


@dataclass
class _KnownAnswer:
    """An answer that conversations may continue from. `rendered` is its full text, dropped once one continues."""

    turn: Turn
    context: tuple[Message, ...]
    marks: tuple[Digest, ...]
    rendered: str
    continued: bool = False


class ConversationIndex:
    """Finds the answer that a message history continues from."""

    def __init__(self, chat_format: ChatFormat, openings: RenderedPrompts) -> None:
        """`openings` caches rendered starts; the episodes of a group begin with the same prompt and share it."""
        self._chat_format = chat_format
        self._openings = openings
        self._known: dict[Digest, list[_KnownAnswer]] = {}
        self._requested: set[Digest] = set()
        self.breaks = 0

    def locate(
        self,
        role: str,
        tools: Sequence[Schema],
        history: Sequence[Message],
        template_kwargs: TemplateKwargs = NO_KWARGS,
    ) -> ConversationPosition:
        """Return the position of a request with this history. Counts a break if it cannot be continued exactly."""
        chain, marks = prefix_digests(role, tools, history, template_kwargs), answer_marks(history)
        known, length = self._longest_known(history, chain, marks)
        position = None
        if known is not None:
            position = self._continuation(known, length, history, tools, template_kwargs, chain, marks)
        if position is None:
            self.breaks += known is not None or self._replaces_answer(history, chain)
            opening, context = self.opening(history, tools, template_kwargs), tuple(map(placeholder_for, history))
            position = ConversationPosition(None, opening, context, chain[-1], marks)
        self._requested.add(chain[-1])
        return position

    def opening(
        self, history: Sequence[Message], tools: Sequence[Schema], template_kwargs: TemplateKwargs = NO_KWARGS
    ) -> list[int]:
        key = exact_key(tools, history, template_kwargs)
        if key not in self._openings:
            self._openings[key] = self._chat_format.open(history, tools, template_kwargs)
        return self._openings[key]

    def call_opening(
        self, names: Sequence[str], tools: Sequence[Schema], template_kwargs: TemplateKwargs = NO_KWARGS
    ) -> list[int]:
        """Return the first tokens of an answer that must call one of the functions `names`; empty without names."""
        if not names:
            return []
        digest = call_digest(names, tools, template_kwargs)
        if digest not in self._openings:
            self._openings[digest] = call_opening(self._chat_format, names, tools, template_kwargs)
        return self._openings[digest]

    def reopening(self, history: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """Render a conversation that cannot be continued exactly, and count a break."""
        self.breaks += 1
        return self._chat_format.open(history, tools)

    def remember(self, position: ConversationPosition, turn: Turn, answer: Answer) -> None:
        """Add an answer, so that later histories can continue from it."""
        message = answer.message
        known = _KnownAnswer(turn, position.context, (*position.marks, *answer_marks([message])), position.rendered)
        self._known.setdefault(extend_digest(position.digest, message), []).append(known)

    def _continuation(
        self,
        known: _KnownAnswer,
        length: int,
        history: Sequence[Message],
        tools: Sequence[Schema],
        template_kwargs: TemplateKwargs,
        chain: Sequence[Digest],
        marks: tuple[Digest, ...],
    ) -> ConversationPosition | None:
        answered, new = history[length - 1], history[length:]
        found = render_continuation(
            self._chat_format, known.turn, (), known.context, answered, new, tools, known.rendered, template_kwargs
        )
        if found is None:
            return None
        known.continued, known.rendered = True, ""
        context = (*known.context, placeholder_for(answered), *new)
        return ConversationPosition(known.turn, found.ids, context, chain[-1], marks, found.rendered, role_names(new))

    def _replaces_answer(self, history: Sequence[Message], chain: Sequence[Digest]) -> bool:
        """Whether the history replaces an answer sampled here. Assistant messages in few-shot prompts do not count."""
        followed = zip(chain, history[1:], strict=False)
        return any(message.get("role") == "assistant" and digest in self._requested for digest, message in followed)

    def _longest_known(
        self, history: Sequence[Message], chain: Sequence[Digest], marks: tuple[Digest, ...]
    ) -> tuple[_KnownAnswer | None, int]:
        for length in range(len(history), 0, -1):
            if history[length - 1].get("role") == "assistant" and chain[length - 1] in self._known:
                answers = sum(message.get("role") == "assistant" for message in history[:length])
                return _best_match(self._known[chain[length - 1]], marks[:answers]), length
        return None, 0


def _best_match(alike: list[_KnownAnswer], marks: tuple[Digest, ...]) -> _KnownAnswer:
    """Choose among answers with equal content: prefer matching call ids and reasoning, then one that is not continued
    yet, so that each continues in its own trajectory."""
    candidates = [known for known in alike if known.marks == marks] or alike
    return next((known for known in candidates if not known.continued), candidates[0])


def render_continuation(
    chat_format: ChatFormat,
    turn: Turn,
    after: Sequence[int],
    context: Sequence[Message],
    answered: Message,
    new: Sequence[Message],
    tools: Sequence[Schema],
    rendered: str = "",
    template_kwargs: TemplateKwargs = NO_KWARGS,
) -> Bridge | None:
    """Render `new` messages after a turn's answer and the tokens observed `after` it.

    Returns None if the conversation cannot be continued exactly. `rendered` is the text of the previous continuation,
    if there was one."""
    if any(message.get("role") == "assistant" for message in new):
        return None  # rendered assistant messages would look like sampled answers
    assert turn.generation is not None, "only an answered turn can be continued"
    answer = np.concatenate([turn.generation.tokens, np.array(after, dtype=np.int32)])
    state = AnsweredConversation(context, turn.prompt(), answer, answered, rendered)
    return chat_format.extend(state, new, tools, template_kwargs)


RequestListener = Callable[[str, Ints], None]
"""Called with the id and the prompt of a request just before it is sent."""

_fairness: PerLoop[LoopFairness] = PerLoop()


async def yield_to_loop() -> None:
    """Yield to the event loop before CPU-heavy work, so that a thousand concurrent episodes do not block it."""
    await _fairness.get(LoopFairness).wait_turn()


@dataclass
class TurnSampler:
    """Samples turns for one episode and records them in its transcript. Shared by all its conversations."""

    chat_format: ChatFormat
    system: str | None
    verbatim: bool  # tokenize text prompts without the chat template
    requests: EpisodeRequests
    conversations: ConversationIndex
    transcript: Transcript = field(default_factory=Transcript)
    newest: Answer | None = None

    def reserve(self, overrides: dict[str, Any]) -> ReservedRequest:
        return self.requests.reserve(self.chat_format.stop_ids, overrides)

    async def sample_turn(
        self,
        request: ReservedRequest,
        parent: Turn | None,
        observed: Sequence[int],
        role: str,
        tools: Sequence[Schema] = (),
        listener: RequestListener | None = None,
        source: str = OBSERVATION,
        forced: Sequence[int] = (),
    ) -> tuple[Turn, Answer]:
        """Send one request and record its turn.

        The prompt continues `parent`'s answer, if any, with `observed` and then with `forced`, the first tokens of the
        answer, which are not sampled. `source` names the origin of `observed`."""
        source = f"{source}, {FORCED}" if forced else source
        turn, prompt = self.transcript.begin(request.id, role, parent, [*observed, *forced], source)
        if listener is not None:
            listener(request.id, prompt)
        turn.generation = await self.requests.send(request, prompt)
        self.transcript.turns.append(turn)  # before the next await: the tokens count even if this is cancelled
        await yield_to_loop()
        self.newest = self._answer(turn, turn.generation, prompt, tools, request.sampling.stop_strings, forced)
        return turn, self.newest

    async def sample_turns(self, requests: Sequence[ReservedRequest], *prompt: Any) -> list[tuple[Turn, Answer]]:
        """Send several requests with the same prompt. `prompt` holds the other arguments of `sample_turn`. Turns are
        recorded in the order of the requests, not of completion. If one fails, none is recorded."""
        try:
            sampled: list[tuple[Turn, Answer]] = await gather_or_cancel(
                *(self.sample_turn(request, *prompt) for request in requests)
            )
        except BaseException:
            if len(requests) > 1:
                failed = {request.id for request in requests}
                dropped = [turn for turn in self.transcript.turns if turn.request_id in failed]
                self.requests.abandoned += sum(turn.length for turn in dropped)
                self.transcript.turns = [turn for turn in self.transcript.turns if turn not in dropped]
            raise
        if len(requests) > 1:
            turns = [turn for turn, _ in sampled]
            self.transcript.turns = [*(turn for turn in self.transcript.turns if turn not in turns), *turns]
            self.newest = sampled[-1][1]
        return sampled

    def branch(self, turn: Turn | None, after: Sequence[int], role: str) -> Trajectory:
        """Return the sequence up to `turn`, followed by the tokens observed `after` it."""
        if turn is not None:
            return self.transcript.branch(turn, after)
        built = TrajectoryBuilder()
        built.observe(after)
        return built.build(role)

    def _answer(
        self,
        turn: Turn,
        generation: Generation,
        prompt: Ints,
        tools: Sequence[Schema],
        stops: Sequence[str],
        forced: Sequence[int],
    ) -> Answer:
        answer = [*forced, *generation.tokens.tolist()]
        parsed = self.chat_format.parse(answer, prompt[: len(prompt) - len(forced)], tools)
        calls = [
            msgspec.structs.replace(call, id=call.id or f"call_{turn.request_id}_{index}")
            for index, call in enumerate(parsed.calls)
        ]
        return Answer(
            request_id=turn.request_id,
            text=parsed.text,
            content=without_stop(parsed.content, stops) if generation.stop == "stop" else parsed.content,
            reasoning=parsed.reasoning,
            calls=tuple(calls),
            stop=generation.stop,
            prompt_tokens=len(prompt),
            tokens=_read_only(generation.tokens),
            logprobs=_read_only(generation.logprobs),
            versions=_read_only(generation.versions),
            prompt_ids=_read_only(prompt),
        )


def without_stop(content: str, stops: Sequence[str]) -> str:
    """Remove the stop string that ended the answer from its content, as the OpenAI protocol requires."""
    ends = [stop for stop in stops if content.endswith(stop)]
    return content.removesuffix(max(ends, key=len)) if ends else content


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a read-only view, or the array itself if it is read-only, as arrays from an engine's process are."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


class _ConversationState(msgspec.Struct, frozen=True):
    """State of a conversation: `turn` is its last answer, `pending` the tokens observed since. `plain` means that it
    contains text outside the chat template."""

    turn: Turn | None = None
    pending: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: Sequence[Schema] = ()
    plain: bool = False
    source: str = OBSERVATION  # origin of the pending tokens


class Conversation:
    """One growing chat with the policy.

    A conversation allows one request at a time; several conversations of an episode can run concurrently. A failed
    request leaves the conversation unchanged, so it can be repeated."""

    def __init__(self, sampler: TurnSampler, role: str) -> None:
        self._sampler = sampler
        self.role = role
        self._state = _ConversationState()
        self._sampling = False
        self.newest: Answer | None = None

    @property
    def stop(self) -> StopReason:
        """Stop reason of the newest answer."""
        return "stop" if self.newest is None else self.newest.stop

    async def sample(
        self, prompt: str | list[Message] | None = None, *, tools: Sequence[Schema] = (), **overrides: Any
    ) -> str:
        """Sample an answer to `prompt`, or continue the sequence as it is if there is no prompt.

        The first prompt starts the sequence and may pass `tools`; later prompts are appended with the chat template.
        `overrides` are fields of `Sampling`; in training, temperature, top_p and top_k cannot be changed."""
        self._refuse_while_sampling()
        request = self._sampler.reserve(overrides)
        self._sampling = True
        try:
            await yield_to_loop()
            state = self._state if prompt is None else self._with_prompt(prompt, tools)
            turn, answer = await self._sampler.sample_turn(
                request, state.turn, state.pending, self.role, state.tools, source=state.source
            )
        finally:
            self._sampling = False
        messages = (*state.messages, answer.message)
        self._state = msgspec.structs.replace(state, turn=turn, pending=(), messages=messages, source=OBSERVATION)
        self.newest = answer
        return answer.text

    def observe(self, text: str) -> None:
        """Append text verbatim that the policy did not sample."""
        self._refuse_while_sampling()
        pending = (*self._state.pending, *self._sampler.chat_format.encode(text))
        self._state = msgspec.structs.replace(self._state, pending=pending, plain=True)

    def trajectory(self) -> Trajectory:
        """Return the sequence so far."""
        return self._sampler.branch(self._state.turn, self._state.pending, self.role)

    def _with_prompt(self, prompt: str | list[Message], tools: Sequence[Schema]) -> _ConversationState:
        state = self._state
        if state.turn is None and not state.pending:
            if isinstance(prompt, str) and self._sampler.verbatim and not tools:
                opening = self._sampler.chat_format.encode(prompt, opens=True)
                return _ConversationState(None, tuple(opening), plain=True, source=PROMPT)
            messages = as_messages(prompt, self._sampler.system)
            opening = self._sampler.conversations.opening(messages, tools)
            return _ConversationState(None, tuple(opening), tuple(messages), tools, source=PROMPT)
        if state.turn is not None and state.messages and not tools:
            return self._continued(state, state.turn, as_messages(prompt))
        raise RequestFailed("a prompt must start a conversation or follow an answer; only the first may pass tools")

    def _continued(self, state: _ConversationState, turn: Turn, new: list[Message]) -> _ConversationState:
        *before, answered = state.messages
        context = [placeholder_for(message) for message in before]
        found = render_continuation(self._sampler.chat_format, turn, state.pending, context, answered, new, state.tools)
        messages = (*state.messages, *new)
        if found is not None:
            pending = (*state.pending, *found.ids)
            return msgspec.structs.replace(state, pending=pending, messages=messages, source=role_names(new))
        if state.plain:
            raise RequestFailed("the conversation cannot be continued exactly, nor rendered again after observe()")
        opening = self._sampler.conversations.reopening(messages, state.tools)
        return msgspec.structs.replace(state, turn=None, pending=tuple(opening), messages=messages, source=PROMPT)

    def _refuse_while_sampling(self) -> None:
        if self._sampling:
            raise RequestFailed("a request is still running; a conversation allows one request at a time")
