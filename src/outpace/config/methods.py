"""What a config means: the functions it names, with the settings each of them takes, and what follows from the choice.

Works on resolved and unresolved configs alike: a key that is not set has the default of the function that takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

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
from outpace.config import Config
from outpace.config.algorithm import AlgorithmConfig, CorrectionConfig
from outpace.errors import BadInput, one_line

DEFAULT_SURROGATE = "truncated_is"
DEFAULT_ADVANTAGE = "dr_grpo"

CHOICES = ("preset", "surrogate", "advantage", "normalise", "credit", "anchor", "aggregation")
PARAMETERS = tuple(
    key for key, info in AlgorithmConfig.model_fields.items() if info.default is None and key not in CHOICES
)
"""The keys of `[algorithm]` that a function may take as keyword-only arguments."""

T = TypeVar("T", bound=Facts, covariant=True)
F = TypeVar("F", bound=Facts)


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """A registered function and the keyword arguments that the config gives it."""

    facts: T
    settings: dict[str, Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.facts.function(*arguments, **self.settings)


def chosen_surrogate(config: AlgorithmConfig) -> Chosen[SurrogateFacts]:
    return _chosen(_find(SURROGATES, config.surrogate or DEFAULT_SURROGATE), config)


def chosen_advantage(config: AlgorithmConfig) -> Chosen[AdvantageFacts]:
    return _chosen(_find(ADVANTAGES, config.advantage or DEFAULT_ADVANTAGE), config)


def chosen_normaliser(config: AlgorithmConfig) -> Chosen[NormaliserFacts]:
    return _chosen(_find(NORMALISERS, config.normalise or chosen_advantage(config).facts.normalise), config)


def chosen_masks(config: CorrectionConfig) -> dict[str, Chosen[MaskFacts]]:
    """Every mask that is named, those of the batch too: their facts say which is which."""
    return {name: _chosen(MASKS[name], config) for name in config.masks or []}


def _chosen(facts: F, config: AlgorithmConfig | CorrectionConfig) -> Chosen[F]:
    given = {name: getattr(config, name) for name in facts.parameters}
    return Chosen(facts, {name: facts.parameters[name] if value is None else value for name, value in given.items()})


def _find(registry: Registry, name: str) -> Any:
    """The registration of that name. What a user wrote may hold anything, so the complaint is made one line."""
    try:
        facts = registry.find(name)
    except BadInput as error:
        raise BadInput(one_line(error, limit=600)) from error
    if name not in registry.built_in:
        _check_parameters(facts, registry.setting)
        for complaint in _complaints(facts):
            raise BadInput(f"{registry.setting}: {facts.name} {complaint}")
    return facts


def _check_parameters(facts: Facts, setting: str) -> None:
    """A user's function asks for settings that exist, and its defaults are values that they may have."""
    for name, default in facts.parameters.items():
        if name not in PARAMETERS:
            raise BadInput(
                f"{setting}: {facts.name} takes {name}, which is no setting of algorithm; "
                f"name it after one of {', '.join(PARAMETERS)}, or make it a constant"
            )
        try:
            AlgorithmConfig.model_validate({name: default})
        except pydantic.ValidationError:
            raise BadInput(
                f"{setting}: {facts.name} has the default {name} = {one_line(repr(default), limit=60)}, "
                f"which algorithm.{name} does not allow"
            ) from None


def _complaints(facts: Facts) -> Iterator[str]:
    """What is wrong with the arguments of a user's decorator: types are not checked when it runs."""
    if isinstance(facts, SurrogateFacts):
        yield from _odd_names("anchors", facts.anchors, get_args(Anchor), needed=True)
        yield from _odd_names("masks", facts.masks, tuple(MASKS))
        yield from _odd_names("aggregation", (facts.aggregation,), get_args(Aggregation))
    if isinstance(facts, AdvantageFacts):
        yield from _odd_names("credits", facts.credits, get_args(Credit), needed=True)
        if "token" in facts.credits and not facts.additive:
            yield (
                'has "token" among its credits, which needs a return minus a baseline; '
                'declare additive=True if it is one, or drop "token"'
            )


def _odd_names(argument: str, given: Any, known: tuple[str, ...], *, needed: bool = False) -> Iterator[str]:
    if not isinstance(given, tuple | list):
        yield f"has {argument} = {one_line(repr(given), limit=60)}; give a tuple of {', '.join(known)}"
        return
    if needed and not given:
        yield f"has no {argument}; give at least one of {', '.join(known)}"
    for name in given:
        if name not in known:
            yield f"has {argument} of {one_line(repr(name), limit=60)}; there are {', '.join(known)}"


def closed_batch_reasons(config: Config) -> Iterator[str]:
    """Why the learner cannot start on a batch before it is closed, if there is a reason."""
    algorithm = config.algorithm
    if (estimator := chosen_advantage(algorithm).facts).critic:
        yield f"the estimator {estimator.name} takes values of the whole batch"
    if (normaliser := chosen_normaliser(algorithm).facts) is not NORMALISERS.find("none"):
        yield f"the normaliser {normaliser.name} takes statistics of the whole batch"
    if algorithm.updates * algorithm.passes > 1:
        yield "several updates with one batch need all of it"
    for name, mask in chosen_masks(config.correction).items():
        if mask.facts.scope == "batch":
            yield f"the mask {name} looks at the tokens of the whole batch"
    if config.kl.coefficient > 0 and config.kl.place == "reward":
        yield 'kl.place = "reward" changes rewards before advantages are made of them'
