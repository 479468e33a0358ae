"""Both ends of the conversation between a program under test and its tests: each runs in a sandbox of its own.

    tests ── get name · call · item · next … ──▶ program          plain data only, both ways
          ◀── value, or "something I keep for you" ──

A script of the standard library alone, run as `program.py serve FD` and `program.py ask FD`, the latter with the tests
for its input. The process of the tests is judged: it ends with 0 if they all passed, with UNASKED if they never used a
name of the program. No object of the program ever enters it, so the program can neither read the tests, nor patch what
they use, nor end their process, nor answer with something that equals everything.

Invariants
- Plain are None, booleans, numbers, text, bytes, and lists, tuples, sets and dicts of these; of exactly these types.
- Anything else stays where it is: the tests hold a `Kept`, whose operations are done by the program.
- No operation of a `Kept` hands the program a value that it is compared with: it never equals plain data, is never
  ordered by it or reckoned with it, and what is in it is found by iterating. Between two of the program's own objects
  the program decides.
- A name that the tests do not define is Python's own if there is one, else the program's. The other way round a program
  could bring an `abs` or a `sorted` that suits it.
- What comes from the program is decoded by hand; an exception is of the nearest of Python's own kinds.
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

UNASKED = 113
"""How the process of the tests ends if they never used a name of the program."""
MAX_LINE, MAX_DEPTH = 1 << 24, 64
READ: dict[str, Any] = {"int": lambda text: int(text, 16), "float": float, "complex": complex, "bytes": bytes.fromhex}
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
    if kind in READ:
        return READ[kind](body)
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
        if line.endswith(b"\n"):
            return json.loads(line)
        raise EOFError("the other side has ended")


# --------------------------------------------------------------------------------------------------------- the program


def serve(line: Line) -> None:
    """Run the program, then do what the tests ask, with everything that is not plain kept here."""
    store: list[Any] = []

    def keep(value: Any) -> int:
        store.append(value)
        return len(store) - 1

    names, failure = run_program()
    while True:
        what, *given = line.receive()
        try:
            if failure is not None:
                raise failure
            arguments = decode(given[0], store.__getitem__)
            value = names[arguments[0]] if what == "name" else OPERATIONS[what](*arguments)
            line.send({"value": encode(value, keep), "arguments": encode(arguments, keep)})
        except Exception as error:  # of whatever kind: it belongs to the tests
            line.send({"error": [kind.__name__ for kind in type(error).__mro__], "given": _given(error)})


def run_program() -> tuple[dict[str, Any], Exception | None]:
    """The names that it defines as a module, or what went wrong: told when the tests ask for the first name."""
    try:
        return vars(run_module("answer", Path("answer.py").read_bytes(), {"__file__": "answer.py"})), None
    except Exception as error:
        return {}, error


@dataclass
class Text(ExecutionLoader):
    """Makes a module of a text, in the sandbox and nowhere else."""

    source: bytes

    def get_source(self, fullname: str) -> str:
        return decode_source(self.source)

    def get_filename(self, fullname: str) -> str:
        return f"{fullname}.py"


def run_module(name: str, source: bytes, names: dict[str, Any]) -> ModuleType:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(names)
    Text(source).exec_module(module)
    return module


def _given(error: Exception) -> Any:
    """What the exception was made of if that is plain, else its text; both may be code of the program."""
    for given in (lambda: list(error.args), lambda: [str(error)]):
        with suppress(Exception):
            return encode(given())
    return encode([])


# ----------------------------------------------------------------------------------------------------------- the tests


class Kept:
    """Something that stays with the program."""

    def __init__(self, number: int, ask: Any) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_ask", ask)

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
        return isinstance(instance, Kept) and bool(self._ask("isinstance", instance, self))


ALONE: tuple[Callable[..., Any], ...] = (next, len, bool, int, float, str, repr, hash, abs, setattr, delattr)
ALONE += (operator.getitem, operator.setitem, operator.delitem, operator.neg, operator.pos, operator.invert)
BETWEEN: tuple[str, ...] = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv", "floordiv")
BETWEEN += ("mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
"""What two objects of the program can do with each other."""
OPERATIONS: dict[str, Callable[..., Any]] = {"getattr": getattr, "iter": iter, "isinstance": isinstance}
OPERATIONS["call"] = lambda target, arguments, named: target(*arguments, **named)
OPERATIONS |= {does.__name__: does for does in ALONE} | {name: getattr(operator, name) for name in BETWEEN}


def _method(name: str) -> Callable[..., Any]:
    def method(self: Kept, *given: Any) -> Any:
        if name in BETWEEN and not isinstance(given[0], Kept):
            return NotImplemented
        return self._ask(name, self, *given)

    return method


for _name in (*(does.__name__ for does in ALONE), *BETWEEN):
    setattr(Kept, f"__{_name.rstrip('_')}__", _method(_name))


def ask_over(line: Line) -> Any:
    def ask(what: str, *arguments: Any) -> Any:
        line.send([what, encode(list(arguments))])
        answer = line.receive()
        if "error" in answer:
            raise _error(answer["error"], decode(answer["given"], None))
        _take_over(list(arguments), decode(answer["arguments"], lambda number: Kept(number, ask)))
        return decode(answer["value"], lambda number: Kept(number, ask))

    return ask


def _error(kinds: list[str], given: list[Any]) -> Exception:
    """Under its own name, but of the nearest kind that Python has itself."""
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if isinstance(found, type) and issubclass(found, Exception):
            own: type[Exception] = found if kind == kinds[0] else type(str(kinds[0]), (found,), {})
            try:
                return own(*given)
            except Exception:  # a few are particular about what they are made of
                break
    return RuntimeError(f"{kinds[0]}: {given}")


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
        self.asked = False

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):  # of the tests themselves, if anybody's
            raise NameError(f"name {name!r} is not defined")
        self.asked = True
        try:
            return self._ask("name", name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None


def run_tests(line: Line) -> None:
    names = Names(ask_over(line))
    try:
        run_module("tests", sys.stdin.buffer.read(), {"__builtins__": names})
    except BaseException:  # also an exit
        if names.asked:
            raise
        traceback.print_exc()
    if not names.asked:
        sys.exit(UNASKED)


if __name__ == "__main__":
    {"serve": serve, "ask": run_tests}[sys.argv[1]](Line(int(sys.argv[2])))
