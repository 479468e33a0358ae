"""Protocol between a program under test and its asserts, each in its own sandbox. Both ends are in this script.

    tests ── get name · call · item · next … ──▶ program          plain data only, both ways
          ◀── value, or a reference to an object that stays in the program ──

Uses only the standard library. Runs as `program.py serve FD` (the program) and `program.py ask FD` (the tests, which
are read from stdin). The score comes from the tests' process: it exits with 0 if all tests passed, and with
EXIT_PROGRAM_UNUSED if they never used a name of the program. No object of the program ever enters that process, so the
program cannot read the tests, patch what they use, end their process, or return an object that equals everything.

Invariants
- Plain data: None, booleans, numbers, text, bytes, and lists, tuples, sets and dicts of these; exactly these types, no
  subclasses.
- Any other object stays in the program. The tests hold a `RemoteObject`, whose operations run in the program.
- The program never receives the value that one of its objects is compared with: a `RemoteObject` never equals plain
  data and supports no ordering or arithmetic with it; `in` iterates. Operations between two objects of the program run
  in the program.
- A name that the tests do not define is the Python builtin if there is one, else the program's. In the reverse order, a
  program could define its own `abs` or `sorted`.
- Data from the program is decoded by hand; its exceptions become the nearest builtin exception type.
"""

from __future__ import annotations

import builtins
import json
import operator
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import ExecutionLoader
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import Any

EXIT_PROGRAM_UNUSED = 113
"""Exit code of the tests' process if they never used a name of the program."""
MAX_LINE, MAX_DEPTH = 1 << 24, 64
DECODERS: dict[str, Any] = {"int": lambda text: int(text, 16), "float": float, "complex": complex}
DECODERS["bytes"] = bytes.fromhex
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class NotPlainData(Exception):
    """A value that cannot be sent: not plain data."""


# ---------------------------------------------------------------------------------------------------------- plain data


def encode(value: Any, keep: Any = None, depth: int = 0) -> Any:
    """Encode `value` as JSON with explicit types. Objects that are not plain data go through `keep`; without it they
    raise `NotPlainData`."""
    if depth > MAX_DEPTH:
        raise NotPlainData("nested too deeply")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind in (float, complex):
        return {kind.__name__: repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind.__name__ in CONTAINERS and CONTAINERS[kind.__name__] is kind:
        return {kind.__name__: [encode(each, keep, depth + 1) for each in value]}
    if kind is dict:
        return {"dict": [[encode(part, keep, depth + 1) for part in pair] for pair in value.items()]}
    if isinstance(value, RemoteObject):
        return {"kept": object.__getattribute__(value, "_number")}
    if keep is None:
        raise NotPlainData(f"a {kind.__name__} cannot be passed to the program; only plain data can")
    return {"kept": keep(value)}


def decode(data: Any, resolve: Any) -> Any:
    """Decode the output of `encode`. `resolve` maps an object number to its object or `RemoteObject` on this side."""
    if data is None or isinstance(data, bool | str):
        return data
    ((kind, body),) = data.items()
    if kind in DECODERS:
        return DECODERS[kind](body)
    if kind in CONTAINERS:
        return CONTAINERS[kind](decode(each, resolve) for each in body)
    if kind == "dict":
        return {decode(key, resolve): decode(value, resolve) for key, value in body}
    if kind == "kept":
        return resolve(int(body))
    raise NotPlainData(f"unknown type {kind}")


class JsonLines:
    """JSON lines over an inherited socket."""

    def __init__(self, descriptor: int) -> None:
        self._file = socket.socket(fileno=descriptor).makefile("rwb")

    def send(self, message: Any) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self) -> Any:
        line = self._file.readline(MAX_LINE)
        if line.endswith(b"\n"):
            return json.loads(line)
        raise EOFError("the other side has exited")


# --------------------------------------------------------------------------------------------------------- the program


def serve(channel: JsonLines) -> None:
    """Run the program, then execute requests of the tests. Objects that are not plain data are stored here."""
    store: list[Any] = []

    def keep(value: Any) -> int:
        store.append(value)
        return len(store) - 1

    names, failure = run_program()
    while True:
        what, *given = channel.receive()
        try:
            if failure is not None:
                raise failure
            arguments = decode(given[0], store.__getitem__)
            value = names[arguments[0]] if what == "name" else OPERATIONS[what](*arguments)
            channel.send({"value": encode(value, keep), "arguments": encode(arguments, keep)})
        except Exception as error:  # any exception is reported to the tests
            channel.send({"error": [kind.__name__ for kind in type(error).__mro__], "given": _error_arguments(error)})


def run_program() -> tuple[dict[str, Any], Exception | None]:
    """Return the names that the program defines, or its failure, which is raised at the first request."""
    try:
        return vars(run_module("answer", Path("answer.py").read_bytes(), {"__file__": "answer.py"})), None
    except Exception as error:
        return {}, error


