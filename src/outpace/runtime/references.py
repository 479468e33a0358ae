"""References to user code in a config: `package.module:function` or `path/to/file.py:function`, and their parameters.

Importing runs the user's code, which may raise anything; every error becomes a one-line `BadInput` that starts with the
setting. The current directory is importable, as it is for `python script.py` and `python -m`.

Child processes import this module early, so it must stay light.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from outpace.errors import BadInput, one_line, with_article

FILE_MODULE = "outpace_file_"
"""Prefix of the names of modules loaded from a file. Other processes cannot import them by that name."""


def is_reference(name: str) -> bool:
    return ":" in name


def absolute_reference(reference: str) -> str:
    """Make the file path of a reference absolute, so that it stays valid in another working directory."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{name}" if place.endswith(".py") and name else reference


def closest_names(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the known names closest to a misspelled one, ignoring case."""
    by_lowercase = {name.lower(): name for name in known}
    return [by_lowercase[close] for close in difflib.get_close_matches(word.lower(), by_lowercase, n=count)]


def load_function(reference: str, setting: str) -> Callable[..., Any]:
    """Import the callable that `reference` names. `setting` is the dotted config key, for error messages."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise BadInput(f"{setting}: {reference!r} must be package.module:name or path/to/file.py:name")
    if place == "__main__":  # in a child process this is a different script
        raise BadInput(f"{setting}: {reference}: use the script's file name instead of __main__: script.py:{name}")
    module = _module(place, f"{setting}: {reference}")
    value = getattr(module, name, None)
    if value is None:
        close = closest_names(name, vars(module))
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BadInput(f"{setting}: {reference}: {place} has no {name}{hint}")
    if not callable(value):
        raise BadInput(f"{setting}: {reference}: {name} is {with_article(type(value).__name__)}, not a function")
    return value  # type: ignore[no-any-return]


def _module(place: str, context: str) -> ModuleType:
    try:
        return _from_file(Path(place), context) if place.endswith(".py") else _by_name(place, context)
    except BadInput:
        raise
    # User code: importing a module may raise anything.
    except (Exception, SystemExit) as error:
        raise BadInput(f"{context}: importing {place} raised {type(error).__name__}: {one_line(error)}") from error


def _by_name(name: str, context: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise BadInput(f"{context}: no module named {missing}; check the name and the working directory") from None
        raise  # the module exists; one of its own imports is missing


_importing: list[Path] = []  # files being imported


def refuse_while_importing() -> None:
    """Raise `BadInput` if a run is started by a file that is being imported for one of its functions."""
    if _importing:
        raise BadInput(
            f'{_importing[-1]}: the file starts a run when it is imported; move that under `if __name__ == "__main__":`'
        )


def _from_file(file: Path, context: str) -> ModuleType:
    """Import a file once. Its name in `sys.modules` is derived from its path."""
    path = file.expanduser().resolve()
    name = f"{FILE_MODULE}{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise BadInput(f"{context}: file {file} does not exist")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it executes: dataclasses and pickle look up their module by name
    _importing.append(file)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _importing.pop()
    return module


BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function, or None for C functions without a signature."""
    try:
        if function not in _known_parameters:
            _known_parameters[function] = _parameters(function)
        return _known_parameters[function]
    except TypeError:  # an object that is not hashable or allows no weak references
        return _parameters(function)


_known_parameters: WeakKeyDictionary[Callable[..., Any], list[inspect.Parameter] | None] = WeakKeyDictionary()
"""Parameters of functions: reading a signature takes longer than most reward functions."""


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None


def accepted_parameters(function: Callable[..., Any], names: Collection[str]) -> set[str]:
    """Return the names that the function accepts as arguments: all of them if it has `**kwargs`."""
    parameters = parameters_of(function)
    if parameters is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return set(names)
    return _keyword_names(parameters) & set(names)


def named_parameters(function: Callable[..., Any], names: Collection[str]) -> set[str]:
    """Return the names that are explicit parameters of the function."""
    return _keyword_names(parameters_of(function) or []) & set(names) if names else set()


def _keyword_names(parameters: list[inspect.Parameter]) -> set[str]:
    return {parameter.name for parameter in parameters if parameter.kind in BY_KEYWORD}
