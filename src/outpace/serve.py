"""`outpace serve`: the servers of a config, started by hand with everything that a run needs of them.

    config ─▶ servers ─▶ what to write into a run's config ─▶ until Ctrl-C ─▶ gone, without orphans

A run is pointed at them by `engine.urls`; they outlive it, and the next run finds them warm.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.config import Config
from outpace.config.files import read_file
from outpace.config.loading import flatten, make_config, parse_arguments
from outpace.engines.servers.choices import kind_of, needs_plugin
from outpace.engines.servers.starting.launching import free_port, keeping_log
from outpace.engines.servers.starting.readiness import why_ended
from outpace.engines.servers.starting.start import Recipe, Started, start_server
from outpace.errors import BadInput, ServerGone
from outpace.observe.startup import Telling
from outpace.placement import placement_of
from outpace.runtime.scratch import Scratch, temporary_files


def serve(file: Path | None, settings: Sequence[str], dry_run: bool = False) -> None:
    """Blocks until Ctrl-C. With `dry_run`, print the commands to type instead."""
    config = serving_config(file, settings)
    asyncio.run(_show(config) if dry_run else _serve(config))


def serving_config(file: Path | None, settings: Sequence[str]) -> Config:
    """That of a run will do: the servers that it names as running are the ones to be started."""
    values: dict[str, Any] = {"engine.kind": "vllm"}
    values |= flatten(read_file(file)) if file is not None else {}
    values |= parse_arguments(settings)
    if urls := values.pop("engine.urls", None):
        _say(f"engine.urls is left out here: serve starts servers, and {', '.join(urls)} is said to run already")
    config = make_config(values)
    if config.engine.kind == "embedded":
        raise BadInput("engine.kind: the embedded engine is part of a run and no server; set vllm or sglang")
    return config


def plugin_home() -> Path:
    """Where a command that somebody types, today or next week, finds the plugin."""
    return Path(os.environ.get("OUTPACE_CACHE") or "~/.cache/outpace").expanduser()


async def _show(config: Config) -> None:
    recipe = await Recipe.of(config, plugin_home())
    for index, gpus in enumerate(placement_of(config).engines):
        port = config.launch.port + index if config.launch.port else free_port()
        print(recipe.command(port, gpus).shown(os.environ))


async def _serve(config: Config) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    scratch = await asyncio.to_thread(Scratch)
    serving = asyncio.create_task(_start_and_stay(config, scratch))
    try:
        await asyncio.wait({serving, asyncio.create_task(told.wait())}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        serving.cancel()
        outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
        await asyncio.to_thread(scratch.remove)
    if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
        raise outcome


async def _start_and_stay(config: Config, scratch: Scratch) -> None:
    """One after the other: two that start at once take each other's processors, and on a GPU each other's memory. The
    log of a server that fails is kept."""
    recipe = await Recipe.of(config, plugin_home())
    environment = scratch.guardian.marked(scratch.guardian.new_mark()) | temporary_files(scratch.path)
    started: list[Started] = []
    try:
        for index, gpus in enumerate(placement_of(config).engines):
            log = scratch.files / f"server-{index}.log"
            _say(f"{kind_of(config)} {recipe.found.version} starts; its log is {log}")
            with keeping_log(log):
                started.append(await start_server(recipe, index, log, Telling(_say), environment, gpus))
        print(_announced(config, [each.server.url for each in started]), flush=True)
        _say("Ctrl-C ends it")
        await _until_one_ends(started)
    finally:
        await asyncio.gather(*(each.stop() for each in started))


async def _until_one_ends(started: Sequence[Started]) -> None:
    ends = {asyncio.create_task(each.process.ended()): each for each in started}
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        with keeping_log(ends[first].process.log_path):
            raise ServerGone(why_ended(first.result(), ends[first].process))
    finally:
        for end in ends:
            end.cancel()


def _announced(config: Config, urls: Sequence[str]) -> str:
    """What a run has to be told, as TOML."""
    addresses = ", ".join(f'"{url}"' for url in urls)
    lines = ["[engine]", f'kind = "{kind_of(config)}"', f"urls = [{addresses}]"]
    if needs_plugin(config):
        lines += ["", "[weights]", f'transport = "{placement_of(config).transport}"']
    return "\n".join(lines)


def _say(line: str) -> None:
    print(f"outpace: {line}", file=sys.stderr, flush=True)
