"""The starter model: small, loadable without a network, servable, and trained on the answer format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace.models
from outpace.tasks.countdown import Countdown
from outpace.tasks.generated import evaluate_expression

STARTER = Path(outpace.models.__file__).parent / "starter"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.fixture(autouse=True, scope="module")
def offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STARTER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float32)


def test_the_whole_directory_fits_in_four_megabytes() -> None:
    assert sum(file.stat().st_size for file in STARTER.iterdir()) <= 4_000_000


def test_the_config_matches_the_stored_weights_and_has_the_fields_a_server_needs() -> None:
    config = json.loads((STARTER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["head_dim"] >= 32
    assert config["max_position_embeddings"] >= 1024
    assert config["vocab_size"] % 16 == 0


def test_generation_defaults_sample_the_plain_distribution() -> None:
    generation = json.loads((STARTER / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"], generation["top_k"]) == (1.0, 1.0, 0)


def test_model_and_tokenizer_agree_on_vocabulary_and_special_ids(model: Any, tokenizer: Any) -> None:
    assert model.config.vocab_size == len(tokenizer)
    for ids in (model.config, model.generation_config):
        assert (ids.pad_token_id, ids.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@given(text=st.text())
def test_any_text_round_trips_through_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode()) or "<" in text


def test_every_id_the_model_can_sample_has_a_token(tokenizer: Any) -> None:
    assert all(tokenizer.convert_ids_to_tokens(index) is not None for index in range(len(tokenizer)))


def test_the_template_costs_a_plain_prompt_three_tokens(tokenizer: Any) -> None:
    prompt = Countdown("heldout")[0].prompt
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    assert text == f"<|user|>{prompt}<|end|><|assistant|>"
    assert len(tokenizer.encode(text)) == len(prompt) + 3


def test_tools_and_tool_calls_render_as_json(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|system|>Be brief.\nTools:\n" + json.dumps(TOOL))
    assert '<|assistant|><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>' in text
    assert text.endswith("<|tool|>2<|end|><|assistant|>")
    assert text.count("Be brief.") == 1


def test_tool_tags_stay_visible_when_special_tokens_are_skipped(tokenizer: Any) -> None:
    ids = tokenizer.encode("<tool_call>{}</tool_call><|end|>")
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>{}</tool_call>"


def test_a_longer_conversation_starts_with_the_text_of_the_shorter_one(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert answered == f"{prompt}b<|end|>"


def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="Unknown role"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


def test_greedy_answers_end_by_themselves_and_are_mostly_expressions_over_the_numbers(
    model: Any, tokenizer: Any
) -> None:
    well_formed = 0
    tasks = [Countdown("heldout")[index] for index in range(32)]
    texts = [f"<|user|>{task.prompt}<|end|><|assistant|>" for task in tasks]
    inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    for task, row in zip(tasks, tokens, strict=True):
        assert tokenizer.eos_token_id in row
        try:
            _, used = evaluate_expression(tokenizer.decode(row, skip_special_tokens=True))
        except ValueError:
            continue
        well_formed += sorted(used) == sorted(task.columns["numbers"])
    assert well_formed >= 28
