from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from learner.small import make_llama
from outpace.engines.embedded import load_decoder
from outpace.engines.embedded.decoder import Decoder
from outpace.engines.embedded.load_decoder import DecoderPath, build_decoder


def decoder(deterministic: bool = False) -> Any:
    return SimpleNamespace(deterministic=deterministic, slots=3)


def costs(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[int]:
    measured: list[int] = []

    def measure(_: Decoder, threads: int) -> float:
        measured.append(threads)
        return seconds[f"t{threads}"]

    monkeypatch.setattr(load_decoder, "_step_seconds", measure)
    return measured


def test_thread_tuning_keeps_one_thread_when_more_do_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, t1=1.0, t2=0.99, t4=1.5)
    assert load_decoder.tune_threads(cast(Decoder, decoder()), 4) == 1


def test_thread_tuning_uses_helpful_threads_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = costs(monkeypatch, t1=1.0, t2=0.5, t4=0.3, t6=0.2)
    assert load_decoder.tune_threads(cast(Decoder, decoder()), 6) == 6
    assert measured == [1, 2, 4, 6]


@pytest.mark.parametrize("path", ["fast", "general"])
def test_thread_tuning_does_not_change_what_follows(path: DecoderPath) -> None:
    tuned, fresh = (build_decoder(make_llama(0), 3, None, deterministic=False, path=path) for _ in range(2))
    load_decoder.tune_threads(tuned, 2)
    torch.set_num_threads(1)
    prompt, token, position = np.array([3, 1, 2], dtype=np.int32), np.array([5, 4]), np.array([3, 0])
    for decoder in (tuned, fresh):
        decoder.prefill([0], [prompt])
    assert torch.equal(tuned.step(token, position), fresh.step(token, position))


def test_thread_tuning_is_skipped_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = costs(monkeypatch)
    assert load_decoder.tune_threads(cast(Decoder, decoder(deterministic=True)), 2) == 2
    assert measured == []
