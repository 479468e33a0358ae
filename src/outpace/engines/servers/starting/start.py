"""Launching servers: from the config to a server that has sampled its first token.

    config ─▶ model directory ─▶ installed version ─▶ command ─▶ process ─▶ first token

A free port may be taken by another process before the server binds it: then the server is launched again on another
port. While a server starts, its progress is reported every few seconds. A failed start raises one line with the cause:
the server's own error if it exited, otherwise the setting to raise.

One run per server on this machine: two runs that update the same server ruin both. Every engine holds a file lock named
after its server's address in the run's runtime directory, and checks for the same lock in those of other runs. The
kernel releases the lock when the process ends; the file is removed with the runtime directory. Runtime directories are
private, so runs of other users and on other machines are not detected.
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
    """A launched server that is ready."""

    server: AnyServer
    process: ServerProcess

    async def stop(self) -> None:
        try:
            await self.server.close()
        finally:
            await self.process.stop()


@dataclass(frozen=True)
class Recipe:
    """Everything a server command needs except the port."""

    config: Config
    model: Path
    found: Installed
    plugin: Path | None
    incarnation: str = "outpace"  # of the run that labels its weights

    @classmethod
    async def of(cls, config: Config, scratch: Path, incarnation: str = "outpace") -> Recipe:
        """Resolve the model, the installed server version and the plugin, which is copied to `scratch`. Raises
        `BadInput`."""
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
    """Launch server number `index` and wait until it has sampled a token. `environment` sets its temporary directory
    and the mark by which the cleanup process finds it, unless this process already inherits one."""
    first = recipe.config.launch.port
    if first:
        refuse_taken(first + index)
    failure = ""
    for _ in range(1 if first else PORTS_TRIED):
        try:
            return await _start(recipe, first + index if first else free_port(), gpus, log, say, environment or {})
        except _PortTaken as taken:
            failure = str(taken)
            say("another process took the server's port; trying another port")
    raise BadInput(failure)


class _PortTaken(Exception):
    """Another process took the port after we found it free."""


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
