"""The starter-agent model: small, servable, with a lossless tokenizer and an append-only chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import outpace.models
from outpace.models.loading import load_tokenizer, resolve_model
from outpace.tasks.generated import calculator_tasks, guess_tasks
from support import resolved

AGENT = Path(outpace.models.__file__).parent / "starter_agent"
DIGITS = "0123456789"

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"anyOf": []}}},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}

CONTENT = st.text(alphabet="ab 1<|>é\n", max_size=8)
MESSAGES = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant", "tool"]), CONTENT
    ),
    st.builds(lambda text: {"role": "assistant", "content": text, "tool_calls": [CALL]}, CONTENT),
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("starter-agent")


def rendered(tokenizer: Any, messages: list[dict[str, Any]], generation_prompt: bool = False, tools: Any = None) -> str:
    return str(
        tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt)
    )


def test_starter_agent_is_built_in_and_has_its_own_defaults() -> None:
    assert resolve_model("starter-agent") == AGENT
    config = resolved({"model.path": "starter-agent", "tasks.name": "guess"})
    assert (config.learner.lr, config.rollout.max_tokens) == (3e-4, 48)


def test_starter_agent_is_small_and_has_the_config_that_a_server_needs() -> None:
    assert sum(file.stat().st_size for file in AGENT.iterdir()) <= 2_500_000
    config = json.loads((AGENT / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["head_dim"] >= 32
    assert config["max_position_embeddings"] >= 1024
    assert config["vocab_size"] % 16 == 0


def test_model_and_tokenizer_agree_on_vocabulary_and_special_ids(tokenizer: Any) -> None:
    config = json.loads((AGENT / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert (config["pad_token_id"], config["eos_token_id"]) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert all(tokenizer.convert_ids_to_tokens(index) is not None for index in range(len(tokenizer)))


@given(text=st.text())
def test_any_text_round_trips_through_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_never_merged(tokenizer: Any) -> None:
    merged = [token for token in tokenizer.get_vocab() if len(token) > 1 and "spare" not in token]
    assert len(merged) > 100
    assert [token for token in merged if set(token) & set(DIGITS)] == []


@given(number=st.integers(min_value=0), before=st.text(max_size=5), after=st.text(max_size=5))
def test_numbers_are_tokenized_digit_by_digit(tokenizer: Any, number: int, before: str, after: str) -> None:
    ids = tokenizer.encode(f"{before}{number}{after}")
    alone = [token for token in tokenizer.convert_ids_to_tokens(ids) if set(token) & set(DIGITS)]
    assert all(len(token) == 1 for token in alone)


def test_prompts_and_tool_calls_are_short(tokenizer: Any) -> None:
    for task in (calculator_tasks("heldout")[0], guess_tasks("heldout")[0]):
        text = rendered(tokenizer, [{"role": "user", "content": task.prompt}], generation_prompt=True, tools=[TOOL])
        assert len(tokenizer.encode(text)) < 60
    call = '<tool_call>{"name": "guess", "arguments": {"number": 29}}</tool_call><|end|>'
    assert len(tokenizer.encode(call)) <= 12


@given(messages=st.lists(MESSAGES, min_size=1, max_size=6), tools=st.sampled_from([None, [TOOL]]))
def test_a_rendered_conversation_is_a_prefix_of_its_continuation(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any
) -> None:
    whole = rendered(tokenizer, messages, tools=tools)
    for length in range(1, len(messages)):
        answered = messages[length]["role"] == "assistant"
        assert whole.startswith(rendered(tokenizer, messages[:length], generation_prompt=answered, tools=tools))


def test_tools_are_rendered_as_signatures_and_calls_as_json(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ]
    text = rendered(tokenizer, messages, generation_prompt=True, tools=[TOOL])
    assert text == (
        "<|system|>Be brief.\nTools:\nadd(a: integer, b: any): Add two numbers.<|end|><|user|>1+2?<|end|>"
        '<|assistant|><tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>'
        "<|tool|>3<|end|><|assistant|>"
    )


@pytest.mark.parametrize("function", [{"name": "go"}, {"name": "go", "description": "", "parameters": {}}])
def test_a_tool_without_parameters_or_description_is_rendered(tokenizer: Any, function: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": function}]
    text = rendered(tokenizer, [{"role": "user", "content": "Go."}], tools=tools)
    assert text == "<|system|>Tools:\ngo()<|end|><|user|>Go.<|end|>"


def test_tool_tags_stay_visible_when_special_tokens_are_skipped(tokenizer: Any) -> None:
    ids = tokenizer.encode("<tool_call>{}</tool_call><|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>{}</tool_call>"


def test_the_tokenizer_has_a_class_that_every_transformers_release_supports(tokenizer: Any) -> None:
    assert type(tokenizer) is PreTrainedTokenizerFast
