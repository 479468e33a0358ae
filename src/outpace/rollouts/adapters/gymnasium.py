"""Gymnasium environments with text actions: one tool, `act`; the reward is the sum of step rewards.

    reset(seed) ─▶ observation as text ─▶ act("right") ─▶ observation as text ─▶ … ─▶ get_reward()

Observations: a `Text` space is passed as is; otherwise the environment is rendered as "ansi" if it can be, else
converted with `str`. Actions: text, or one of a discrete set, by number or by name.

Invariants
- Actions are validated against the action space before the environment sees them.
- No step after the end: the tool replies that the episode is over.
- The gymnasium environment is closed when its instance is released, after the last episode that uses it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from outpace.errors import BadInput

EPISODE_OVER = "The episode is over."

_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def text_environment(
    make: str | Callable[..., Any],
    *,
    actions: Sequence[str] | None = None,
    describe: Callable[[Any], str] | None = None,
    **options: Any,
) -> type[Any]:
    """Return a class for `rollout.environment` from a gymnasium id or a function that creates the environment.

    `actions` names the actions of a discrete space, in order. `describe` turns an observation into text. `options` are
    passed to `gymnasium.make` or to the function. One environment is created here to inspect its spaces."""
    maker = _maker(make, options)
    probe = maker()
    try:
        names = _action_names(probe, actions)
        if describe is None and _renders_as_text(probe):
            maker = _maker(make, {"render_mode": "ansi", **options})
    finally:
        probe.close()
    form = f"one of {', '.join(names)}, or its number" if names else "as text"

    class GymnasiumText(_GymnasiumEpisode):
        _maker, _names, _describe = staticmethod(maker), names, staticmethod(describe) if describe else None

        def act(self, action: str) -> str:
            return self._act(action)

    GymnasiumText.act.__doc__ = f"Take one action.\n\nArgs:\n    action: the action, {form}."
    return GymnasiumText


class _GymnasiumEpisode:
    """One episode in one environment."""

    _maker: Callable[[], Any]
    _names: list[str]
    _describe: Callable[[Any], str] | None

    def __init__(self) -> None:
        self._env = type(self)._maker()
        # Close with the instance: it has no `close` method, because that may be the name of a tool.
        weakref.finalize(self, self._env.close)
        self._reward = 0.0
        self._over = True

    def reset(self, seed: int | None = None, **columns: Any) -> str:
        """Reset the environment. With a task column `seed`, all attempts of a group start in the same state."""
        observation, _ = self._env.reset(seed=seed)
        self._reward, self._over = 0.0, False
        return self._as_text(observation)

    def get_reward(self) -> float:
        return self._reward

    def _act(self, action: str) -> str:
        if self._over:
            return EPISODE_OVER
        observation, reward, terminated, truncated, _ = self._env.step(self._parsed(action))
        self._reward += float(reward)
        self._over = bool(terminated or truncated)
        text = self._as_text(observation)
        return f"{text}\n{EPISODE_OVER}" if self._over else text

    def _parsed(self, action: str) -> Any:
        space = self._env.action_space
        if not hasattr(space, "n"):
            parsed: Any = action
        elif action.strip().lower() in self._names:
            parsed = int(space.start) + self._names.index(action.strip().lower())
        else:
            parsed = int(action) if action.strip().lstrip("+-").isdecimal() else None
        if parsed is None or not space.contains(parsed):
            allowed = ", ".join(self._names) or str(space)
            raise ValueError(f"{action!r} is not a valid action; valid actions: {allowed}")
        return parsed

    def _as_text(self, observation: Any) -> str:
        if self._describe is not None:
            return self._describe(observation)
        if getattr(self._env, "render_mode", None) == "ansi":
            return without_escapes(str(self._env.render()))
        return str(observation)


def without_escapes(drawn: str) -> str:
    """Remove ANSI escapes from a terminal rendering; highlighted text is put in square brackets."""
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
        raise BadInput("rollout.environment: requires gymnasium: pip install 'outpace[gymnasium]'") from None
    return package


def _renders_as_text(game: Any) -> bool:
    spaces = gymnasium().spaces
    return not isinstance(game.observation_space, spaces.Text) and "ansi" in game.metadata.get("render_modes", ())


def _action_names(game: Any, given: Sequence[str] | None) -> list[str]:
    """Return lowercase action names of a discrete space; empty if actions are text or have no names."""
    spaces, space = gymnasium().spaces, game.action_space
    if not isinstance(space, spaces.Discrete | spaces.Text):
        raise BadInput(f"rollout.environment: action space {space} is not supported; use Discrete or Text")
    if given is None:
        meanings = getattr(game.unwrapped, "get_action_meanings", None)
        given = meanings() if meanings is not None else ()
    if given and (not isinstance(space, spaces.Discrete) or len(given) != space.n):
        raise BadInput(f"rollout.environment: {len(given)} action names do not match {space}")
    return [str(name).lower() for name in given]
