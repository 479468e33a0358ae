"""Stop strings with a real byte-level tokenizer, in which one character may take several tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outpace.engines.generation import StopStrings

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENIZER = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(ALPHABET)}, merges=[]))
TOKENIZER.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZER.decoder = decoders.ByteLevel()


def decode(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(tokens), skip_special_tokens=False))


def ends_at(text: str, stops: Sequence[str]) -> int | None:
    """Return how many tokens of `text` are sampled before a stop string is complete."""
    tokens = TOKENIZER.encode(text).ids
    watch = StopStrings(stops, decode)
    return next((end for end in range(1, len(tokens) + 1) if watch.completed_by_last(tokens[:end])), None)


@pytest.mark.parametrize(
    ("text", "stops", "sampled"),
    [
        ("one two", ["two"], "one two"),
        ("one\n\ntwo", ["\n\n"], "one\n\n"),
        ("a b  c", ["  "], "a b  "),
        ("→ café! yes", ["é!"], "→ café!"),
        ("x → y", ["→"], "x →"),
        ("</answer> rest", ["</answer>", "rest"], "</answer>"),
    ],
)
def test_a_stop_string_is_detected_at_its_last_token(text: str, stops: list[str], sampled: str) -> None:
    assert ends_at(text, stops) == len(sampled.encode())


@given(text=st.text("ab é→\n", max_size=40), stop=st.text("ab é→\n", min_size=1, max_size=4))
def test_the_fast_check_gives_the_same_result_as_decoding_everything(text: str, stop: str) -> None:
    place = text.find(stop)
    expected = None if place < 0 else len(text[: place + len(stop)].encode())
    assert ends_at(text, [stop]) == expected


def test_tokens_that_cannot_complete_a_stop_string_are_decoded_once_each() -> None:
    calls = 0

    def counted(tokens: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return decode(tokens)

    watch = StopStrings(["END"], counted)
    tokens = TOKENIZER.encode("abc" * 50).ids
    assert not any(watch.completed_by_last(tokens[:end]) for end in range(1, len(tokens) + 1))
    assert calls == 3
