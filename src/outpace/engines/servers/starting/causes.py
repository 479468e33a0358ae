"""MERGED"""

from __future__ import annotations

import re

from outpace.errors import one_line

_PREFIX = re.compile(r"^(\(\S+ pid=\d+\)\s*)?((ERROR|WARNING|INFO|CRITICAL) [\d:. -]+(\[[^\]]*\] )?)?")
"""vLLM's log prefix: process, level, time, source location."""

_RAISED = re.compile(r"^[\w.]*(Error|Exception): \S")
_ARGUMENT_ERROR = re.compile(r"(^|: )error: (?P<said>.+)|^Value error, (?P<value>.+)")
"""Errors of the command-line parser and of rejected settings; the most specific messages."""

_DIED = re.compile(r"worker ?proc\b.* died unexpectedly", re.IGNORECASE)
"""A worker that died without a message, e.g. by a native crash. Later exceptions are only consequences."""

_FOLLOW_UPS = ("see root cause above", "failed core proc", "validation error for", "enginedeaderror", "cancellederror")
"""Follow-up messages of other processes, which do not name the cause."""

_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"unrecognized arguments", "this server version does not have that flag; check launch.args"),
    (r"invalid choice|expected (one|at least one) argument|invalid .* value", "check launch.args"),
    (r"free memory on device", "lower launch.gpu_memory: another process uses the rest"),
    (r"out of memory|outofmemory|can't allocate|bad_alloc", "lower launch.gpu_memory, engine.slots or engine.context"),
    (r"kv ?cache.* (needed|larger than|is not enough)|no available memory for the cache blocks",
     "lower engine.context or raise launch.gpu_memory (on a CPU: launch.env VLLM_CPU_KVCACHE_SPACE)"),
    (r"max_model_len .*greater than", "lower engine.context"),
    (_DIED.pattern, "see its log; try another model.dtype or launch.env"),
    (r"address already in use", "set another launch.port, or 0 for a free port"),
    (r"no module named", "set launch.python to the Python of an environment that has the server installed"),
    (r"not a local folder|does not appear to have a file|is not a valid model identifier", "check model.path"),
    (r"unknown .*backend|invalid weight transfer backend|outpace.*not (found|registered)",
     "the server cannot import outpace's plugin; remove PYTHONPATH from launch.env"),
)  # fmt: skip


def cause_of(said: str) -> str:
    """The log line that explains why a server exited, with a remedy if one is known; empty if there is none."""
    lines = [_PREFIX.sub("", line).strip() for line in said.splitlines()]
    lines = [line for line in lines if line and not any(follow_up in line.lower() for follow_up in _FOLLOW_UPS)]
    raised = [line for line in lines if _RAISED.match(line)]
    died = [line for line in lines if _DIED.search(line)]
    return _with_remedy(one_line(_argument_error(lines) or (died[:1] or raised or lines or [""])[-1]))


def last_line(said: str) -> str:
    """The last non-empty log line without its prefix, to show progress."""
    lines = [_PREFIX.sub("", line).strip() for line in said.splitlines()]
    return one_line(next((line for line in reversed(lines) if line), ""), 120)


def _argument_error(lines: list[str]) -> str:
    for line in reversed(lines):
        if match := _ARGUMENT_ERROR.search(line):
            return match["said"] or match["value"]
    return ""


def _with_remedy(line: str) -> str:
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, line, re.IGNORECASE):
            return f"{line}; {remedy}"
    return line
