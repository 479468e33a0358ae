"""Chat rendering: a pure function of tokenizer and messages, and bridges that never re-render sampled tokens."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace.errors import BadInput, RequestFailed
from outpace.models.chat import PLACEHOLDER, Bridge, as_messages, as_text, bridge, render, text_decoder
from outpace.models.loading import load_tokenizer

TEMPLATE = """\
{%- if tools %}{{- '[tools]' + (tools | tojson) + '[/]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'critic' %}{{- raise_exception('no critics here') }}{%- endif %}
    {{- '[' + message.role + ']' + message.content + '[/]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
HI = [{"role": "user", "content": "hi"}]


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A byte-level tokenizer with an end-of-turn token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("[/]", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[/]")  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = make_tokenizer()


def text_of(ids: list[int], tokenizer: Any = TOKENIZER) -> str:
    return str(tokenizer.decode(ids))


def ids_of(found: Bridge | None) -> list[int]:
    assert found is not None
    return found.ids


def test_a_text_prompt_becomes_one_user_message_after_the_system_message() -> None:
    assert as_messages("hi", "be kind") == [{"role": "system", "content": "be kind"}, *HI]
    assert as_messages("hi") == HI


def test_a_prompt_with_its_own_system_message_keeps_it() -> None:
    own = [{"role": "system", "content": "be brief"}, *HI]
    assert as_messages(own, "be kind") == own


def test_a_prompt_is_rendered_up_to_the_assistant_turn() -> None:
    assert text_of(render(TOKENIZER, "hi", "be kind")) == "[system]be kind[/]\n[user]hi[/]\n[assistant]"


def test_rendering_returns_the_token_ids_of_the_chat_template() -> None:
    direct = TOKENIZER.apply_chat_template(HI, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert render(TOKENIZER, HI) == list(direct)


def test_tools_are_passed_to_the_chat_template() -> None:
    assert text_of(render(TOKENIZER, "hi", tools=[TOOL])).startswith('[tools][{"type": "function"')


def test_a_chat_template_that_ignores_tools_is_refused() -> None:
    without_tools = make_tokenizer("{{ messages[0].content }}")
    assert text_of(render(without_tools, "hi")) == "hi"
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*\btools\b"):
        render(without_tools, "hi", tools=[TOOL])


def test_without_a_chat_template_only_text_can_be_rendered() -> None:
    plain = make_tokenizer(None)
    assert text_of(render(plain, "hi", "be kind")) == "be kind\nhi"
    with pytest.raises(BadInput, match=r"^tasks: "):
        render(plain, [*HI, {"role": "assistant", "content": "ho"}, *HI])
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*\btools\b"):
        render(plain, "hi", tools=[TOOL])
    with pytest.raises(RequestFailed, match=r"observe\(text\)"):
        bridge(plain, HI, PLACEHOLDER, HI)


def test_a_bridge_ends_the_answer_adds_the_messages_and_opens_the_next_assistant_turn() -> None:
    reply_messages = [{"role": "tool", "content": "3"}, {"role": "user", "content": "go on"}]
    assert (
        text_of(ids_of(bridge(TOKENIZER, HI, PLACEHOLDER, reply_messages)))
        == "[/]\n[tool]3[/]\n[user]go on[/]\n[assistant]"
    )


def test_a_bridge_from_cached_rendering_equals_a_bridge_without_it() -> None:
    first = bridge(TOKENIZER, HI, PLACEHOLDER, HI)
    assert first is not None
    history = [*HI, PLACEHOLDER, *HI]
    assert bridge(TOKENIZER, history, PLACEHOLDER, HI, rendered=first.rendered) == bridge(
        TOKENIZER, history, PLACEHOLDER, HI
    )


TURNS = st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4)


@settings(deadline=None)
@given(opening=st.text(), turns=TURNS)
def test_prompt_answers_and_bridges_make_up_the_whole_conversation(opening: str, turns: list[tuple[str, str]]) -> None:
    history, whole = as_messages(opening), as_messages(opening)
    ids = render(TOKENIZER, opening)
    for answer, reply in turns:
        reply_messages = as_messages(reply)
        ids += TOKENIZER.encode(answer) + ids_of(bridge(TOKENIZER, history, PLACEHOLDER, reply_messages))
        history = [*history, PLACEHOLDER, *reply_messages]
        whole = [*whole, {"role": "assistant", "content": answer}, *reply_messages]
    assert ids == render(TOKENIZER, whole)


def test_a_bridge_does_not_repeat_tools_shown_in_the_prompt() -> None:
    assert ids_of(bridge(TOKENIZER, HI, PLACEHOLDER, HI, [TOOL])) == ids_of(bridge(TOKENIZER, HI, PLACEHOLDER, HI))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + TEMPLATE,
        TEMPLATE.replace("message.content", "(message.content | upper)"),
        TEMPLATE.replace("'[assistant]'", "'[assistant]<think>'"),
    ],
    ids=["counts turns", "changes earlier content", "opens reasoning that it later drops"],
)
def test_a_template_that_rerenders_earlier_turns_differently_has_no_bridge(template: str) -> None:
    assert bridge(make_tokenizer(template), HI, PLACEHOLDER, HI) is None


def test_a_template_that_drops_a_message_role_is_reported() -> None:
    without_tool_role = make_tokenizer(
        TEMPLATE.replace("{{- '[' + message.role", "{{- '' if message.role == 'tool' else '[' + message.role")
    )
    assert text_of(ids_of(bridge(without_tool_role, HI, PLACEHOLDER, HI))) == "[/]\n[user]hi[/]\n[assistant]"
    with pytest.raises(RequestFailed, match=r"\btool\b"):
        bridge(without_tool_role, HI, PLACEHOLDER, [{"role": "tool", "content": "3"}])


def test_a_message_refused_by_the_template_is_reported_with_the_reason() -> None:
    critic = {"role": "critic", "content": "bad"}
    assert bridge(TOKENIZER, HI, PLACEHOLDER, [critic]) is None
    with pytest.raises(RequestFailed, match="no critics here"):
        render(TOKENIZER, [*HI, critic])


def test_a_token_that_spans_the_end_of_an_answer_has_no_bridge() -> None:
    class MergingTokenizer:
        """A tokenizer that merges the last letter of an answer and the line break after it into one token."""

        name_or_path = ""
        chat_template = TEMPLATE.replace("[/]", "")

        def apply_chat_template(self, *args: Any, **options: Any) -> Any:
            return TOKENIZER.apply_chat_template(*args, chat_template=self.chat_template, **options)

        def encode(self, text: str, **options: Any) -> list[int]:
            return [ord(character) for character in text.replace("n\n", "ñ")]

    assert bridge(MergingTokenizer(), HI, PLACEHOLDER, HI) is None


def test_prompts_can_be_printed_as_readable_text() -> None:
    assert as_text("hi") == "hi"
    assert as_text([*HI, {"role": "assistant", "content": "ho"}]) == "user: hi\nassistant: ho"
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert as_text([{"role": "assistant", "content": "", "tool_calls": [call]}]) == 'assistant: add({"a": 1})'


def test_messages_passed_in_are_not_modified() -> None:
    history, reply_messages = deepcopy(HI), [{"role": "tool", "content": "3"}]
    before = deepcopy((history, reply_messages))
    bridge(TOKENIZER, history, PLACEHOLDER, reply_messages)
    as_messages(history, "be kind")
    assert (history, reply_messages) == before


def test_arguments_of_the_template_are_its_variables() -> None:
    plain, given = (
        load_tokenizer("starter"),
        load_tokenizer("starter", template_arguments={"loud": True, "name": 'a"b'}),
    )
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}{{ name }}"
    given.chat_template = str(given.chat_template).replace(str(plain.chat_template), template)
    assert given.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == 'hi!a"b'


CLEANED_UP = TOKENIZER.encode("so .", add_special_tokens=False)
"""Without the space, if the tokenizer cleans up."""


@settings(deadline=None, max_examples=20)
@example(ids=CLEANED_UP, cleans_up=True, special=True)
@example(ids=CLEANED_UP, cleans_up=True, special=False)
@given(ids=st.lists(st.integers(0, 256), max_size=12), cleans_up=st.booleans(), special=st.booleans())
def test_decoded_text_is_that_of_the_tokenizer(ids: list[int], cleans_up: bool, special: bool) -> None:
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = cleans_up
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = cleans_up
    cleaned = cleans_up and not special
    expected = tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=cleaned)
    assert text_decoder(tokenizer, special)(ids) == expected
