"""Judging answers in a fork, where one that never comes to an end costs nothing but its own score.

    this process ── fork ──▶ judge, one answer after the other ── a number each ──▶ this process
                 ── `cpu_s` used up, or nothing heard for SILENCE_S: that answer is 0.0, fork again for the rest

Computer algebra can be kept busy for ever by a short text, in one step that hears no Python signal. The limit is
processor time, kept by the kernel, so that a busy machine makes no answer wrong; the clock is only for a fork that
waits for something.
"""

from __future__ import annotations

import math
import os
import select
import signal
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from outpace.runtime.lifeline import die_with_parent

SILENCE_S = 25.0

VERDICT = struct.Struct("<d")
"""One score; None is not a number."""

T = TypeVar("T")


def judged(judge: Callable[[T], float | None], answers: Sequence[T], cpu_s: float) -> list[float | None]:
    """What `judge` says of each answer; 0.0 for one that takes longer than `cpu_s` or breaks the process."""
    scores: list[float | None] = []
    while len(scores) < len(answers):
        scores += _judged_in_one(judge, answers[len(scores) :], cpu_s)
    return scores


def _judged_in_one(judge: Callable[[T], float | None], answers: Sequence[T], cpu_s: float) -> list[float | None]:
    """The scores of the first answers, at least one: all, or up to the one that took too long or broke the process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_judge(judge, answers, cpu_s, writing)
    os.close(writing)
    try:
        scores: list[float | None] = []
        while len(scores) < len(answers):
            said = os.read(reading, VERDICT.size) if select.select([reading], [], [], SILENCE_S)[0] else b""
            scores.append(_score(said))
            if not said:
                break
        return scores
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _score(said: bytes) -> float | None:
    if len(said) < VERDICT.size:
        return 0.0
    (score,) = VERDICT.unpack(said)
    return None if math.isnan(score) else float(score)


def _be_judge(judge: Callable[[T], float | None], answers: Sequence[T], cpu_s: float, writing: int) -> None:
    """In the fork, which never returns; whatever goes wrong, the answer at hand stays without a verdict."""
    try:
        die_with_parent()
        for answer in answers:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # at its end the kernel ends this process
            score = judge(answer)
            os.write(writing, VERDICT.pack(math.nan if score is None else score))
    finally:
        os._exit(0)
