"""Objects that a config names as text: `package.module:function` or `path/to/file.py:function`.

Importing runs the user's own code, so anything may go wrong; whatever does becomes a one-line `BadInput` that starts
with the setting. The current directory is importable, as it is for `python script.py` and `python -m`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.wording import with_article

FILE_MODULE = "outpace_file_"
"""How the name of a module begins that was loaded from a file; no other process can import it by that name."""


def is_reference(name: str) -> bool:
    return ":" in name


def absolute(reference: str) -> str:
    """The reference with the file in it, if one is, named from the root: it stays true in another directory."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{name}" if place.endswith(".py") and name else reference


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The names most like a misspelt one, whatever the case of its letters."""
    by_small = {name.lower(): name for name in known}
    return [by_small[close] for close in difflib.get_close_matches(word.lower(), by_small, n=count)]


def load_function(reference: str, setting: str) -> Callable[..., Any]:
    """The callable that `reference` names; `setting` is the dotted key it came from."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise BadInput(f"{setting}: {reference!r} should be package.module:function or path/to/file.py:function")
    if place == "__main__":  # in a child process that is another script
        raise BadInput(f"{setting}: {reference}: name the script's file: script.py:{name}")
    module = _module(place, f"{setting}: {reference}")
    value = getattr(module, name, None)
    if value is None:
        close = nearest(name, vars(module))
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
    # The boundary to the user's code: a module may raise anything at all while it is imported.
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
            raise BadInput(f"{context}: there is no module {missing}") from None
        raise  # the module is there, something that it imports is not


_importing: list[Path] = []  # files that are being imported


def refuse_while_importing() -> None:
    """Raise `BadInput` if a file that is being imported for one of its functions starts a run."""
    if _importing:
        raise BadInput(
            f'{_importing[-1]}: starts a run when it is imported; put that under `if __name__ == "__main__":`'
        )


def _from_file(file: Path, context: str) -> ModuleType:
    """A file is imported once; its name in `sys.modules` comes from where it lies."""
    path = file.expanduser().resolve()
    name = f"{FILE_MODULE}{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise BadInput(f"{context}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    _importing.append(file)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _importing.pop()
    return module
