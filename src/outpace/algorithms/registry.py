"""Registries for policy losses, advantage estimators and batch normalizers.

Each is one function with one decorator. Its keyword-only arguments are its settings: a function that the config
chooses adds them to its section (`[policy_loss]` or `[advantage]`), with their types and defaults. In the config, name
a built-in function by its name, any other by `package.module:function` (as for rewards), or by its own name if the
training program has registered it.

    @policy_loss(old_policies=("rollout",))  # or, with the defaults: @policy_loss
    def my_loss(tokens: Tokens, *, sharpness: float = 3.0) -> Tensor: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, overload

from outpace.errors import BadInput
from outpace.runtime.references import closest_names, is_reference, load_function

OldPolicy = Literal["recomputed", "rollout", "interpolated"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
Credit = Literal["episode", "turn", "token"]

F = TypeVar("F", bound=Callable[..., Any])

REGISTRATION_ATTRIBUTE = "__outpace__"
"""Attribute of a registered function that holds its registration."""


@dataclass(frozen=True)
class Registration:
    """A registered function. `parameters` are the settings it takes, with their defaults.

    `alias` is the name in the config if it differs from the function's."""

    function: Callable[..., Any]
    parameters: Mapping[str, Any]
    alias: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        return self.alias or self.function.__name__


T = TypeVar("T", bound=Registration, covariant=True)


@dataclass(frozen=True)
class PolicyLossRegistration(Registration):
    """A policy loss.

    - `old_policies`: values of `policy_loss.old_policy` it supports; first is default
    - `aggregation`: default of `policy_loss.aggregation`
    - `masks`: default of `correction.masks`
    - `unbounded`: importance weights have no upper bound, which is only safe close to the sampling policy
    - `ratio`: the loss uses current / old; if False, corrections use current / sampler"""

    old_policies: tuple[OldPolicy, ...] = ("recomputed", "rollout", "interpolated")
    aggregation: Aggregation = "token_mean"
    masks: tuple[str, ...] = ()
    unbounded: bool = False
    ratio: bool = True


@dataclass(frozen=True)
class AdvantageRegistration(Registration):
    """An advantage estimator.

    - `normalizer`: default of `advantage.normalizer`, the batch normalizer applied afterwards
    - `credits`: values of `advantage.credit` it supports; first is default
    - `additive`: the advantage is the return minus a baseline, so a token's return-to-go can replace the full return
    - `needs_peers`: compares attempts within the group; a group of one gets advantage 0
    - `critic`: uses learned values and is computed by the learner. Only implemented for `gae`, so not settable by users
    - `parts`: reads the individual rewards, not only their sum"""

    normalizer: str = "none"
    credits: tuple[Credit, ...] = ("episode", "turn")
    additive: bool = False
    needs_peers: bool = True
    critic: bool = False
    parts: bool = False


@dataclass(frozen=True)
class NormalizerRegistration(Registration):
    """A normalizer over the whole batch. It runs once all groups of the batch have arrived."""


