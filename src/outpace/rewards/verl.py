"""Reward functions of verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, once per answer.

A function that names `solution_str` and `ground_truth`, but not `completions`, counts as one. Its arguments come from
the columns of a verl dataset: `data_source`, `reward_model` (with `ground_truth`) and `extra_info`, to which verl adds
`num_turns` and `rollout_reward_scores`. It returns a number, or a dict whose `score` is the reward and whose other
numbers become metrics, `episode/KEY`.

`per_answer` wraps such a function in TRL's signature, for groups of one. Grading calls it once per answer, so answers
are graded concurrently and each has the full `rewards.timeout_s`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from numbers import Real
from typing import Any

import numpy as np

from outpace.monitoring.metric_table import log_metric
from outpace.rewards.functions import is_async
from outpace.runtime.references import accepted_parameters, named_parameters

_NOT_IN_NAMES = re.compile(r"[^\w.:@+-]+")


def per_answer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of verl in TRL's signature; return any other function unchanged."""
    named = named_parameters(function, ("solution_str", "ground_truth", "completions"))
    if named != {"solution_str", "ground_truth"}:
        return function
    return AsyncComputeScore(function) if is_async(function) else ComputeScore(function)


class ComputeScore:
    """A reward function of verl, for one answer at a time. Every argument is a list of one value."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        data_source: Sequence[Any],
        reward_model: Sequence[Any],
        extra_info: Sequence[Any] = (None,),
    ) -> Any:
        return [_score(self._call(completions[0], data_source[0], reward_model[0], extra_info[0]))]

    def _call(self, completion: Any, data_source: Any, reward_model: Any, extra_info: Any) -> Any:
        arguments = {
            "data_source": data_source,
            "solution_str": _text(completion),
            "ground_truth": reward_model["ground_truth"],
            "extra_info": {**(extra_info or {}), "num_turns": _turns(completion), "rollout_reward_scores": {}},
        }
        return self._function(**{name: arguments[name] for name in accepted_parameters(self._function, arguments)})


class AsyncComputeScore(ComputeScore):
    """An async reward function of verl."""

    async def __call__(
        self,
        completions: Sequence[Any],
        *,
        data_source: Sequence[Any],
        reward_model: Sequence[Any],
        extra_info: Sequence[Any] = (None,),
    ) -> Any:
        return [_score(await self._call(completions[0], data_source[0], reward_model[0], extra_info[0]))]


def _text(completion: Any) -> str:
    """Return the text of all messages after the prompt."""
    if isinstance(completion, str):
        return completion
    parts = (message.get(key) for message in completion for key in ("reasoning_content", "content"))
    return "\n".join(part for part in parts if isinstance(part, str) and part)


def _turns(completion: Any) -> int:
    """Return the number of turns, including the prompt. Consecutive tool results are one turn."""
    if isinstance(completion, str):
        return 2
    return 1 + sum(1 for _ in groupby(completion, lambda message: bool(message.get("role") == "assistant")))


def _score(returned: Any) -> Any:
    """Return the score, and report the other numbers of a dict."""
    if not isinstance(returned, Mapping):
        return returned
    if "score" not in returned:
        raise ValueError(f"the returned dict has no score; it has {', '.join(map(str, returned)) or 'nothing'}")
    for key, value in returned.items():
        name = _NOT_IN_NAMES.sub("_", str(key)).strip("_/")
        if key != "score" and name and isinstance(value, Real | np.bool_):
            log_metric(f"episode/{name}", float(value))
    return returned["score"]
