"""Tools: the schema of a function or method, and how arguments are checked and passed."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from transformers.utils.chat_template_utils import get_json_schema

from outpace.errors import BadInput
from outpace.rollouts.tools.functions import ToolError, load_tools, tools_of
from support import naming


class Desk:
    """A method for every form a tool can take."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def reset(self, **columns: Any) -> None: ...

    def get_reward(self) -> float:
        return 0.0

    def _private(self, anything: Any) -> None: ...

    def write(self, text: str, times: int = 1) -> str:
        """Write something down.

        It stays written.

        Args:
            text: What to write,
                on one line.
            times: How often.

        Returns:
            Everything written so far.
        """
        self.notes += [text] * times
        return " ".join(self.notes)

    async def add(self, numbers: list[float]) -> float:
        """Add numbers."""
        return sum(numbers)

    def paint(self, colour: Literal["red", "blue"], *, size: float | None = None) -> dict[str, Any]:
        """Paint."""
        return {"colour": colour, "size": size}

    @staticmethod
    def ring() -> None:
        """Ring the bell."""

    def fall(self) -> None:
        """Fall off."""
        raise RuntimeError("two\nlines")


TOOLS = tools_of(Desk)


async def run(name: str, **arguments: Any) -> Any:
    return await replace(TOOLS[name], function=getattr(Desk(), name)).call(arguments)


def test_the_public_methods_are_the_tools() -> None:
    assert sorted(TOOLS) == ["add", "fall", "paint", "ring", "write"]


def test_a_schema_equals_the_one_transformers_generates() -> None:
    ours, theirs = TOOLS["write"].schema, get_json_schema(Desk.write)
    theirs["function"].pop("return")
    assert ours == theirs


def test_a_type_in_the_docstring_is_not_part_of_the_description() -> None:
    class Typed:
        def tool(self, times: int) -> None:
            """Do.

            Args:
                times (int): How often.
            """

    assert (
        tools_of(Typed)["tool"].schema["function"]["parameters"]["properties"]["times"]["description"] == "How often."
    )


def test_python_types_become_json_schema_types() -> None:
    properties = TOOLS["paint"].schema["function"]["parameters"]["properties"]
    assert properties["colour"] == {"type": "string", "enum": ["red", "blue"]}
    assert TOOLS["add"].schema["function"]["parameters"]["properties"]["numbers"]["items"] == {"type": "number"}
    assert "required" not in TOOLS["ring"].schema["function"]["parameters"]


async def test_sync_and_async_methods_are_called_on_their_instance() -> None:
    assert await run("write", text="a", times=2) == "a a"
    assert await run("add", numbers=[1, 2.5]) == 3.5
    assert await run("paint", colour="red") == {"colour": "red", "size": None}
    assert await run("ring") is None


async def test_arguments_are_converted_to_the_declared_types() -> None:
    assert await run("write", text="a", times="2") == "a a"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("write", {}, ("write", "text")),
        ("write", {"text": "a", "colour": 1, "size": 2}, ("write", "colour", "size")),
        ("write", {"text": "a", "times": "often"}, ("write", "times", "Input should be a valid integer")),
        ("paint", {"colour": "green"}, ("paint", "colour", "Input should be 'red' or 'blue'")),
        ("fall", {}, ("fall", "RuntimeError", "two lines")),
        ("write", {"text": "a", "x" * 10**6: 1}, ("write", "xxx")),
    ],
)
async def test_a_failed_call_raises_a_one_line_tool_error(
    name: str, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ToolError, match=naming(*words)) as caught:
        await run(name, **arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert (caught.value.__cause__ is None) == (name != "fall")  # an invalid call never reaches the tool


class Undocumented:
    def tool(self, x: int) -> int:
        return x


class Untyped:
    def tool(self, x) -> int:  # type: ignore[no-untyped-def]
        """Do."""
        return 0


class Unnamed:
    def tool(self, *numbers: int) -> int:
        """Do."""
        return sum(numbers)


class Unwritable:
    def tool(self, desk: Desk) -> None:
        """Do."""


class Unresolved:
    def tool(self, x: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Do."""


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (Undocumented, ("Undocumented.tool", "docstring")),
        (Untyped, ("Untyped.tool", "x", "type hint")),
        (Unnamed, ("Unnamed.tool", "*numbers")),
        (Unwritable, ("Unwritable.tool", "desk", "JSON")),
        (Unresolved, ("Unresolved.tool", "Nowhere")),
    ],
)
def test_a_method_that_cannot_be_a_tool_is_refused(environment: type, words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=naming(*words)) as caught:
        tools_of(environment)
    assert str(caught.value).startswith("rollout.environment: ")


def count_words(text: str, minimum: Annotated[int, Field(ge=0)] = 0) -> int:
    """Count words.

    Args:
        text: What to read.
        minimum: Shorter words do not count.
    """
    return sum(len(word) >= minimum for word in text.split())


async def fetch(page: str) -> str:
    """Fetch a page."""
    await asyncio.sleep(0)
    return f"<{page}>"


async def test_sync_and_async_functions_can_be_tools() -> None:
    first, second = load_tools([count_words, fetch])
    assert (first.name, second.name) == ("count_words", "fetch")
    assert first.schema["function"]["parameters"]["properties"]["minimum"] == {
        "type": "integer",
        "minimum": 0,
        "description": "Shorter words do not count.",
    }
    assert await first.call({"text": "a bb ccc", "minimum": 2}) == 2
    assert await second.call({"page": "x"}) == "<x>"


async def test_a_sync_function_runs_on_a_thread_and_an_async_one_on_the_loop() -> None:
    def where() -> int:
        """Where am I?"""
        return threading.get_ident()

    async def here() -> int:
        """Where am I?"""
        return threading.get_ident()

    off, on = load_tools([where, here])
    assert await off.call({}) != threading.get_ident()
    assert await on.call({}) == threading.get_ident()


async def test_functions_can_be_loaded_from_files(tmp_path: Path) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text('def double(x: int) -> int:\n    """Double it."""\n    return 2 * x\n')
    (tool,) = load_tools([f"{file}:double"])
    assert await tool.call({"x": 4}) == 8


def silent(x: int) -> int:
    return x


def unhinted(x) -> int:  # type: ignore[no-untyped-def]
    """Do."""
    return 0


class Instance:
    """A callable object, which has no name."""

    def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([silent], ("silent", "docstring")),
        ([unhinted], ("unhinted", "x", "type hint")),
        ([fetch, count_words, fetch], ("fetch",)),
        ([lambda x: x], ("<lambda>", "name")),
        ([Instance()], ("Instance",)),
        ([Desk], ("Desk",)),
        (["no.such:thing"], ("no.such:thing", "module")),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_one_line(functions: list[Any], words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=naming(*words)) as caught:
        load_tools(functions)
    assert str(caught.value).startswith("tools.functions: ")
    assert "\n" not in str(caught.value)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


async def test_an_exception_that_cannot_be_printed_is_still_reported() -> None:
    def tool() -> None:
        """Do."""
        raise Mute

    with pytest.raises(ToolError, match=naming("tool", "Mute", "<Mute>")):
        await load_tools([tool])[0].call({})


async def test_the_traceback_of_a_tool_is_logged_and_not_part_of_the_tool_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("DEBUG", logger="outpace.rollouts.tools.functions"), pytest.raises(ToolError) as caught:
        await run("fall")
    assert "Traceback" in caplog.text
    assert "Traceback" not in str(caught.value)
