"""What can be named in `[algorithm]`, and how a user adds to it.

A surrogate, an advantage estimator or a normaliser is one function and one decorator. Its keyword-only arguments are
settings of `[algorithm]`, with their defaults: the config fills them in, and refuses a setting that none of the chosen
functions takes. Whatever is not built in is named `package.module:function`, like a reward, or by its own name where
the program that trains has registered it.

    @surrogate(anchors=("rollout",))  # or, where the defaults fit: @surrogate
    def my_loss(tokens: Tokens, *, cap: float = 3.0) -> Tensor: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from outpace.errors import BadInput
from outpace.references import is_reference, load_function, nearest

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
    policy that sampled. `ratio`: whether it has one at all; without, corrections are from the current policy."""

    anchors: tuple[Anchor, ...] = ("proximal", "rollout", "approximate")
    aggregation: Aggregation = "token_mean"
    masks: tuple[str, ...] = ()
    unbounded: bool = False
    ratio: bool = True


@dataclass(frozen=True)
class AdvantageFacts(Facts):
    """`normalise` is the batch-scope stage that follows unless the config says otherwise. `credits`: what its
    advantages may be for; the first is the default. `additive`: the advantage is the return minus a baseline, so a
    return of a part of the episode can take the place of the whole. `needs_peers`: a group of one gets nothing from it.
    `critic`: values are learned, and the learner makes the advantages; it knows how for `gae` alone, so no user sets
    this. `parts`: it looks at the single rewards, not only at their sum."""

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
    """The functions of one kind, built in and the user's own. `setting` is where they are named, `word` what they are
    called."""

    kind: type[Facts]
    setting: str
    word: str
    built_in: dict[str, Facts] = field(default_factory=dict)
    own: dict[str, Facts] = field(default_factory=dict)

    def register(self, **facts: Any) -> Callable[[F], F]:
        """A decorator; `facts` are those of the kind."""

        def add(function: F) -> F:
            entry = self.kind(function, _parameters(function), **facts)
            setattr(function, FACTS, entry)
            known = self.built_in if function.__module__.startswith("outpace.") else self.own
            known[entry.name] = entry
            return function

        return add

    def find(self, name: str) -> Any:
        """The registration of a built-in name, of one that the program has registered, or of
        `package.module:function`."""
        if name in self.built_in:
            return self.built_in[name]
        if name in self.own:
            return self.own[name]
        if not is_reference(name):
            raise BadInput(f"{self.setting}: {self._why_unknown(name)}")
        found = getattr(load_function(name, self.setting), FACTS, None)
        if isinstance(found, self.kind):
            return found
        for other in REGISTRIES:
            if isinstance(found, other.kind):
                raise BadInput(f"{self.setting}: {name} is {other.word}, not {self.word}")
        raise BadInput(f"{self.setting}: {name} is not registered; put @outpace.{self.decorator} above it")

    def _why_unknown(self, name: str) -> str:
        for other in REGISTRIES:
            if name in other.built_in:
                return f"{name} is {other.word}, not {self.word}"
        if name.endswith(".py"):
            return f"name the function too: {name}:function"
        close = nearest(name, {**self.built_in, **self.own})
        known = f"there are {', '.join(self.built_in)}, or name your own as package.module:function"
        hint = f"did you mean {close[0]}?" if close else known
        return f"no {self.word.partition(' ')[2]} is called {name!r}; {hint}"

    @property
    def decorator(self) -> str:
        return self.setting.rpartition(".")[2].replace("normalise", "normaliser")


SURROGATES = Registry(SurrogateFacts, "algorithm.surrogate", "a surrogate")
ADVANTAGES = Registry(AdvantageFacts, "algorithm.advantage", "an advantage estimator")
NORMALISERS = Registry(NormaliserFacts, "algorithm.normalise", "a normaliser")
REGISTRIES = (SURROGATES, ADVANTAGES, NORMALISERS)


@overload
def surrogate(function: F, /) -> F: ...
@overload
def surrogate(
    *,
    anchors: tuple[Anchor, ...] = ...,
    aggregation: Aggregation = ...,
    masks: tuple[str, ...] = ...,
    unbounded: bool = ...,
    ratio: bool = ...,
) -> Callable[[F], F]: ...
def surrogate(
    function: F | None = None,
    /,
    *,
    anchors: tuple[Anchor, ...] = ("proximal", "rollout", "approximate"),
    aggregation: Aggregation = "token_mean",
    masks: tuple[str, ...] = (),
    unbounded: bool = False,
    ratio: bool = True,
) -> F | Callable[[F], F]:
    """Register `f(tokens: Tokens, *, settings…) -> loss per token`."""
    register: Callable[[F], F] = SURROGATES.register(
        anchors=anchors, aggregation=aggregation, masks=masks, unbounded=unbounded, ratio=ratio
    )
    return register if function is None else register(function)


@overload
def advantage(function: F, /) -> F: ...
@overload
def advantage(
    *,
    normalise: str = ...,
    credits: tuple[Credit, ...] = ...,
    additive: bool = ...,
    needs_peers: bool = ...,
    parts: bool = ...,
) -> Callable[[F], F]: ...
def advantage(
    function: F | None = None,
    /,
    *,
    normalise: str = "none",
    credits: tuple[Credit, ...] = ("episode", "turn"),
    additive: bool = False,
    needs_peers: bool = True,
    parts: bool = False,
) -> F | Callable[[F], F]:
    """Register `f(peers: Peers, *, settings…) -> one advantage per attempt`."""
    register: Callable[[F], F] = ADVANTAGES.register(
        normalise=normalise, credits=credits, additive=additive, needs_peers=needs_peers, parts=parts
    )
    return register if function is None else register(function)


@overload
def normaliser(function: F, /) -> F: ...
@overload
def normaliser() -> Callable[[F], F]: ...
def normaliser(function: F | None = None, /) -> F | Callable[[F], F]:
    """Register `f(batch: BatchSignal, *, settings…) -> advantages per token, one array per row`."""
    register: Callable[[F], F] = NORMALISERS.register()
    return register if function is None else register(function)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments, which all need a default: a config may be silent."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for keyword in keywords:
        if keyword.default is keyword.empty:
            raise TypeError(f"{function.__name__}: the setting {keyword.name} needs a default")
    return {keyword.name: keyword.default for keyword in keywords}
