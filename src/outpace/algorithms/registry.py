"""Registries for policy losses, advantage estimators, batch normalizers and masks.

Each is one function with one decorator. Its keyword-only arguments are its settings: a function that the config
chooses adds them to its section (`[policy_loss]`, `[advantage]` or `[correction]`), with their types and defaults.

    @policy_loss(old_policies=("rollout",))  # or, with the defaults: @policy_loss
    def my_loss(tokens: Tokens, *, sharpness: float = 3.0) -> Tensor: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, overload

from outpace.errors import BadInput
from outpace.runtime.registry import Registry

OldPolicy = Literal["recomputed", "rollout", "interpolated"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
Credit = Literal["episode", "turn", "token"]
Scope = Literal["token", "sequence", "batch"]

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
class MaskRegistration(Registration):
    """A mask. `scope` is what the decision about a token depends on. Batch masks run on the complete batch and take
    numpy arrays: `f(log_rho_N, *, settings)`. The others take the tokens of one pass."""

    scope: Scope = "token"


@dataclass(frozen=True)
class ConfiguredFunction(Generic[T]):
    """A registered function bound to the keyword arguments that the config sets."""

    registration: T
    settings: Mapping[str, Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.registration.function(*arguments, **self.settings)


class FunctionRegistry(Registry):
    """Registry of functions with settings, by function name or alias. `kind` is the type of their registrations."""

    def __init__(
        self, kind: type[Registration], word: str, setting: str, decorator: str, group: str, signature: str
    ) -> None:
        super().__init__(word, (setting,), decorator, group, signature)
        self.kind = kind

    def decorate(self, function: F | None, options: Mapping[str, Any], allowed: Any) -> F | Callable[[F], F]:
        """Register a function, or return a decorator that does. `allowed` is the type of the options."""
        for name in options:
            if name not in allowed.__annotations__:
                raise TypeError(f"{self.decorator}() got an unexpected keyword argument {name!r}")
        add: Callable[[F], F] = self.with_options(**options)
        return add if function is None else add(function)

    def with_options(self, **options: Any) -> Callable[[F], F]:
        """Return a decorator that registers a function. `options` are the fields of `kind`."""

        def add(function: F) -> F:
            entry = self.kind(function, _parameters(function), **options)
            setattr(function, REGISTRATION_ATTRIBUTE, entry)
            if function.__module__.startswith("outpace."):
                self.built_in[entry.name] = entry
            else:
                self.add(entry.name, entry)
            return function

        return add

    def accept(self, loaded: Any, context: str) -> Any:
        found = getattr(loaded, REGISTRATION_ATTRIBUTE, None)
        if isinstance(found, self.kind):
            return found
        for other in (POLICY_LOSSES, ADVANTAGES, NORMALIZERS, MASKS):
            if isinstance(found, other.kind):
                raise BadInput(f"{context} is {other.word}, not {self.word}")
        raise BadInput(f"{context} is not registered; decorate it with @outpace.{self.decorator}")

    def code_of(self, component: Any) -> Any:
        return component.function


POLICY_LOSSES = FunctionRegistry(
    PolicyLossRegistration,
    "a policy loss",
    "policy_loss.name",
    "policy_loss",
    "outpace.losses",
    "f(tokens, *, settings) -> one loss per token",
)
ADVANTAGES = FunctionRegistry(
    AdvantageRegistration,
    "an advantage estimator",
    "advantage.name",
    "advantage",
    "outpace.advantages",
    "f(group, *, settings) -> one advantage per attempt",
)
NORMALIZERS = FunctionRegistry(
    NormalizerRegistration,
    "a batch normalizer",
    "advantage.normalizer",
    "normalizer",
    "outpace.normalizers",
    "f(batch, *, settings) -> normalized advantages, one array per row",
)
MASKS = FunctionRegistry(
    MaskRegistration,
    "a mask",
    "correction.masks",
    "mask",
    "outpace.masks",
    "f(tokens, log_rho_N, *, settings) -> which tokens are kept",
)


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


class MaskOptions(TypedDict, total=False):
    """Arguments of `mask`: see `MaskRegistration`."""

    scope: Scope


@overload
def mask(function: F, /) -> F: ...
@overload
def mask(**options: Unpack[MaskOptions]) -> Callable[[F], F]: ...
def mask(function: Any = None, /, **options: Any) -> Any:
    """Register a mask: `f(tokens: Tokens, log_rho_N, *, settings…) -> which tokens are kept`."""
    return MASKS.decorate(function, options, MaskOptions)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only arguments. Each needs a default, because the config may not set it."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for keyword in keywords:
        if keyword.default is keyword.empty:
            raise TypeError(f"{function.__name__}: keyword-only argument {keyword.name} needs a default")
    return {keyword.name: keyword.default for keyword in keywords}
