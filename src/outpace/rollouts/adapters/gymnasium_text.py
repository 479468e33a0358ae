"""Gymnasium environments that can be played in words: one tool, `act`, and the sum of the rewards.

    reset(seed) ─▶ observation as text ─▶ act("right") ─▶ observation as text ─▶ … ─▶ get_reward()

An observation is text when its space is `Text`; otherwise the environment is rendered as "ansi" where it can be, and
written as Python writes it where it cannot. An action is text, or one of a finite number, by number or by name.

Invariants
- What the policy writes is checked against the action space before the environment sees it.
- Nothing is stepped after the end: the tool says that the episode is over.
- A game is closed when its instance is let go: after the episode, or after the last one that reuses it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from outpace.errors import BadInput

OVER = "The episode is over."

_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def text_environment(
    make: str | Callable[..., Any],
    *,
    actions: Sequence[str] | None = None,
    describe: Callable[[Any], str] | None = None,
    **options: Any,
) -> type[Any]:
    """A class for `rollout.environment`, of the registered id or of what the function `make` returns.

    `actions` are the names of a finite number of actions, in order; `describe` turns an observation into text;
    `options` go to `gymnasium.make` or to the function. One environment is made here, to look at its spaces."""
    maker = _maker(make, options)
    probe = maker()
    try:
        names = _action_names(probe, actions)
        if describe is None and _can_be_drawn(probe):
            maker = _maker(make, {"render_mode": "ansi", **options})
    finally:
        probe.close()
    wanted = f"one of {', '.join(names)}, or its number" if names else "as text"

    class GymnasiumText(_Game):
        _maker, _names, _describe = staticmethod(maker), names, staticmethod(describe) if describe else None

        def act(self, action: str) -> str:
            return self._act(action)

    GymnasiumText.act.__doc__ = f"Take one action.\n\nArgs:\n    action: the action, {wanted}."
    return GymnasiumText


class _Game:
    """One episode in one environment."""

    _maker: Callable[[], Any]
    _names: list[str]
    _describe: Callable[[Any], str] | None

    def __init__(self) -> None:
        self._game = type(self)._maker()
        # With the instance: it has no `close`, which is a name that a tool may have. The game does not know us.
        weakref.finalize(self, self._game.close)
        self._reward = 0.0
        self._over = True

    def reset(self, seed: int | None = None, **columns: Any) -> str:
        """Tasks with the column `seed` start from the same state in all attempts of a group."""
        observation, _ = self._game.reset(seed=seed)
        self._reward, self._over = 0.0, False
        return self._as_text(observation)

    def get_reward(self) -> float:
        return self._reward

    def _act(self, action: str) -> str:
        if self._over:
            return OVER
        observation, reward, terminated, truncated, _ = self._game.step(self._parsed(action))
        self._reward += float(reward)
        self._over = bool(terminated or truncated)
        text = self._as_text(observation)
        return f"{text}\n{OVER}" if self._over else text

    def _parsed(self, action: str) -> Any:
        space = self._game.action_space
        if not hasattr(space, "n"):
            parsed: Any = action
        elif action.strip().lower() in self._names:
            parsed = int(space.start) + self._names.index(action.strip().lower())
        else:
            parsed = int(action) if action.strip().lstrip("+-").isdecimal() else None
        if parsed is None or not space.contains(parsed):
            allowed = ", ".join(self._names) or str(space)
            raise ValueError(f"{action!r} is no action; there are {allowed}")
        return parsed

    def _as_text(self, observation: Any) -> str:
        if self._describe is not None:
            return self._describe(observation)
        if getattr(self._game, "render_mode", None) == "ansi":
            return without_escapes(str(self._game.render()))
        return str(observation)


def without_escapes(drawn: str) -> str:
    """A drawing for terminals as plain text; what is highlighted stands in square brackets."""
    return _ESCAPE.sub("", _HIGHLIGHTED.sub(r"[\1]", drawn)).strip("\n")


def _maker(make: str | Callable[..., Any], options: dict[str, Any]) -> Callable[[], Any]:
    def made() -> Any:
        if callable(make):
            return make(**options)
        return gymnasium().make(make, **options)

    return made


def gymnasium() -> Any:
    try:
        import gymnasium as package
    except ImportError:
        raise BadInput("rollout.environment: this one needs gymnasium: pip install 'outpace[gymnasium]'") from None
    return package


def _can_be_drawn(game: Any) -> bool:
    spaces = gymnasium().spaces
    return not isinstance(game.observation_space, spaces.Text) and "ansi" in game.metadata.get("render_modes", ())


def _action_names(game: Any, given: Sequence[str] | None) -> list[str]:
    """Names in small letters, one for each of a finite number of actions; none where actions are text or numbers."""
    spaces, space = gymnasium().spaces, game.action_space
    if not isinstance(space, spaces.Discrete | spaces.Text):
        raise BadInput(f"rollout.environment: actions of {space} cannot be said in a word; Discrete and Text can")
    if given is None:
        meanings = getattr(game.unwrapped, "get_action_meanings", None)
        given = meanings() if meanings is not None else ()
    if given and (not isinstance(space, spaces.Discrete) or len(given) != space.n):
        raise BadInput(f"rollout.environment: {len(given)} names of actions do not fit {space}")
    return [str(name).lower() for name in given]
