"""Launching servers: from the config to a server that has sampled its first token.

    config ─▶ model directory ─▶ installed version ─▶ command ─▶ process ─▶ first token

A free port may be taken by another process before the server binds it: then the server is launched again on another
port. While a server starts, its progress is reported every few seconds. A failed start raises one line with the cause:
the server's own error if it exited, otherwise the time limit to increase.

Only one run may use a server: two runs that update the same server corrupt each other. Every engine holds a file lock
named after its server's address in its run's runtime directory, and checks the runtime directories of other runs on
this machine for the same lock. The kernel releases the lock when the process ends; the file is removed with the runtime
directory. Runtime directories are private, so runs of other users or on other machines are not detected.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from outpace.config import Config
from outpace.config.engines import server_address
from outpace.config.validation import API_KEY_HINT
from outpace.engines.server.checks import describe_failure, failures_explained
from outpace.engines.server.commands import (
    InstalledServer,
    ServerCommand,
    base_environment,
    installed_server,
    needs_plugin,
    server_command,
    server_kind,
    server_python,
)
from outpace.engines.server.http import HttpClient
from outpace.engines.server.protocol import Server
from outpace.engines.server.server_process import (
    HOST,
    ServerProcess,
    cause_of,
    check_port_free,
    free_port,
    last_line,
    port_was_taken,
)
from outpace.engines.server.sglang import SglangServer
from outpace.engines.server.vllm import VllmServer
from outpace.errors import BadInput, ServerFailed
from outpace.hardware.placement import ON_CPU, GpuAssignment
from outpace.models.loading import resolve_model
from outpace.weights.files import plugin_path

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Poll interval while a server starts."""
REPORT_S = 5.0
"""Interval of progress reports."""
LEFT_PAUSED_S = 10.0
"""A server paused for longer than this was left paused: updates are shorter."""
FIRST_TOKEN_S = 120.0
"""Timeout for the first token, which may compile kernels."""

ProgressCallback = Callable[[str], None]


async def wait_until_ready(server: Server, process: ServerProcess, start_s: float, say: ProgressCallback) -> None:
    """Wait until a launched server has sampled a token. Raises `BadInput` if it exits first or takes too long."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    ended = asyncio.create_task(process.ended())
    reporting = asyncio.create_task(_report_progress(process, say))
    try:
        while not await _probe_once(server, ended, began + start_s - loop.time()):
            if ended.done():
                raise BadInput(describe_exit(ended.result(), process))
            if loop.time() - began >= start_s:
                raise BadInput(_too_slow(start_s, process))
    finally:
        ended.cancel()
        reporting.cancel()


async def wait_until_reachable(server: Server, within_s: float) -> None:
    """Wait up to `within_s` until a server that we did not launch answers, and resume it if it was left paused."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while True:
        try:
            await resume_if_left_paused(server)
            return
        except ServerFailed as failed:
            if loop.time() >= until:
                raise BadInput(describe_failure(server.url, failed)) from failed
        await asyncio.sleep(POLL_S)


