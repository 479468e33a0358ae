"""Tools: what a model is shown of a method, and what becomes of what it asks for."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import get_json_schema

from outpace.errors import BadInput
from outpace.rollouts.tools import Call, ToolError, parse_calls, tools_of


class Desk:
    """Everything that a tool may look like."""

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


async def run(name: str, **arguments: Any) -> str:
    return await TOOLS[name].run(Desk(), arguments)


def test_the_public_methods_are_the_tools() -> None:
    assert sorted(TOOLS) == ["add", "fall", "paint", "ring", "write"]


def test_a_schema_is_what_chat_templates_are_used_to() -> None:
    ours, theirs = TOOLS["write"].schema, get_json_schema(Desk.write)
    theirs["function"].pop("return")
    assert ours == theirs


def test_a_type_in_the_docstring_is_no_part_of_the_description() -> None:
    class Typed:
        def tool(self, times: int) -> None:
            """Do.

            Args:
                times (int): How often.
            """

    assert (
        tools_of(Typed)["tool"].schema["function"]["parameters"]["properties"]["times"]["description"] == "How often."
    )


def test_types_become_json_types() -> None:
    properties = TOOLS["paint"].schema["function"]["parameters"]["properties"]
    assert properties["colour"] == {"type": "string", "enum": ["red", "blue"]}
    assert TOOLS["add"].schema["function"]["parameters"]["properties"]["numbers"]["items"] == {"type": "number"}
    assert "required" not in TOOLS["ring"].schema["function"]["parameters"]


async def test_results_are_text() -> None:
    assert await run("write", text="a", times=2) == "a a"
    assert await run("add", numbers=[1, 2.5]) == "3.5"
    assert await run("paint", colour="red") == '{"colour": "red", "size": null}'
    assert await run("ring") == "null"


async def test_arguments_take_the_type_that_the_method_declares() -> None:
    assert await run("write", text="a", times="2") == "a a"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("write", {}, "write needs text"),
        ("write", {"text": "a", "colour": 1, "size": 2}, "write does not take colour, size"),
        ("write", {"text": "a", "times": "often"}, "write: times: Input should be a valid integer"),
        ("paint", {"colour": "green"}, "paint: colour: Input should be 'red' or 'blue'"),
        ("fall", {}, "fall raised RuntimeError: two lines"),
    ],
)
async def test_what_goes_wrong_is_said_in_one_line(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolError) as caught:
        await run(name, **arguments)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


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
    ("environment", "said"),
    [
        (Undocumented, "Undocumented.tool is public, so it is a tool, and a tool needs a docstring"),
        (Untyped, "Untyped.tool: x needs a type hint"),
        (Unnamed, "Unnamed.tool: a model names its arguments"),
        (Unwritable, "Unwritable.tool: desk cannot be written as JSON"),
        (Unresolved, "Unresolved.tool: a type hint cannot be resolved"),
    ],
)
def test_a_method_that_cannot_be_a_tool_is_refused(environment: type, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        tools_of(environment)
    assert str(caught.value).startswith(f"rollout.environment: {said}")


def test_calls_are_found_in_the_order_in_which_they_are_made() -> None:
    first, second = '{"name": "a", "arguments": {"x": 1}}', '{"name": "b"}'
    text = f"Let me see. <tool_call>\n{first}\n</tool_call> <tool_call>{second}</tool_call>"
    assert parse_calls(text) == [Call("a", {"x": 1}), Call("b", {})]


def test_an_answer_without_a_call_has_none() -> None:
    assert parse_calls('{"name": "a", "arguments": {}}') == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "an object like"),
        ('"a"', "an object like"),
        ('{"arguments": {}}', "an object like"),
        ('{"name": 3, "arguments": {}}', "an object like"),
        ('{"name": "a", "arguments": [1]}', "an object like"),
        ('{"name": "a", "arguments": "{}"}', "an object like"),
    ],
)
@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_a_call_that_cannot_be_read_is_an_error_in_its_place(body: str, said: str, end: str) -> None:
    (call,) = parse_calls(f"<tool_call>{body}{end}")
    assert isinstance(call, ToolError)
    assert said in str(call)


@settings(deadline=None)
@given(st.text(alphabet='<>/tool_call{}[]":,name arguments1'))
def test_whatever_a_model_writes_can_be_parsed(text: str) -> None:
    assert len(parse_calls(f"<tool_call>{text}")) >= 1
