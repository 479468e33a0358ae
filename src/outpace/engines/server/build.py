"""Builds server engines: launches or connects to a server, checks it, and starts monitoring it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from outpace.config import Config
from outpace.config.engines import PLUGIN_TRANSPORTS
from outpace.engines.server.checks import check_server, expected_token_ids, failures_explained
from outpace.engines.server.commands import server_kind
from outpace.engines.server.launch import (
    LaunchPlan,
    ServerClaim,
    check_sampling,
    launch_server,
    server_at,
    wait_until_reachable,
)
from outpace.engines.server.protocol import STALE, SendWeights, Server, ServerFacts, Transport, TransportTarget
from outpace.engines.server.server_engine import ServerEngine
from outpace.engines.server.server_process import ServerProcess, keep_log_copy
from outpace.engines.server.state import ServerEngineSettings
from outpace.errors import BadInput, ServerFailed
from outpace.hardware.cores import engine_threads
from outpace.hardware.placement import ON_CPU, GpuAssignment, transport_of, uses_gpu
from outpace.runtime.cleanup import temporary_files_environment
from outpace.runtime.registry import TRANSPORTS
from outpace.weights.delta import LocalSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSetup:
    """Identity of one engine of a run, and its directories and GPUs."""

    name: str
    index: int
    url: str  # of a running server; empty: launch one
    incarnation: str
    scratch: Path
    logs: Path
    gpus: GpuAssignment
    weight_files: Path | None = None  # the run's folder in weights.dir


async def build_server_engine(
    config: Config,
    name: str,
    index: int,
    *,
    url: str,
    incarnation: str,
    scratch: Path,
    logs: Path,
    stale: bool,
    gpus: GpuAssignment = ON_CPU,
    send: SendWeights | None = None,
    weight_files: Path | None = None,
) -> ServerEngine:
    """Launch a server, or connect to the one at `url`, check it, and return its started engine. Raises `BadInput`.

    `stale`: this engine replaces an earlier one of the same run. A launched server then has the initial model, which is
    outdated; one at a URL may have any weights. `send` makes the learner send weights over a process group."""
    setup = EngineSetup(name, index, url, incarnation, scratch, logs, gpus, weight_files)
    tokens = asyncio.create_task(expected_token_ids(config.model.path, config.model.trust_remote_code))
    try:
        claim = await _claim(url, setup) if url else None
        try:
            server, process = await (_connect if url else _launch)(config, setup, stale)
        except BaseException:
            _release(claim)
            raise
        try:
            claim = claim or await _claim(server.url, setup)
            facts = await check_server(server, config, await tokens)
            engine = _make_engine(config, setup, server, facts, process, stale, send, claim)
            with failures_explained(server.url):
                await engine.start()
            return engine
        except BaseException:
            _release(claim)
            await server.close()
            if process is not None:
                await process.stop()
            raise
    finally:
        tokens.cancel()


async def _claim(url: str, setup: EngineSetup) -> ServerClaim:
    """Claim the server. In a thread, because another process testing the lock holds it for a moment."""
    return await asyncio.to_thread(ServerClaim, url, setup.scratch, setup.logs.parent)


def _release(claim: ServerClaim | None) -> None:
    if claim is not None:
        claim.release()


async def _launch(config: Config, setup: EngineSetup, stale: bool) -> tuple[Server, ServerProcess | None]:
    """Launch a server. A run that fails to start removes its directory, so errors then name a copy of the log."""
    plan = await LaunchPlan.of(config, setup.scratch, setup.incarnation)
    log_path = setup.logs / f"{setup.name}-server.log"
    with nullcontext() if stale else keep_log_copy(log_path):
        started = await launch_server(
            plan, setup.index, log_path, log.info, temporary_files_environment(setup.scratch), gpus=setup.gpus
        )
    return started.server, started.process


async def _connect(config: Config, setup: EngineSetup, stale: bool) -> tuple[Server, ServerProcess | None]:
    """Connect to a running server. If `stale`, wait up to launch.start_s for it to come back, else fail at once."""
    server = server_at(config, setup.url, setup.incarnation)
    try:
        await wait_until_reachable(server, config.launch.start_s if stale else 0.0)
        await check_server(server, config, {})  # before sampling, which may take a while
        if not stale:
            await _warn_about_other_clients(server)
        await check_sampling(server)
    except BaseException:
        await server.close()
        raise
    return server, None


async def _warn_about_other_clients(server: Server) -> None:
    """Warn about requests of other clients, such as a run on another machine. `ServerClaim` cannot detect that run, and
    its updates would replace our weights."""
    try:
        pressure = await server.pressure()
    except ServerFailed as error:
        log.info("%s does not report its load: %s", server.url, error)
        return
    if count := pressure.running + pressure.waiting:
        log.warning(
            "the server is busy with %d requests of other clients; if another run updates %s, neither run can train on "
            "its samples; stop that run or use another server",
            count,
            server.url,
        )


def _make_engine(
    config: Config,
    setup: EngineSetup,
    server: Server,
    facts: ServerFacts,
    process: ServerProcess | None,
    stale: bool,
    send: SendWeights | None,
    claim: ServerClaim | None = None,
) -> ServerEngine:
    engine = config.engine
    slots = min(engine.resolved_slots, int(facts.details.get("slots") or engine.resolved_slots))
    counts_cores = process is not None and not uses_gpu(config)
    settings = ServerEngineSettings(
        name=setup.name,
        incarnation=setup.incarnation,
        version=STALE if stale or process is None else 0,
        context=min((most for most in (engine.context, facts.context) if most is not None), default=None),
        idle_s=engine.idle_s,
        control_s=engine.control_s,
        probe_s=engine.probe_s,
        probe_deadline_s=engine.probe_deadline_s,
        kv=engine.kv,
        pins=config.lora.rank > 0,
        slots=slots,
        threads=engine_threads(config) if counts_cores else 0,
    )
    weights = transport_for(config, setup, server, send)
    return ServerEngine(server, weights, settings, process, claim)


def transport_for(config: Config, setup: EngineSetup, server: Server, send: SendWeights | None) -> Transport:
    """The transport selected by the config. Files are written to a directory of this engine."""
    kind, name, adapters = server_kind(config), transport_of(config), config.lora.rank > 0
    if kind == "sglang" and name in PLUGIN_TRANSPORTS:
        raise BadInput(f'weights.transport: sglang loads weights from files, not by "{name}"; remove this setting')
    if adapters and name in PLUGIN_TRANSPORTS:
        name = "files"
    target = TransportTarget(
        kind=kind,
        http=server.http,
        control_s=config.engine.control_s,
        directory=(setup.weight_files or setup.scratch) / f"{setup.name}-weights",
        adapters=adapters,
        copy=LocalSnapshot(_created(setup.scratch / f"{setup.name}-copy")) if config.weights.delta else None,
        send=send,
        uses_gpu=uses_gpu(config),
        label=server.label_of,
        recompute=config.engine.kv == "recompute",
    )
    made: Transport = TRANSPORTS.find(name)(target)
    return made


def _created(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
