"""Immutable messages, so that a recorded message always equals the one that was sent.

freeze(messages)   an immutable copy, at every depth
thaw(messages)     a copy of ordinary lists and dicts
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed; `dict(frozen)` is a copy that can."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a recorded message cannot be changed; change a copy")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


class FrozenList(tuple[Any, ...]):
    """A list that cannot be changed and is equal to lists of the same content. Slices and sums are new lists."""

    def __add__(self, other: Iterable[Any]) -> list[Any]:  # type: ignore[override]
        return [*self, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return list(found) if isinstance(index, slice) else found

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return FrozenDict({key: freeze(each) for key, each in value.items()})
    return FrozenList(map(freeze, value)) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: thaw(each) for key, each in value.items()}
    return [thaw(each) for each in value] if isinstance(value, list | tuple) else value
