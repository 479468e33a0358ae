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
    asked: list[int] = []

    def measure(_: Decoder, threads: int) -> float:
        asked.append(threads)
        return seconds[f"t{threads}"]

    monkeypatch.setattr(load_decoder, "_step_seconds", measure)
    return asked


def test_threads_that_do_not_help_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, t1=1.0, t2=0.99, t4=1.5)
    assert load_decoder.tune_threads(cast(Decoder, decoder()), 4) == 1


def test_threads_that_help_are_used_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = costs(monkeypatch, t1=1.0, t2=0.5, t4=0.3, t6=0.2)
    assert load_decoder.tune_threads(cast(Decoder, decoder()), 6) == 6
    assert asked == [1, 2, 4, 6]


def test_the_decoder_is_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, t1=1.0, t2=0.5)
    used = decoder()
    load_decoder.tune_threads(used, 2)
    assert used.cleared == [0, 1, 2]


def test_where_bits_matter_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = costs(monkeypatch)
    assert load_decoder.tune_threads(cast(Decoder, decoder(deterministic=True)), 2) == 2
    assert asked == []
