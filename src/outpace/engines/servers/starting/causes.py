"""Why a server did not start, out of the log that it has left: one line, with a remedy where there is a known one."""

from __future__ import annotations

import re

from outpace.errors import one_line

_PREFIX = re.compile(r"^(\(\S+ pid=\d+\)\s*)?((ERROR|WARNING|INFO|CRITICAL) [\d:. -]+(\[[^\]]*\] )?)?")
"""What vLLM puts before a line: the process, the level, the time, the place in its code."""

_RAISED = re.compile(r"^[\w.]*(Error|Exception): \S")
_COMPLAINT = re.compile(r"(^|: )error: (?P<said>.+)|^Value error, (?P<value>.+)")
"""Of a command line that cannot be read, and of a setting that is refused; these name the culprit best."""

_DIED = re.compile(r"worker ?proc\b.* died unexpectedly", re.IGNORECASE)
"""Of a process that has ended without a word, as natively. What is raised afterwards only tells of its absence."""

_ECHOES = ("see root cause above", "failed core proc", "validation error for", "enginedeaderror", "cancellederror")
"""What others say of it, who only know that something has happened."""

_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"unrecognized arguments", "this version of the server knows no such flag; look at launch.args"),
    (r"invalid choice|expected (one|at least one) argument|invalid .* value", "look at launch.args"),
    (r"free memory on device", "lower launch.gpu_memory: somebody else has the rest"),
    (r"out of memory|outofmemory|can't allocate|bad_alloc", "lower launch.gpu_memory, engine.slots or engine.context"),
    (r"kv ?cache.* (needed|larger than|is not enough)|no available memory for the cache blocks",
     "lower engine.context, or raise launch.gpu_memory (without a GPU: launch.env VLLM_CPU_KVCACHE_SPACE)"),
    (r"max_model_len .*greater than", "lower engine.context"),
    (_DIED.pattern, "its log may say more; another model.dtype or launch.env may help"),
    (r"address already in use", "give another launch.port, or 0 for a free one"),
    (r"no module named", "launch.python is not the Python of an environment with the server in it"),
    (r"not a local folder|does not appear to have a file|is not a valid model identifier", "look at model.path"),
    (r"unknown .*backend|invalid weight transfer backend|outpace.*not (found|registered)",
     "its environment hides outpace's plugin; leave PYTHONPATH out of launch.env"),
)  # fmt: skip


def cause_of(said: str) -> str:
    """The line of a log that says why its server has ended; empty where none does."""
    lines = [_PREFIX.sub("", line).strip() for line in said.splitlines()]
    lines = [line for line in lines if line and not any(echo in line.lower() for echo in _ECHOES)]
    raised = [line for line in lines if _RAISED.match(line)]
    died = [line for line in lines if _DIED.search(line)]
    return _with_remedy(one_line(_complaint(lines) or (died[:1] or raised or lines or [""])[-1]))


def last_line(said: str) -> str:
    """What the server says it is doing, for people."""
    lines = [_PREFIX.sub("", line).strip() for line in said.splitlines()]
    return one_line(next((line for line in reversed(lines) if line), ""), 120)


def _complaint(lines: list[str]) -> str:
    for line in reversed(lines):
        if match := _COMPLAINT.search(line):
            return match["said"] or match["value"]
    return ""


def _with_remedy(line: str) -> str:
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, line, re.IGNORECASE):
            return f"{line}; {remedy}"
    return line