async def resume_if_left_paused(server: Server) -> None:
    """Resume a server that was left paused by an earlier run. A short pause may be a running update of another client,
    so wait before resuming. Raises `ServerFailed`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LEFT_PAUSED_S
    while await server.paused():
        if loop.time() >= until:
            log.info("%s was left paused; resuming it", server.url)
            await server.resume(recompute=True)
            return
        await asyncio.sleep(POLL_S)


async def check_sampling(server: Server) -> None:
    """Raise `BadInput` unless the server can sample a token."""
    with failures_explained(server.url):
        await server.probe(FIRST_TOKEN_S)


async def _probe_once(server: Server, ended: asyncio.Task[str], left_s: float) -> bool:
    """Probe once. After a failure wait for the next attempt, or for the process to exit."""
    probing = asyncio.create_task(server.probe(FIRST_TOKEN_S))
    try:
        await asyncio.wait({probing, ended}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        if probing.done():
            probing.result()
            return True
    except ServerFailed:
        await asyncio.wait({ended}, timeout=POLL_S)
    finally:
        probing.cancel()
    return False


async def _report_progress(process: ServerProcess, say: ProgressCallback) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(REPORT_S)
        line = last_line(process.log_text())
        say(f"the server is starting, {loop.time() - began:.0f} s so far{f': {line}' if line else ''}")


def _too_slow(start_s: float, process: ServerProcess) -> str:
    doing = last_line(process.log_text()) or "no output"
    return f"the server was not ready within {start_s:g} s ({doing}); raise launch.start_s or see {process.log_path}"


def describe_exit(how: str, process: ServerProcess) -> str:
    """One line on why a server exited: the error in its log, if any."""
    cause = cause_of(process.log_text())
    if "SIGKILL" in how:
        cause = "the machine may have run out of memory"
    return f"the server {how}{f': {cause}' if cause else ''}; see {process.log_path}"


def server_at(config: Config, url: str, incarnation: str = "outpace") -> Server:
    """The client for a server of the configured kind. `incarnation` identifies this start of the run in weight
    labels. Raises `BadInput`, without revealing the URL, if the URL contains a password."""
    if "@" in url:
        raise BadInput(f"a server URL contains a user name or password; {API_KEY_HINT}")
    engine = config.engine
    http = HttpClient(url, os.environ.get(engine.api_key_env) or None, engine.retries)
    kind = SglangServer if server_kind(config) == "sglang" else VllmServer
    return kind(http, control_s=engine.control_s, seeded=engine.seeded, incarnation=incarnation)


PORTS_TRIED = 5


@dataclass(frozen=True)
class LaunchedServer:
    """A launched server that is ready."""

    server: Server
    process: ServerProcess

    async def stop(self) -> None:
        try:
            await self.server.close()
        finally:
            await self.process.stop()


@dataclass(frozen=True)
class LaunchPlan:
    """Everything a server command needs except the port."""

    config: Config
    model: Path
    found: InstalledServer
    plugin: Path | None
    incarnation: str = "outpace"  # identifies this start of the run in weight labels

    @classmethod
    async def of(cls, config: Config, scratch: Path, incarnation: str = "outpace") -> LaunchPlan:
        """Resolve the model, the installed server version and the plugin, which is copied to `scratch`. Raises
        `BadInput`."""
        model = await asyncio.to_thread(resolve_model, config.model.path)
        found = await installed_server(
            server_python(config), server_kind(config), {**base_environment(), **config.launch.env}
        )
        plugin = await asyncio.to_thread(plugin_path, scratch) if needs_plugin(config) else None
        return cls(config, model, found, plugin, incarnation)

    def command(self, port: int, gpus: GpuAssignment = ON_CPU) -> ServerCommand:
        return server_command(self.config, self.model, port, self.found, self.plugin, gpus)


async def launch_server(
    plan: LaunchPlan,
    index: int,
    log_file: Path,
    say: ProgressCallback,
    environment: Mapping[str, str] | None = None,
    gpus: GpuAssignment = ON_CPU,
) -> LaunchedServer:
    """Launch server number `index` and wait until it has sampled a token. `environment` sets its temporary directory
    and, unless this process has inherited one, the mark by which the cleanup process finds the server."""
    first = plan.config.launch.port
    if first:
        check_port_free(first + index)
    failure = ""
    for _ in range(1 if first else PORTS_TRIED):
        try:
            return await _start(plan, first + index if first else free_port(), gpus, log_file, say, environment or {})
        except _PortTaken as taken:
            failure = str(taken)
            say("another process took the server's port; trying another port")
    raise BadInput(failure)


class _PortTaken(Exception):
    """Another process took the port after we found it free."""


async def _start(
    plan: LaunchPlan,
    port: int,
    gpus: GpuAssignment,
    log_file: Path,
    say: ProgressCallback,
    environment: Mapping[str, str],
) -> LaunchedServer:
    command = plan.command(port, gpus)
    env = {**command.env, **environment, **plan.config.launch.env}
    process = await ServerProcess.launch(command.argv, env, log_file)
    started = LaunchedServer(server_at(plan.config, f"http://{HOST}:{port}", plan.incarnation), process)
    try:
        await wait_until_ready(started.server, process, plan.config.launch.start_s, say)
        await process.record_shared_memory()
    except BaseException as error:
        taken = isinstance(error, BadInput) and not process.alive and port_was_taken(process.log_text())
        await started.stop()
        if taken:
            raise _PortTaken(str(error)) from error
        raise
    return started


_MAX_PATH = 4096


class ServerClaim:
    """Lock on a server, held from construction to `release` or to the end of the process."""

    def __init__(self, url: str, scratch: Path, run: Path) -> None:
        """Raises `BadInput` if another run uses the server. `run`: our run directory, for the errors of other runs."""
        digest = blake2b(repr(server_address(url)).encode(), digest_size=8).hexdigest()
        name = f"server-{digest}.lock"
        self._fd = os.open(scratch / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Shared: a replacement engine of the same run may start before the old one has ended.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            os.pwrite(self._fd, str(run).encode(), 0)
            for other in scratch.parent.glob(f"outpace-*/{name}"):
                if other.parent != scratch and (holder := _holder(other)):
                    raise BadInput(f"{url}: {holder} uses this server; stop that run or use another server")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(lock: Path) -> str | None:
    """The run directory of the lock's holder; None if no living process holds it."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or owned by another user
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, _MAX_PATH, 0).decode(errors="replace") or "another run"
    finally:
        os.close(fd)
    return None
