"""Starting a server of a run: its model, its version, its port, its command; and then until it samples.

    config ─▶ model as a directory ─▶ what is installed ─▶ command ─▶ process ─▶ a first token

A free port may be taken by somebody else before the server has it: then it is started again with another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.config import Config
from outpace.engines.servers.choices import kind_of, needs_plugin, python_of
from outpace.engines.servers.starting.addresses import AnyServer, server_at
from outpace.engines.servers.starting.commands import Command, base_environment, server_command
from outpace.engines.servers.starting.launching import HOST, ServerProcess, free_port, port_was_taken, refuse_taken
from outpace.engines.servers.starting.readiness import Say, until_ready
from outpace.engines.servers.starting.versions import Installed, installed
from outpace.errors import BadInput
from outpace.models.loading import resolve_model
from outpace.placement import ON_CPU, GpuAssignment
from outpace.weights.plugin import plugin_path

PORTS_TRIED = 5


@dataclass(frozen=True)
class Started:
    server: AnyServer
    process: ServerProcess

    async def stop(self) -> None:
        try:
            await self.server.close()
        finally:
            await self.process.stop()


@dataclass(frozen=True)
class Recipe:
    """All that a command needs but the port."""

    config: Config
    model: Path
    found: Installed
    plugin: Path | None
    incarnation: str = "outpace"  # of the run that its weights will be labelled for

    @classmethod
    async def of(cls, config: Config, scratch: Path, incarnation: str = "outpace") -> Recipe:
        """`scratch`: where the plugin is laid out. Raises `BadInput`."""
        model = await asyncio.to_thread(resolve_model, config.model.path)
        found = await installed(python_of(config), kind_of(config), {**base_environment(), **config.launch.env})
        plugin = await asyncio.to_thread(plugin_path, scratch) if needs_plugin(config) else None
        return cls(config, model, found, plugin, incarnation)

    def command(self, port: int, gpus: GpuAssignment = ON_CPU) -> Command:
        return server_command(self.config, self.model, port, self.found, self.plugin, gpus)


async def start_server(
    recipe: Recipe,
    index: int,
    log: Path,
    say: Say,
    environment: Mapping[str, str] | None = None,
    gpus: GpuAssignment = ON_CPU,
) -> Started:
    """The server number `index`, once it has sampled a token. `environment`: where its temporary files go, and
    the mark by which a guardian finds it if we are not a part that has one already."""
    first = recipe.config.launch.port
    if first:
        refuse_taken(first + index)
    failure = ""
    for _ in range(1 if first else PORTS_TRIED):
        try:
            return await _start(recipe, first + index if first else free_port(), gpus, log, say, environment or {})
        except _PortTaken as taken:
            failure = str(taken)
            say("somebody else has taken the server's port")
    raise BadInput(failure)


class _PortTaken(Exception):
    """Between our finding it free and the server's asking for it."""


async def _start(
    recipe: Recipe, port: int, gpus: GpuAssignment, log: Path, say: Say, environment: Mapping[str, str]
) -> Started:
    command = recipe.command(port, gpus)
    env = {**command.env, **environment, **recipe.config.launch.env}
    process = await ServerProcess.launch(command.argv, env, log)
    started = Started(server_at(recipe.config, f"http://{HOST}:{port}", recipe.incarnation), process)
    try:
        await until_ready(started.server, process, recipe.config.launch.start_s, say)
        await process.record_shared_memory()
    except BaseException as error:
        taken = isinstance(error, BadInput) and not process.lives and port_was_taken(process.said())
        await started.stop()
        if taken:
            raise _PortTaken(str(error)) from error
        raise
    return started
