"""Requests that share the prefill of a prompt get the same results as requests that are served alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from outpace.engines.embedded.decode_batch import DecodeBatch, FinishedRequest, KvPolicy
from outpace.engines.embedded.load_decoder import DecoderPath, build_decoder
from outpace.types import Generation, Sampling
from support import examples

REQUESTS = 12


@dataclass(frozen=True)
class Turn:
    """What happens before one turn of the batch."""

    prompts: list[int]  # of the requests that arrive
    aborted: int | None  # index of a request
    new_weights: bool


def some_turns() -> st.SearchStrategy[list[Turn]]:
    turn = st.builds(
        Turn,
        st.lists(st.integers(0, 2), max_size=4),
        st.none() | st.integers(0, REQUESTS - 1),
        st.sampled_from([False, False, False, True]),
    )
    return st.lists(turn, min_size=1, max_size=8)


@pytest.mark.parametrize(("family", "path", "kv"), [("llama", "fast", "keep"), ("gpt2", "general", "recompute")])
def test_a_shared_prefill_does_not_change_tokens_logprobs_or_versions(
    family: str, path: DecoderPath, kv: KvPolicy, model_of: Callable[..., PreTrainedModel],
    prompts: Callable[..., list[np.ndarray]],
) -> None:  # fmt: skip
    decoder = build_decoder(model_of(family), REQUESTS, None, deterministic=False, path=path)
    weights = [decoder.prepare(dict(model_of(family, seed=seed).named_parameters())) for seed in range(2)]
    batch = DecodeBatch(decoder, 0, kv, None)
    alone = [DecodeBatch(decoder.sibling(weights[0], 1), 0, kv, None) for _ in range(REQUESTS)]
    given_prompts, versions = prompts(1, 7, 20), count(1)

    def serve(turns: list[Turn]) -> tuple[dict[str, Generation], dict[str, Generation]]:
        """Serve the same requests together and each in a batch of its own, turn by turn."""
        together: list[FinishedRequest] = []
        apart: list[FinishedRequest] = []
        requests = 0
        for turn in turns:
            for prompt in turn.prompts[: REQUESTS - requests]:
                sampling = Sampling(max_tokens=2 + 3 * (requests % 4), seed=requests, temperature=float(requests % 2))
                for each in (batch, alone[requests]):
                    each.submit(str(requests), given_prompts[prompt], sampling, 0)
                requests += 1
            together += batch.abort({str(turn.aborted)})
            apart += [done for each in alone for done in each.abort({str(turn.aborted)})]
            if turn.new_weights:
                version = next(versions)
                for each in (batch, *alone):
                    each.swap(weights[version % 2], version)
            together += batch.advance()
            apart += [done for each in alone for done in each.advance()]
        while batch.has_work:
            together += batch.advance()
            apart += [done for each in alone for done in each.advance()]
        return results(together, requests), results(apart, requests)

    @examples(25)
    @given(turns=some_turns())
    def any_turns(turns: list[Turn]) -> None:
        together, apart = serve(turns)
        for name, generation in together.items():
            assert generation.tokens.tolist() == apart[name].tokens.tolist()
            assert generation.versions.tolist() == apart[name].versions.tolist()
            assert generation.stop == apart[name].stop
            np.testing.assert_allclose(generation.logprobs, apart[name].logprobs, atol=1e-4)

    any_turns()
    assert batch.shared_tokens > 0


def results(finished: list[FinishedRequest], requests: int) -> dict[str, Generation]:
    assert len(finished) == requests
    return {done.id: done.result for done in finished if isinstance(done.result, Generation)}
