"""Chat formats: the tokenizer's chat template, and model families of the package `renderers`."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace.errors import BadInput, RequestFailed
from outpace.models.call_opening import call_opening
from outpace.models.chat import PLACEHOLDER
from outpace.models.chat_format import AnsweredConversation, TemplateChatFormat, chat_format_for, parse_text
from outpace.models.loading import load_tokenizer
from outpace.types import Message
from support import naming

HI: Message = {"role": "user", "content": "hi"}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen() -> Any:
    """A byte-level tokenizer with the control tokens of Qwen3; the package recognizes it by its name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")  # type: ignore[no-untyped-call]
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    return tokenizer


def ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


# --------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize(("cleans_up", "text"), [(False, "so ."), (True, "so.")])
def test_decoded_text_is_cleaned_up_if_the_tokenizer_does_that(qwen: Any, cleans_up: bool, text: str) -> None:
    tokenizer = deepcopy(qwen)
    tokenizer.clean_up_tokenization_spaces = cleans_up
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = cleans_up
    chat_format = TemplateChatFormat(tokenizer, [])
    assert {chat_format.decode(ids(qwen, "so ."), special) for special in (False, True)} == {text}


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names"),
    [
        ("plain ", "plain ", "", []),
        ("<think>so</think>\n\nplain", "plain", "so", []),
        ("so</think>plain", "so</think>plain", "", []),
        (f"first {CALL}{CALL}", "first", "", ["add", "add"]),
        (f"<think>{CALL}</think>no call", "no call", CALL, []),
        ('<tool_call>{"name": "add"}', "", "", ["add"]),
    ],
    ids=["plain", "reasoning", "end tag without start tag", "two calls", "call inside reasoning", "not closed"],
)
def test_an_answer_is_parsed_into_content_reasoning_and_tool_calls(
    text: str, content: str, reasoning: str, names: list[str]
) -> None:
    parsed = parse_text(text)
    assert (parsed.content, parsed.reasoning, [call.name for call in parsed.calls]) == (content, reasoning, names)


@pytest.mark.parametrize("body", ["", "{", "[]", "1", '{"name": 1}', '{"name": "f", "arguments": []}', "[" * 100_000])
def test_an_unparsable_tool_call_has_a_problem_and_stays_in_the_content(body: str) -> None:
    parsed = parse_text(f"<tool_call>{body}</tool_call>")
    assert parsed.calls[0].problem
    assert parsed.content == f"<tool_call>{body}</tool_call>"


@given(
    st.text() | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "x"])).map("".join)
)
def test_any_text_can_be_parsed(text: str) -> None:
    parsed = parse_text(text)
    assert all(json.loads(call.arguments) is not None for call in parsed.calls if not call.problem)
    if not parsed.calls and not parsed.reasoning and "</think>" not in text:
        assert parsed.content == text


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [("so</think>plain", "plain", "so"), ("so far", "", "so far"), ("so<think></think>", "", "so<think>")],
    ids=["ended", "not ended", "begun twice"],
)
def test_reasoning_opened_in_the_prompt_ends_in_the_answer(text: str, content: str, reasoning: str) -> None:
    parsed = parse_text(text, opened=True)
    assert (parsed.content, parsed.reasoning) == (content, reasoning)


# ----------------------------------------------------------------------------------------------------- model families


def test_a_model_with_a_known_name_uses_the_renderer_of_its_family(qwen: Any) -> None:
    assert type(chat_format_for(qwen, [])).__name__ == "RendererChatFormat"
    assert isinstance(chat_format_for(qwen, [], "template"), TemplateChatFormat)
    assert isinstance(chat_format_for(load_tokenizer("starter"), []), TemplateChatFormat)


