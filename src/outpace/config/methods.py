"""MERGED"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import pydantic

from outpace.algorithms.catalogue import ADVANTAGES, NORMALISERS, SURROGATES
from outpace.algorithms.corrections import MASKS, MaskFacts
from outpace.algorithms.registry import (
    AdvantageFacts,
    Aggregation,
    Anchor,
    Credit,
    Facts,
    NormaliserFacts,
    Registry,
    SurrogateFacts,
)
from outpace.config.algorithm import AlgorithmConfig, CorrectionConfig
from outpace.errors import BadInput, one_line

if TYPE_CHECKING:
    from outpace.config import Config

DEFAULT_SURROGATE = "truncated_is"
DEFAULT_ADVANTAGE = "dr_grpo"

CHOICES = ("preset", "surrogate", "advantage", "normalise", "credit", "anchor", "aggregation")
PARAMETERS = tuple(
    key for key, info in AlgorithmConfig.model_fields.items() if info.default is None and key not in CHOICES
)
"""Keys of `[algorithm]` that a function may take as keyword-only arguments."""

T = TypeVar("T", bound=Facts, covariant=True)
F = TypeVar("F", bound=Facts)


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """A registered function bound to the keyword arguments that the config sets."""

    facts: T
    settings: dict[str, Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.facts.function(*arguments, **self.settings)


def chosen_surrogate(config: AlgorithmConfig) -> Chosen[SurrogateFacts]:
    return _bind(_lookup(SURROGATES, config.surrogate or DEFAULT_SURROGATE), config)


def chosen_advantage(config: AlgorithmConfig) -> Chosen[AdvantageFacts]:
    return _bind(_lookup(ADVANTAGES, config.advantage or DEFAULT_ADVANTAGE), config)


def chosen_normaliser(config: AlgorithmConfig) -> Chosen[NormaliserFacts]:
    return _bind(_lookup(NORMALISERS, config.normalise or chosen_advantage(config).facts.normalise), config)


def chosen_masks(config: CorrectionConfig) -> dict[str, Chosen[MaskFacts]]:
    """Return every configured mask by name, both per-sequence and whole-batch masks: see `registration.scope`."""
    return {name: _bind(MASKS[name], config) for name in config.masks or []}


def _bind(facts: F, config: AlgorithmConfig | CorrectionConfig) -> Chosen[F]:
    given = {name: getattr(config, name) for name in facts.parameters}
    return Chosen(facts, {name: facts.parameters[name] if value is None else value for name, value in given.items()})


def _lookup(registry: Registry, name: str) -> Any:
    """Return the registration of `name`, after checking a user's own. The name may hold line breaks, so the error is
    reduced to one line."""
    try:
        facts = registry.find(name)
    except BadInput as error:
        raise BadInput(one_line(error, limit=600)) from error
    if name not in registry.built_in:
        _check_parameters(facts, registry.setting)
        for problem in _decorator_problems(facts):
            raise BadInput(f"{registry.setting}: {facts.name} {problem}")
    return facts


def _check_parameters(facts: Facts, setting: str) -> None:
    """Check that a user's function takes only existing settings, and that its defaults are valid values of them."""
    for name, default in facts.parameters.items():
        if name not in PARAMETERS:
            raise BadInput(
                f"{setting}: {facts.name} takes {name}, which is not a setting of [algorithm]; "
                f"rename it to one of {', '.join(PARAMETERS)}, or make it a constant"
            )
        try:
            AlgorithmConfig.model_validate({name: default})
        except pydantic.ValidationError:
            raise BadInput(
                f"{setting}: {facts.name} has the default {name} = {one_line(repr(default), limit=60)}, "
                f"which is not a valid value of algorithm.{name}; change the default"
            ) from None


def _decorator_problems(facts: Facts) -> Iterator[str]:
    """Yield what is wrong with the arguments of a user's decorator, which does not check types when it runs."""
    if isinstance(facts, SurrogateFacts):
        yield from _name_problems("anchors", facts.anchors, get_args(Anchor), needed=True)
        yield from _name_problems("masks", facts.masks, tuple(MASKS))
        yield from _name_problems("aggregation", (facts.aggregation,), get_args(Aggregation))
    if isinstance(facts, AdvantageFacts):
        yield from _name_problems("credits", facts.credits, get_args(Credit), needed=True)
        if "token" in facts.credits and not facts.additive:
            yield (
                'lists "token" in credits, which requires an advantage of the form return minus baseline; '
                'set additive=True if it has this form, or remove "token"'
            )


def _name_problems(argument: str, given: Any, known: tuple[str, ...], *, needed: bool = False) -> Iterator[str]:
    if not isinstance(given, tuple | list):
        yield f"has {argument} = {one_line(repr(given), limit=60)}; give a tuple of {', '.join(known)}"
        return
    if needed and not given:
        yield f"has an empty {argument}; give at least one of {', '.join(known)}"
    for name in given:
        if name not in known:
            yield f"has an unknown value in {argument}: {one_line(repr(name), limit=60)}; use {', '.join(known)}"


def closed_batch_reasons(config: Config) -> Iterator[str]:
    """Yield the reasons why the learner needs the complete batch before it can start; none if it can stream."""
    algorithm = config.algorithm
    if (estimator := chosen_advantage(algorithm).facts).critic:
        yield f"the advantage estimator {estimator.name} needs the values of the whole batch"
    if (normalizer := chosen_normaliser(algorithm).facts) is not NORMALISERS.find("none"):
        yield f"the normalizer {normalizer.name} needs statistics of the whole batch"
    if algorithm.updates * algorithm.passes > 1:
        yield "several updates per batch need the whole batch"
    for name, mask in chosen_masks(config.correction).items():
        if mask.facts.scope == "batch":
            yield f"the mask {name} needs the tokens of the whole batch"
    if config.kl.coefficient > 0 and config.kl.place == "reward":
        yield 'kl.place = "reward" changes rewards before advantages are computed'
