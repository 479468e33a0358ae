from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outpace.engines.embedded import load_decoder
from outpace.engines.embedded.decoder import Decoder


def decoder(deterministic: bool = False) -> Any:
    cleared: list[int] = []
    return SimpleNamespace(deterministic=deterministic, slots=3, clear=cleared.append, cleared=cleared)


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


def test_thread_tuning_leaves_the_decoder_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, t1=1.0, t2=0.5)
    used = decoder()
    load_decoder.tune_threads(used, 2)
    assert used.cleared == [0, 1, 2]


def test_thread_tuning_is_skipped_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = costs(monkeypatch)
    assert load_decoder.tune_threads(cast(Decoder, decoder(deterministic=True)), 2) == 2
    assert measured == []