@dataclass(frozen=True)
class ConfiguredFunction(Generic[T]):
    """A registered function bound to the keyword arguments that the config sets."""

    registration: T
    settings: Mapping[str, Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.registration.function(*arguments, **self.settings)


@dataclass(frozen=True)
class Registry:
    """Functions of one kind, built in or registered by the user.

    `setting` is the config key that names them, `word` their noun in messages, `decorator` their decorator in
    `outpace`."""

    kind: type[Registration]
    setting: str
    word: str
    decorator: str
    built_in: dict[str, Registration] = field(default_factory=dict)
    own: dict[str, Registration] = field(default_factory=dict)

    def register(self, **fields: Any) -> Callable[[F], F]:
        """Return a decorator that registers a function. `fields` are the fields of `kind`."""

        def add(function: F) -> F:
            entry = self.kind(function, _parameters(function), **fields)
            setattr(function, REGISTRATION_ATTRIBUTE, entry)
            known = self.built_in if function.__module__.startswith("outpace.") else self.own
            known[entry.name] = entry
            return function

        return add

    def decorate(self, function: F | None, options: Mapping[str, Any], allowed: Any) -> F | Callable[[F], F]:
        """Register a function, or return a decorator that does. `allowed` is the type of the options."""
        for name in options:
            if name not in allowed.__annotations__:
                raise TypeError(f"{self.decorator}() got an unexpected keyword argument {name!r}")
        register: Callable[[F], F] = self.register(**options)
        return register if function is None else register(function)

    def find(self, name: str) -> Any:
        """Return the registration of a built-in name, a registered name or `package.module:function`."""
        if name in self.built_in:
            return self.built_in[name]
        if name in self.own:
            return self.own[name]
        if not is_reference(name):
            raise BadInput(f"{self.setting}: {self._why_unknown(name)}")
        found = getattr(load_function(name, self.setting), REGISTRATION_ATTRIBUTE, None)
        if isinstance(found, self.kind):
            return found
        for other in REGISTRIES:
            if isinstance(found, other.kind):
                raise BadInput(f"{self.setting}: {name} is {other.word}, not {self.word}")
        raise BadInput(f"{self.setting}: {name} is not registered; decorate it with @outpace.{self.decorator}")

    def _why_unknown(self, name: str) -> str:
        for other in REGISTRIES:
            if name in other.built_in:
                return f"{name} is {other.word}, not {self.word}"
        if name.endswith(".py"):
            return f"{name} is a file; name the function in it, as {name}:function"
        close = closest_names(name, {**self.built_in, **self.own})
        known = f"use one of {', '.join(self.built_in)}, or package.module:function for your own"
        hint = f"did you mean {close[0]}?" if close else known
        return f"unknown {self.word.partition(' ')[2]} {name!r}; {hint}"


POLICY_LOSSES = Registry(PolicyLossRegistration, "policy_loss.name", "a policy loss", "policy_loss")
ADVANTAGES = Registry(AdvantageRegistration, "advantage.name", "an advantage estimator", "advantage")
NORMALIZERS = Registry(NormalizerRegistration, "advantage.normalizer", "a batch normalizer", "normalizer")
REGISTRIES = (POLICY_LOSSES, ADVANTAGES, NORMALIZERS)


class PolicyLossOptions(TypedDict, total=False):
    """Arguments of `policy_loss`: see `PolicyLossRegistration`."""

    old_policies: tuple[OldPolicy, ...]
    aggregation: Aggregation
    masks: tuple[str, ...]
    unbounded: bool
    ratio: bool


@overload
def policy_loss(function: F, /) -> F: ...
@overload
def policy_loss(**options: Unpack[PolicyLossOptions]) -> Callable[[F], F]: ...
def policy_loss(function: Any = None, /, **options: Any) -> Any:
    """Register a policy loss: `f(tokens: Tokens, *, settings…) -> loss per token`."""
    return POLICY_LOSSES.decorate(function, options, PolicyLossOptions)


class AdvantageOptions(TypedDict, total=False):
    """Arguments of `advantage`: see `AdvantageRegistration`."""

    normalizer: str
    credits: tuple[Credit, ...]
    additive: bool
    needs_peers: bool
    parts: bool


@overload
def advantage(function: F, /) -> F: ...
@overload
def advantage(**options: Unpack[AdvantageOptions]) -> Callable[[F], F]: ...
def advantage(function: Any = None, /, **options: Any) -> Any:
    """Register an advantage estimator: `f(group: GroupReturns, *, settings…) -> one advantage per attempt`."""
    return ADVANTAGES.decorate(function, options, AdvantageOptions)


@overload
def normalizer(function: F, /) -> F: ...
@overload
def normalizer() -> Callable[[F], F]: ...
def normalizer(function: Any = None, /) -> Any:
    """Register a normalizer: `f(batch: BatchAdvantages, *, settings…) -> per-token advantages, one array per row`."""
    return NORMALIZERS.decorate(function, {}, None)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only arguments. Each needs a default, because the config may not set it."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for keyword in keywords:
        if keyword.default is keyword.empty:
            raise TypeError(f"{function.__name__}: keyword-only argument {keyword.name} needs a default")
    return {keyword.name: keyword.default for keyword in keywords}
