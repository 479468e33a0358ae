"""Rendering: a pure function of tokenizer and messages, and bridges that leave the policy's own words alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace.errors import BadInput, RequestFailed
from outpace.models.chat import PLACEHOLDER, Bridge, as_messages, as_text, bridge, render

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
    """Bytes, with a tag for the end of a turn."""
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


def test_text_is_one_user_message_after_the_system_message() -> None:
    assert as_messages("hi", "be kind") == [{"role": "system", "content": "be kind"}, *HI]
    assert as_messages("hi") == HI


def test_a_prompt_that_brings_its_own_system_message_keeps_it() -> None:
    own = [{"role": "system", "content": "be brief"}, *HI]
    assert as_messages(own, "be kind") == own


def test_a_prompt_is_rendered_up_to_where_the_policy_speaks() -> None:
    assert text_of(render(TOKENIZER, "hi", "be kind")) == "[system]be kind[/]\n[user]hi[/]\n[assistant]"


def test_rendering_gives_the_ids_of_the_template_itself() -> None:
    direct = TOKENIZER.apply_chat_template(HI, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert render(TOKENIZER, HI) == list(direct)


def test_tools_are_given_to_the_template() -> None:
    assert text_of(render(TOKENIZER, "hi", tools=[TOOL])).startswith('[tools][{"type": "function"')


def test_a_template_that_ignores_tools_is_refused() -> None:
    silent = make_tokenizer("{{ messages[0].content }}")
    assert text_of(render(silent, "hi")) == "hi"
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*\btools\b"):
        render(silent, "hi", tools=[TOOL])


def test_without_a_template_only_text_can_be_rendered() -> None:
    plain = make_tokenizer(None)
    assert text_of(render(plain, "hi", "be kind")) == "be kind\nhi"
    with pytest.raises(BadInput, match=r"^tasks: "):
        render(plain, [*HI, {"role": "assistant", "content": "ho"}, *HI])
    with pytest.raises(BadInput, match=r"^rollout\.environment: .*\btools\b"):
        render(plain, "hi", tools=[TOOL])
    with pytest.raises(RequestFailed, match=r"observe\(text\)"):
        bridge(plain, HI, PLACEHOLDER, HI)


def test_a_bridge_ends_the_answer_says_the_messages_and_begins_the_next_answer() -> None:
    said = [{"role": "tool", "content": "3"}, {"role": "user", "content": "go on"}]
    assert text_of(ids_of(bridge(TOKENIZER, HI, PLACEHOLDER, said))) == "[/]\n[tool]3[/]\n[user]go on[/]\n[assistant]"


def test_a_bridge_that_knows_how_the_past_was_shown_is_the_same_bridge() -> None:
    first = bridge(TOKENIZER, HI, PLACEHOLDER, HI)
    assert first is not None
    heard = [*HI, PLACEHOLDER, *HI]
    assert bridge(TOKENIZER, heard, PLACEHOLDER, HI, rendered=first.rendered) == bridge(
        TOKENIZER, heard, PLACEHOLDER, HI
    )


TURNS = st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4)


@settings(deadline=None)
@given(opening=st.text(), turns=TURNS)
def test_prompt_answers_and_bridges_make_up_the_whole_conversation(opening: str, turns: list[tuple[str, str]]) -> None:
    heard, whole = as_messages(opening), as_messages(opening)
    ids = render(TOKENIZER, opening)
    for answer, reply in turns:
        said = as_messages(reply)
        ids += TOKENIZER.encode(answer) + ids_of(bridge(TOKENIZER, heard, PLACEHOLDER, said))
        heard = [*heard, PLACEHOLDER, *said]
        whole = [*whole, {"role": "assistant", "content": answer}, *said]
    assert ids == render(TOKENIZER, whole)


def test_a_bridge_shows_tools_where_the_prompt_did() -> None:
    assert ids_of(bridge(TOKENIZER, HI, PLACEHOLDER, HI, [TOOL])) == ids_of(bridge(TOKENIZER, HI, PLACEHOLDER, HI))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + TEMPLATE,
        TEMPLATE.replace("message.content", "(message.content | upper)"),
        TEMPLATE.replace("'[assistant]'", "'[assistant]<think>'"),
    ],
    ids=["counts its turns", "changes what was said", "opens thoughts that it later drops"],
)
def test_a_template_that_shows_the_past_in_another_way_has_no_bridge(template: str) -> None:
    assert bridge(make_tokenizer(template), HI, PLACEHOLDER, HI) is None


def test_a_template_that_leaves_out_what_is_said_is_named() -> None:
    mute = make_tokenizer(
        TEMPLATE.replace("{{- '[' + message.role", "{{- '' if message.role == 'tool' else '[' + message.role")
    )
    assert text_of(ids_of(bridge(mute, HI, PLACEHOLDER, HI))) == "[/]\n[user]hi[/]\n[assistant]"
    with pytest.raises(RequestFailed, match=r"\btool\b"):
        bridge(mute, HI, PLACEHOLDER, [{"role": "tool", "content": "3"}])


def test_a_template_that_refuses_a_message_says_why() -> None:
    critic = {"role": "critic", "content": "bad"}
    assert bridge(TOKENIZER, HI, PLACEHOLDER, [critic]) is None
    with pytest.raises(RequestFailed, match="no critics here"):
        render(TOKENIZER, [*HI, critic])


def test_a_token_across_the_end_of_an_answer_has_no_bridge() -> None:
    class Greedy:
        """Takes the last letter of an answer and the line break after it as one token."""

        name_or_path = ""
        chat_template = TEMPLATE.replace("[/]", "")

        def apply_chat_template(self, *args: Any, **options: Any) -> Any:
            return TOKENIZER.apply_chat_template(*args, chat_template=self.chat_template, **options)

        def encode(self, text: str, **options: Any) -> list[int]:
            return [ord(character) for character in text.replace("n\n", "ñ")]

    assert bridge(Greedy(), HI, PLACEHOLDER, HI) is None


def test_prompts_can_be_read_by_people() -> None:
    assert as_text("hi") == "hi"
    assert as_text([*HI, {"role": "assistant", "content": "ho"}]) == "user: hi\nassistant: ho"
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert as_text([{"role": "assistant", "content": "", "tool_calls": [call]}]) == 'assistant: add({"a": 1})'


def test_messages_are_left_as_they_are() -> None:
    heard, said = deepcopy(HI), [{"role": "tool", "content": "3"}]
    before = deepcopy((heard, said))
    bridge(TOKENIZER, heard, PLACEHOLDER, said)
    as_messages(heard, "be kind")
    assert (heard, said) == before
