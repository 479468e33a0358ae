"""Parsing of SGLang's streams, however they are chunked."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.engines.server.sglang import ChunkReader
from outpace.errors import ServerFailed, ServerFaulty, ServerRefused

Way = Literal["all", "fresh", "both"]
ENTRIES = [(-0.5 * number, 100 + number, None) for number in range(1, 400)]


def reader(sent: int | None = None) -> ChunkReader:
    return ChunkReader("http://here/generate", sent, lambda label: int(label[1:]) if label.startswith("v") else None)


def chunk(total: int, had: int, way: Way = "all", **meta: Any) -> bytes:
    """Return a chunk that brings the token count to `total`."""
    fresh, everything = ENTRIES[had:total], ENTRIES[:total]
    listed = {"all": everything, "fresh": fresh, "both": [*fresh, *everything]}[way]
    body = {"completion_tokens": total, "output_token_logprobs": listed, "finish_reason": None, **meta}
    return json.dumps({"text": "", "output_ids": [], "meta_info": body}).encode()


cuts = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["all", "fresh", "both"]), st.integers(0, 2)), min_size=1, max_size=8
)
"""Chunks: number of new tokens, how they are listed, and the increase of the version label."""


@given(cuts)
def test_every_token_is_parsed_once_however_the_stream_is_chunked(cuts: list[tuple[int, Way, int]]) -> None:
    reading, tokens, logprobs = reader(), [], []
    for count, way, _ in cuts:
        piece = reading.parse_chunk(chunk(len(tokens) + count, len(tokens), way))
        tokens += piece.tokens
        logprobs += piece.logprobs
    assert tokens == [token for _, token, _ in ENTRIES[: len(tokens)]]
    assert logprobs == [logprob for logprob, _, _ in ENTRIES[: len(tokens)]]
    assert len(tokens) == sum(count for count, _, _ in cuts)


@given(cuts, st.integers(0, 3))
def test_spans_cover_all_tokens_and_none_is_newer_than_the_chunk_before_it(
    cuts: list[tuple[int, Way, int]], sent: int
) -> None:
    reading, total, label, oldest = reader(sent), 0, sent, []
    for count, way, growth in cuts:
        oldest += [label] * count
        label += growth
        reading.parse_chunk(chunk(total + count, total, way, weight_version=f"v{label}"))
        total += count
    assert [version for version, start, end in reading.spans for _ in range(start, end)] == oldest
    versions = [version for version, _, _ in reading.spans]
    assert versions == sorted(set(versions)), "one span per version"


def test_a_chunk_without_a_label_keeps_the_previous_version() -> None:
    reading = reader(sent=4)
    reading.parse_chunk(chunk(2, 0))
    reading.parse_chunk(chunk(3, 2, weight_version="v4"))
    assert reading.spans == [(4, 0, 3)]


def test_a_request_aborted_before_its_first_token_returns_an_empty_answer() -> None:
    """The server lists one logprob nevertheless."""
    ending = {"type": "abort", "message": "Aborted", "status_code": None}
    body = {"completion_tokens": 0, "output_token_logprobs": ENTRIES[:1], "finish_reason": ending}
    piece = reader().parse_chunk(json.dumps({"meta_info": body}).encode())
    assert (piece.tokens, piece.logprobs, piece.stop) == ([], [], "aborted")


@pytest.mark.parametrize(
    ("payload", "kind", "words"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', ServerRefused, "400 too long"),
        (b'{"error": {"message": "broken", "code": 500}}', ServerFaulty, "500 broken"),
        (b'{"error": {"message": "busy", "code": 429}}', ServerFaulty, "429 busy"),
        (b"not json", ServerFaulty, "not json"),
        (b'{"text": "hello"}', ServerFaulty, "meta_info"),
        (chunk(3, 0, output_token_logprobs=[]), ServerFaulty, r"^(?=.*\b3 tokens\b).*\b0 logprobs\b"),
        (chunk(1, 0, output_token_logprobs=[[None, 5, None]]), ServerFaulty, r"logprob\b.*\bNone\b"),
        (chunk(1, 0, output_token_logprobs=[[-9999.0, 5, None]]), ServerFaulty, r"logprob\b.*-9999\b"),
        (chunk(1, 0, output_token_logprobs=[[0.5, 5, None]]), ServerFaulty, r"logprob\b.*\b0\.5\b"),
        (chunk(1, 0, finish_reason={"type": "tired"}), ServerFaulty, "'tired'"),
        (
            chunk(0, 0, finish_reason={"type": "abort", "message": "no memory", "status_code": 503}),
            ServerFaulty,
            "503 no memory",
        ),
        (
            chunk(0, 0, finish_reason={"type": "abort", "message": "bad id", "status_code": 400}),
            ServerRefused,
            "400 bad id",
        ),
    ],
)
def test_an_invalid_answer_raises_the_error_class_of_its_cause(
    payload: bytes, kind: type[ServerFailed], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        reader(sent=0).parse_chunk(payload)
    assert type(raised.value) is kind
    assert str(raised.value).startswith("http://here/generate: ")


def test_a_shrinking_token_count_raises_server_faulty() -> None:
    reading = reader()
    reading.parse_chunk(chunk(5, 0))
    with pytest.raises(ServerFaulty, match=r"^(?=.*\b5 tokens\b).*\b4\b"):
        reading.parse_chunk(chunk(4, 0))
