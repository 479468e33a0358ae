"""Both ends of the conversation between a program under test and its tests: each runs in a sandbox of its own.

    tests ── get name · call · item · next … ──▶ program          plain data only, both ways
          ◀── value, or "something I keep for you" ──

A script of the standard library alone, run as `program.py serve FD` and `program.py ask FD`. The process of the tests
is what is judged: it ends with 0 if they all passed. No object of the program ever enters it, so the program can
neither read the tests, nor patch what they use, nor end their process, nor answer with something that equals
everything.

Invariants
- Plain are None, booleans, numbers, text, bytes, and lists, tuples, sets and dicts of these; of exactly these types.
- Anything else stays where it is: the tests hold a `Kept`, which can be called, indexed, iterated, asked for attributes
  and its length, and which equals nothing but itself.
- A name that the tests do not define is Python's own if there is one, else the program's.
- What comes from the program is decoded by hand; an exception is one of Python's own kinds or a RuntimeError.
"""

from __future__ import annotations

import builtins
import json
import runpy
import socket
import sys
from collections.abc import Iterator
from typing import Any

MAX_LINE = 1 << 24
MAX_DEPTH = 64
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Refused(Exception):
    """A value that does not travel."""


# ---------------------------------------------------------------------------------------------------------- plain data


def encode(value: Any, keep: Any = None, depth: int = 0) -> Any:
    """`value` as JSON with the types told apart; what is not plain goes through `keep`, or is `Refused`."""
    if depth > MAX_DEPTH:
        raise Refused("nested too deeply")
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
    if isinstance(value, Kept):
        return {"kept": object.__getattribute__(value, "_number")}
    if keep is None:
        raise Refused(f"a {kind.__name__} cannot be handed to the program; only plain data can")
    return {"kept": keep(value)}


def decode(data: Any, kept: Any) -> Any:
    """What `encode` made; `kept` turns a number into what stands for it on this side."""
    if data is None or isinstance(data, bool | str):
        return data
    ((kind, body),) = data.items()
    if kind == "int":
        return int(body, 16)
    if kind == "float":
        return float(body)
    if kind == "complex":
        return complex(body)
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind in CONTAINERS:
        return CONTAINERS[kind](decode(each, kept) for each in body)
    if kind == "dict":
        return {decode(key, kept): decode(value, kept) for key, value in body}
    if kind == "kept":
        return kept(int(body))
    raise Refused(f"there is no {kind}")


class Line:
    """JSON lines over an inherited socket."""

    def __init__(self, descriptor: int) -> None:
        self._file = socket.socket(fileno=descriptor).makefile("rwb")

    def send(self, message: Any) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self) -> Any:
        line = self._file.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise EOFError("the other side has ended")
        return json.loads(line)


# --------------------------------------------------------------------------------------------------------- the program


def serve(line: Line) -> None:
    """Run the program, then do what the tests ask, with everything that is not plain kept here."""
    store: list[Any] = []

    def keep(value: Any) -> int:
        store.append(value)
        return len(store) - 1

    names: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        names = runpy.run_path("answer.py", run_name="__main__")
    except Exception as error:  # told when the tests ask for the first name
        failure = error
    while True:
        what, *given = line.receive()
        try:
            if failure is not None:
                raise failure
            arguments = decode(given[0], store.__getitem__)
            value = _do(what, arguments, names)
            line.send({"value": encode(value, keep), "arguments": encode(arguments, keep)})
        except Exception as error:  # of whatever kind: it belongs to the tests
            line.send({"error": type(error).__name__, "text": _text(error)})


def _do(what: str, arguments: list[Any], names: dict[str, Any]) -> Any:
    target = arguments[0]
    if what == "name":
        return names[target]
    if what == "attribute":
        return getattr(target, arguments[1])
    if what == "call":
        return target(*arguments[1], **arguments[2])
    plain: dict[str, Any] = {"item": lambda: target[arguments[1]], "length": lambda: len(target)}
    plain |= {"iterate": lambda: iter(target), "next": lambda: next(target), "text": lambda: str(target)}
    return plain[what]()


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # the text of an exception is code of the program too
        return ""


# ----------------------------------------------------------------------------------------------------------- the tests


class Kept:
    """Something that stays with the program."""

    def __init__(self, number: int, ask: Any) -> None:
        self._number = number
        self._ask = ask

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self, key)

    def __len__(self) -> int:
        return int(self._ask("length", self))

    def __iter__(self) -> Iterator[Any]:
        steps = self._ask("iterate", self)
        while True:
            try:
                yield steps._ask("next", steps)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __str__(self) -> str:
        return str(self._ask("text", self))


def ask_over(line: Line) -> Any:
    def ask(what: str, *arguments: Any) -> Any:
        line.send([what, encode(list(arguments))])
        answer = line.receive()
        if "error" in answer:
            raise _error(str(answer["error"]), str(answer["text"]))
        after = decode(answer["arguments"], lambda number: Kept(number, ask))
        _take_over(list(arguments), after)
        return decode(answer["value"], lambda number: Kept(number, ask))

    return ask


def _error(kind: str, text: str) -> Exception:
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(text)
        except TypeError:  # a few take more than a text
            return RuntimeError(f"{kind}: {text}")
    return RuntimeError(f"{kind}: {text}")


def _take_over(before: Any, after: Any) -> Any:
    """A function may change the lists, dicts and sets that it is given. Bring these here, which are the originals, up
    to date and return them; where there is nothing that can change, what came back."""
    if isinstance(before, Kept):
        return before
    if type(before) is not type(after) or not isinstance(before, list | dict | set):
        return after
    if isinstance(before, list):
        pairs = zip(before, after, strict=False)
        before[:] = [_take_over(old, new) for old, new in pairs] + after[len(before) :]
        return before
    if isinstance(before, dict):
        after = {key: _take_over(before[key], new) if key in before else new for key, new in after.items()}
    before.clear()
    before.update(after)
    return before


class Names(dict[str, Any]):
    """Python's own names; any other is looked up in the program."""

    def __init__(self, ask: Any) -> None:
        super().__init__(vars(builtins))
        self._ask = ask

    def __missing__(self, name: str) -> Any:
        try:
            return self._ask("name", name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


def run_tests(line: Line) -> None:
    runpy.run_path("tests.py", init_globals={"__builtins__": Names(ask_over(line))}, run_name="__tests__")


if __name__ == "__main__":
    {"serve": serve, "ask": run_tests}[sys.argv[1]](Line(int(sys.argv[2])))