@dataclass
class SourceLoader(ExecutionLoader):
    """Module loader for source text; used only inside the sandbox."""

    source: bytes

    def get_source(self, fullname: str) -> str:
        return decode_source(self.source)

    def get_filename(self, fullname: str) -> str:
        return f"{fullname}.py"


def run_module(name: str, source: bytes, names: dict[str, Any]) -> ModuleType:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(names)
    SourceLoader(source).exec_module(module)
    return module


def _error_arguments(error: Exception) -> Any:
    """Encode the exception's arguments if they are plain data, else its text. Both may run code of the program."""
    for given in (lambda: list(error.args), lambda: [str(error)]):
        with suppress(Exception):
            return encode(given())
    return encode([])


# ----------------------------------------------------------------------------------------------------------- the tests


class RemoteObject:
    """Proxy for an object that stays in the program. Its own attributes `_number` and `_ask` shadow the object's."""

    def __init__(self, number: int, request: Any) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_ask", request)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __iter__(self) -> Iterator[Any]:
        steps = self._ask("iter", self)
        while True:
            try:
                yield steps._ask("next", steps)
            except StopIteration:
                return

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and bool(self._ask("isinstance", instance, self))


SINGLE_OBJECT: tuple[Callable[..., Any], ...] = (next, len, bool, int, float, str, repr, hash, abs, setattr, delattr)
SINGLE_OBJECT += (operator.getitem, operator.setitem, operator.delitem, operator.neg, operator.pos, operator.invert)
BINARY: tuple[str, ...] = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv", "floordiv")
BINARY += ("mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
"""Operators that work only between two objects of the program."""
OPERATIONS: dict[str, Callable[..., Any]] = {"getattr": getattr, "iter": iter, "isinstance": isinstance}
OPERATIONS["call"] = lambda target, arguments, named: target(*arguments, **named)
OPERATIONS |= {does.__name__: does for does in SINGLE_OBJECT} | {name: getattr(operator, name) for name in BINARY}


def _method(name: str) -> Callable[..., Any]:
    def method(self: RemoteObject, *given: Any) -> Any:
        if name in BINARY and not isinstance(given[0], RemoteObject):
            return NotImplemented
        return self._ask(name, self, *given)

    return method


for _name in (*(does.__name__ for does in SINGLE_OBJECT), *BINARY):
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _method(_name))


def make_requester(channel: JsonLines) -> Any:
    def request(what: str, *arguments: Any) -> Any:
        channel.send([what, encode(list(arguments))])
        answer = channel.receive()
        if "error" in answer:
            raise _make_error(answer["error"], decode(answer["given"], None))
        _copy_back(list(arguments), decode(answer["arguments"], lambda number: RemoteObject(number, request)))
        return decode(answer["value"], lambda number: RemoteObject(number, request))

    return request


def _make_error(kinds: list[str], given: list[Any]) -> Exception:
    """Build an exception with the original name, derived from the nearest builtin exception type."""
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if isinstance(found, type) and issubclass(found, Exception):
            own: type[Exception] = found if kind == kinds[0] else type(str(kinds[0]), (found,), {})
            try:
                return own(*given)
            except Exception:  # some constructors require specific arguments
                break
    return RuntimeError(f"{kinds[0]}: {given}")


def _copy_back(before: Any, after: Any) -> Any:
    """Copy changes that the program made to its arguments back into the tests' own lists, dicts and sets.

    Returns the updated original, or `after` if the value is immutable."""
    if isinstance(before, RemoteObject):
        return before
    if type(before) is not type(after) or not isinstance(before, list | dict | set):
        return after
    if isinstance(before, list):
        pairs = zip(before, after, strict=False)
        before[:] = [_copy_back(old, new) for old, new in pairs] + after[len(before) :]
        return before
    if isinstance(before, dict):
        after = {key: _copy_back(before[key], new) if key in before else new for key, new in after.items()}
    before.clear()
    before.update(after)
    return before


class TestGlobals(dict[str, Any]):
    """Builtins of the tests; any other name is looked up in the program."""

    def __init__(self, request: Any) -> None:
        super().__init__(vars(builtins))
        self._request = request
        self.program_used = False

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):  # dunder names never come from the program
            raise NameError(f"name {name!r} is not defined")
        self.program_used = True
        try:
            return self._request("name", name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


def run_tests(channel: JsonLines) -> None:
    names = TestGlobals(make_requester(channel))
    try:
        run_module("tests", sys.stdin.buffer.read(), {"__builtins__": names})
    except BaseException:  # including SystemExit
        if names.program_used:
            raise
        traceback.print_exc()
    if not names.program_used:
        sys.exit(EXIT_PROGRAM_UNUSED)


if __name__ == "__main__":
    {"serve": serve, "ask": run_tests}[sys.argv[1]](JsonLines(int(sys.argv[2])))
