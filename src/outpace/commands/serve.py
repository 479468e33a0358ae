"""`outpace serve`: start the inference servers of a config with all options that a run needs.

    config ─▶ start servers ─▶ print `[engine]` settings for a run ─▶ wait for Ctrl-C ─▶ stop, no orphaned processes

A run connects to them through `engine.urls`. They keep running after it ends, so the next run starts with warm servers.
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
from outpace.config.load import combine, file_settings, make_config, parse_arguments
from outpace.engines.server.commands import needs_plugin, server_kind
from outpace.engines.server.launch import LaunchedServer, LaunchPlan, describe_exit, launch_server
from outpace.engines.server.server_process import free_port, keep_log_copy
from outpace.errors import BadInput, ServerGone
from outpace.hardware.placement import GpuAssignment, assign_servers, placement_of, visible_gpus
from outpace.runtime.cleanup import RuntimeDirectory, temporary_files_environment


def serve(file: Path | None, settings: Sequence[str], dry_run: bool = False, all_gpus: bool = False) -> None:
    """Start the servers and block until Ctrl-C. `dry_run`: only print the server commands. `all_gpus`: leave no GPU to
    a learner, which runs on another machine."""
    config = serving_config(file, settings)
    gpus = assign_servers(config, visible_gpus(config)) if all_gpus else placement_of(config).engines
    transport = "files" if all_gpus else placement_of(config).transport
    asyncio.run(_print_commands(config, gpus) if dry_run else _serve(config, gpus, transport))


def serving_config(file: Path | None, settings: Sequence[str]) -> Config:
    """Load the config. The config of a run works too: its `engine.urls` is ignored, since servers are started here."""
    values: dict[str, Any] = file_settings(file) if file is not None else {}
    overrides = parse_arguments(settings)
    values.setdefault("engine.kind", overrides.get("engine.kind", "vllm"))
    ignored = [*(values.pop("engine.urls", None) or ()), *(overrides.pop("engine.urls", None) or ())]
    if ignored:
        _report(f"engine.urls: ignoring {', '.join(ignored)}; serve starts its own servers")
    config = make_config(combine(values, overrides))
    if config.engine.kind == "embedded":
        raise BadInput("engine.kind: the embedded engine runs inside a run and cannot be served; set vllm or sglang")
    return config


def plugin_home() -> Path:
    """Return a permanent directory for the plugin, so that printed commands keep working."""
    return Path(os.environ.get("OUTPACE_CACHE") or "~/.cache/outpace").expanduser()


async def _print_commands(config: Config, placed: Sequence[GpuAssignment]) -> None:
    plan = await LaunchPlan.of(config, plugin_home())
    for index, gpus in enumerate(placed):
        port = config.launch.port + index if config.launch.port else free_port()
        print(plan.command(port, gpus).shell_command(os.environ))


async def _serve(config: Config, placed: Sequence[GpuAssignment], transport: str) -> None:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    runtime_dir = await asyncio.to_thread(RuntimeDirectory)
    serving = asyncio.create_task(_run_servers(config, placed, transport, runtime_dir))
    try:
        await asyncio.wait({serving, asyncio.create_task(signalled.wait())}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        serving.cancel()
        outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
        await asyncio.to_thread(runtime_dir.remove)
    if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
        raise outcome


async def _run_servers(
    config: Config, placed: Sequence[GpuAssignment], transport: str, runtime_dir: RuntimeDirectory
) -> None:
    """Start the servers and run until one of them exits. Keeps the log of a server that fails.

    Servers start in sequence: in parallel they would compete for CPU and, on a shared GPU, for memory."""
    plan = await LaunchPlan.of(config, plugin_home())
    environment = runtime_dir.cleanup.marked(runtime_dir.cleanup.new_mark()) | temporary_files_environment(
        runtime_dir.path
    )
    started: list[LaunchedServer] = []
    try:
        for index, gpus in enumerate(placed):
            log = runtime_dir.files / f"server-{index}.log"
            _report(f"starting {server_kind(config)} {plan.found.version}; log: {log}")
            with keep_log_copy(log):
                started.append(await launch_server(plan, index, log, _report, environment, gpus))
        print(_engine_toml(config, [each.server.url for each in started], transport), flush=True)
        _report("press Ctrl-C to stop")
        await _raise_when_one_exits(started)
    finally:
        await asyncio.gather(*(each.stop() for each in started))


async def _raise_when_one_exits(started: Sequence[LaunchedServer]) -> None:
    exits = {asyncio.create_task(each.process.ended()): each for each in started}
    try:
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        with keep_log_copy(exits[first].process.log_path):
            raise ServerGone(describe_exit(first.result(), exits[first].process))
    finally:
        for task in exits:
            task.cancel()


def _engine_toml(config: Config, urls: Sequence[str], transport: str) -> str:
    """Return the settings that a run needs to use these servers, as TOML."""
    addresses = ", ".join(f'"{url}"' for url in urls)
    lines = ["[engine]", f'kind = "{server_kind(config)}"', f"urls = [{addresses}]"]
    if needs_plugin(config):
        lines += ["", "[weights]", f'transport = "{transport}"']
    return "\n".join(lines)


def _report(line: str) -> None:
    print(f"outpace: {line}", file=sys.stderr, flush=True)