def test_a_renderer_keeps_sampled_tokens_and_continues_after_them(qwen: Any) -> None:
    chat_format = chat_format_for(qwen, [])
    prompt = chat_format.open([HI], [ADD])
    answer = ids(qwen, f"<think>\nhm  m\n</think>\n\n{CALL}<|im_end|>")
    parsed = chat_format.parse(answer, prompt, [ADD])
    assert (parsed.reasoning, [(call.name, json.loads(call.arguments)) for call in parsed.calls]) == (
        "hm  m",
        [("add", {"a": 1})],
    )
    answered = AnsweredConversation([HI], np.array(prompt), np.array(answer), PLACEHOLDER)
    more = chat_format.extend(answered, [{"role": "tool", "content": "3"}], [ADD])
    assert more is not None
    assert (
        qwen.decode(more.ids)
        == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_renderer_that_drops_earlier_reasoning_cannot_extend_the_sequence(qwen: Any) -> None:
    chat_format = chat_format_for(qwen, [])
    prompt, answer = chat_format.open([HI]), ids(qwen, "<think>\nhm\n</think>\n\nyes<|im_end|>")
    assert chat_format.extend(AnsweredConversation([HI], np.array(prompt), np.array(answer), PLACEHOLDER), [HI]) is None


def test_a_broken_tool_call_in_a_renderer_format_has_a_problem_and_stays_in_the_content(qwen: Any) -> None:
    chat_format = chat_format_for(qwen, [])
    parsed = chat_format.parse(
        ids(qwen, "<tool_call>\n{nonsense\n</tool_call><|im_end|>"), chat_format.open([HI]), [ADD]
    )
    assert [bool(call.problem) for call in parsed.calls] == [True]
    assert "nonsense" in parsed.content


def test_a_renderer_stops_at_the_end_tokens_of_its_family(qwen: Any) -> None:
    assert qwen.eos_token_id in chat_format_for(qwen, []).stop_ids


def test_an_unknown_renderer_is_refused_with_a_suggestion(qwen: Any) -> None:
    with pytest.raises(BadInput, match=r"model\.renderer: .*'qwen33'.*\bqwen3(?!3)"):
        chat_format_for(qwen, [], "qwen33")


def test_a_tokenizer_without_the_control_tokens_of_the_renderer_is_refused() -> None:
    with pytest.raises(BadInput, match=naming("model.renderer: ", "tokenizer", "qwen3")):
        chat_format_for(load_tokenizer("starter"), [], "qwen3")


def test_a_missing_renderers_package_is_reported_with_the_install_command(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r'pip install "outpace\[renderers\]"'):
        chat_format_for(qwen, [], "qwen3")
    assert isinstance(chat_format_for(qwen, []), TemplateChatFormat)


# -------------------------------------------------------------------------------------------------- forced tool calls


@pytest.mark.parametrize("name", ["add", "a", "name", "xadd", "tool_call"])
def test_the_opening_of_a_call_ends_with_the_token_after_its_name(name: str, qwen: Any) -> None:
    tool = {"type": "function", "function": {**ADD["function"], "name": name}}  # type: ignore[dict-item]
    opened = qwen.decode(call_opening(chat_format_for(qwen, []), [name], [tool]))
    assert opened == f'<think>\n\n</think>\n\n<tool_call>\n{{"name": "{name}"'
    agent = load_tokenizer("starter-agent")
    opened = agent.decode(call_opening(TemplateChatFormat(agent, [agent.eos_token_id]), [name], [tool]))
    assert opened == f'<tool_call>{{"name": "{name}", "argum'  # one token of this tokenizer follows the name


def test_calls_of_several_functions_share_the_opening_before_their_names(qwen: Any) -> None:
    opened = call_opening(chat_format_for(qwen, []), ["add", "multiply"], [ADD])
    assert qwen.decode(opened) == '<think>\n\n</think>\n\n<tool_call>\n{"name": "'


def test_a_renderer_refuses_template_kwargs(qwen: Any) -> None:
    with pytest.raises(RequestFailed, match=naming("chat_template_kwargs", "model.renderer")):
        chat_format_for(qwen, []).open([HI], template_kwargs={"enable_thinking": False})
