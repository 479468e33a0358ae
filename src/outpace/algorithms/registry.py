"""What can be named in `[algorithm]`, and how a user adds to it.

A surrogate, an advantage estimator or a normaliser is one function and one decorator. Its keyword-only arguments are
settings of `[algorithm]`, with their defaults: the config fills them in, and refuses a setting that none of the chosen
functions takes. Whatever is not built in is named `package.module:function`, like a reward.

    @surrogate(anchors=("rollout",))
    def my_loss(tokens: Tokens, *, cap: float = 3.0) -> Tensor: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from outpace.errors import BadInput
from outpace.references import load_function

Anchor = Literal["proximal", "rollout", "approximate"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
Credit = Literal["episode", "turn", "token"]

F = TypeVar("F", bound=Callable[..., Any])

FACTS = "__outpace__"
"""The attribute by which a function carries its registration."""


@dataclass(frozen=True)
class Facts:
    """`parameters` are the settings that the function takes, with their defaults."""

    function: Callable[..., Any]
    parameters: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.function.__name__


@dataclass(frozen=True)
class SurrogateFacts(Facts):
    """`anchors`: to which policies its ratio may be taken; the first is the default. `masks`: what is rejected beside
    it unless the config says otherwise. `unbounded`: its weights have no upper bound, which is only safe near the
    policy that sampled."""

    anchors: tuple[Anchor, ...] = ("proximal", "rollout", "approximate")
    aggregation: Aggregation = "token_mean"
    masks: tuple[str, ...] = ()
    unbounded: bool = False


@dataclass(frozen=True)
class AdvantageFacts(Facts):
    """`normalise` is the batch-scope stage that follows unless the config says otherwise. `credits`: what its
    advantages may be for; the first is the default. `additive`: the advantage is the return minus a baseline, so a
    return of a part of the episode can take the place of the whole. `needs_peers`: a group of one gets nothing from it.
    `critic`: values are learned, and the learner makes the advantages. `parts`: it looks at the single rewards, not
    only at their sum."""

    normalise: str = "none"
    credits: tuple[Credit, ...] = ("episode", "turn")
    additive: bool = False
    needs_peers: bool = True
    critic: bool = False
    parts: bool = False


@dataclass(frozen=True)
class NormaliserFacts(Facts):
    """A stage over the whole batch: it waits until the batch is closed, however the groups streamed in."""


@dataclass(frozen=True)
class Registry:
    """The built-in functions of one kind. `setting` is where they are named."""

    kind: type[Facts]
    setting: str
    word: str
    built_in: dict[str, Facts] = field(default_factory=dict)

    def add(self, function: Callable[..., Any], **facts: Any) -> None:
        entry = self.kind(function, _parameters(function), **facts)
        setattr(function, FACTS, entry)
        if function.__module__.startswith("outpace."):
            self.built_in[entry.name] = entry

    def find(self, name: str) -> Any:
        """The registration of a built-in name or of `package.module:function`."""
        if name in self.built_in:
            return self.built_in[name]
        if ":" not in name:
            known = ", ".join(self.built_in)
            raise BadInput(
                f"{self.setting}: no {self.word} is called {name!r}; there are {known}, or name your own "
                "as package.module:function"
            )
        found = getattr(load_function(name, self.setting), FACTS, None)
        if not isinstance(found, self.kind):
            raise BadInput(f"{self.setting}: {name} is not registered; put @outpace.{self.decorator} above it")
        return found

    @property
    def decorator(self) -> str:
        return self.setting.rpartition(".")[2].replace("normalise", "normaliser")


SURROGATES = Registry(SurrogateFacts, "algorithm.surrogate", "surrogate")
ADVANTAGES = Registry(AdvantageFacts, "algorithm.advantage", "advantage estimator")
NORMALISERS = Registry(NormaliserFacts, "algorithm.normalise", "normaliser")


def surrogate(
    *,
    anchors: tuple[Anchor, ...] = ("proximal", "rollout", "approximate"),
    aggregation: Aggregation = "token_mean",
    masks: tuple[str, ...] = (),
    unbounded: bool = False,
) -> Callable[[F], F]:
    """Register `f(tokens: Tokens, *, settings…) -> loss per token`."""

    def register(function: F) -> F:
        SURROGATES.add(function, anchors=anchors, aggregation=aggregation, masks=masks, unbounded=unbounded)
        return function

    return register


def advantage(
    *,
    normalise: str = "none",
    credits: tuple[Credit, ...] = ("episode", "turn"),
    additive: bool = False,
    needs_peers: bool = True,
    critic: bool = False,
    parts: bool = False,
) -> Callable[[F], F]:
    """Register `f(peers: Peers, *, settings…) -> one advantage per attempt`."""

    def register(function: F) -> F:
        ADVANTAGES.add(
            function,
            normalise=normalise,
            credits=credits,
            additive=additive,
            needs_peers=needs_peers,
            critic=critic,
            parts=parts,
        )
        return function

    return register


def normaliser() -> Callable[[F], F]:
    """Register `f(batch: BatchSignal, *, settings…) -> advantages per token, one array per row`."""

    def register(function: F) -> F:
        NORMALISERS.add(function)
        return function

    return register


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments, which all need a default: a config may be silent."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for keyword in keywords:
        if keyword.default is keyword.empty:
            raise TypeError(f"{function.__name__}: the setting {keyword.name} needs a default")
    return {keyword.name: keyword.default for keyword in keywords}
