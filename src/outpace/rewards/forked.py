"""MERGED"""

from __future__ import annotations

import os
import select
import signal
import struct
from collections.abc import Callable, Sequence
from math import isnan, nan
from typing import TypeVar

from outpace.runtime.lifeline import die_with_parent

SILENCE_S = 25.0
"""Wall-clock time without a score after which a fork counts as blocked."""

SCORE_RECORD = struct.Struct("<d")
"""One score; NaN encodes None."""

T = TypeVar("T")


def judged(scorer: Callable[[T], float | None], answers: Sequence[T], cpu_s: float) -> list[float | None]:
    """Return `scorer(answer)` for each answer; 0.0 for one that exceeds `cpu_s` of CPU time or crashes the fork."""
    scores: list[float | None] = []
    while len(scores) < len(answers):
        scores += _score_in_one_fork(scorer, answers[len(scores) :], cpu_s)
    return scores


def _score_in_one_fork(scorer: Callable[[T], float | None], answers: Sequence[T], cpu_s: float) -> list[float | None]:
    """Score answers in one fork until all are done or one times out or crashes, inclusive: at least one score."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_fork(scorer, answers, cpu_s, writing)
    os.close(writing)
    try:
        scores: list[float | None] = []
        while len(scores) < len(answers):
            record = os.read(reading, SCORE_RECORD.size) if select.select([reading], [], [], SILENCE_S)[0] else b""
            scores.append(_decode_score(record))
            if not record:
                break
        return scores
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _decode_score(record: bytes) -> float | None:
    if len(record) < SCORE_RECORD.size:
        return 0.0
    (score,) = SCORE_RECORD.unpack(record)
    return None if isnan(score) else float(score)


def _run_fork(scorer: Callable[[T], float | None], answers: Sequence[T], cpu_s: float, writing: int) -> None:
    """Body of the fork; never returns. On any failure the current answer gets no score."""
    try:
        die_with_parent()
        for answer in answers:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # on expiry the kernel ends this process
            score = scorer(answer)
            os.write(writing, SCORE_RECORD.pack(nan if score is None else score))
    finally:
        os._exit(0)
