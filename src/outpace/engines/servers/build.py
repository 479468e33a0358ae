"""From the config to a door that is open: a server started or found, checked, and watched from then on."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from outpace.config import Config
from outpace.engines.servers.checks import check, trouble
from outpace.engines.servers.choices import kind_of
from outpace.engines.servers.door.door import Door, DoorSettings
from outpace.engines.servers.door.health import HealthMachine
from outpace.engines.servers.door.limits import Limit
from outpace.engines.servers.spec import STALE, Facts, Transport, Wanted
from outpace.engines.servers.starting.addresses import AnyServer, server_at
from outpace.engines.servers.starting.claims import ServerClaim
from outpace.engines.servers.starting.launching import ServerProcess, keeping_log
from outpace.engines.servers.starting.readiness import sampled_once, until_reached
from outpace.engines.servers.starting.start import Recipe, start_server
from outpace.engines.servers.starting.tokens import tokens_of
from outpace.engines.servers.transports.adapters import AdapterTransport
from outpace.engines.servers.transports.collective import CollectiveTransport, Send
from outpace.engines.servers.transports.files import FilesTransport
from outpace.engines.servers.transports.memory import MemoryTransport
from outpace.engines.servers.transports.sglang import SglangAdapters, SglangFiles
from outpace.errors import BadInput, ServerFailed
from outpace.models.loading import BUILT_IN, SMOLLM2, resolve_model
from outpace.placement import ON_CPU, GpuAssignment, transport_of, uses_gpu
from outpace.resources import engine_threads
from outpace.runtime.scratch import temporary_files
from outpace.weights.local import LocalSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Which engine of which start of a run it is, and where it may leave things."""

    name: str
    index: int
    url: str  # of a server that is running; empty: one is to be started
    incarnation: str
    scratch: Path
    logs: Path
    gpus: GpuAssignment


async def build_door(
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
    send: Send | None = None,
) -> Door:
    """Raises `BadInput` where there can be no such server.

    `stale`: this engine was there before, and the run has gone on. A server that we start holds the model that the run
    has begun with, which then is the wrong one; one that we find may hold anything. `send` makes the learner send
    weights by a collective."""
    place = Place(name, index, url, incarnation, scratch, logs, gpus)
    tokens = asyncio.create_task(tokens_of(config.model.path, config.model.trust_remote_code))
    try:
        claim = await _claimed(url, place) if url else None
        try:
            server, process = await (_found if url else _started)(config, place, stale)
        except BaseException:
            _release(claim)
            raise
        try:
            claim = claim or await _claimed(server.url, place)
            facts = await check(server, wanted(config, await tokens))
            door = _door(config, place, server, facts, process, stale, send, claim)
            return await _open(door, server)
        except BaseException:
            _release(claim)
            await server.close()
            if process is not None:
                await process.stop()
            raise
    finally:
        tokens.cancel()


async def _claimed(url: str, place: Place) -> ServerClaim:
    """On a thread: whoever tests the lock holds it for a moment."""
    return await asyncio.to_thread(ServerClaim, url, place.scratch, place.logs.parent)


def _release(claim: ServerClaim | None) -> None:
    if claim is not None:
        claim.release()


async def _started(config: Config, place: Place, stale: bool) -> tuple[AnyServer, ServerProcess | None]:
    """A run that does not get under way leaves no directory behind: whoever is told of the log finds a copy."""
    recipe = await Recipe.of(config, place.scratch, place.incarnation)
    its_log = place.logs / f"{place.name}-server.log"
    with nullcontext() if stale else keeping_log(its_log):
        started = await start_server(
            recipe, place.index, its_log, log.info, temporary_files(place.scratch), gpus=place.gpus
        )
    return started.server, started.process


async def _found(config: Config, place: Place, stale: bool) -> tuple[AnyServer, ServerProcess | None]:
    """One that was there before may be about to come back; one that never was is a mistake, and told at once."""
    server = server_at(config, place.url, place.incarnation)
    try:
        await until_reached(server, config.launch.start_s if stale else 0.0)
        await check(server, wanted(config, {}))  # before anything is sampled: that may take a while
        if not stale:
            await _warn_of_others(server)
        await sampled_once(server)
    except BaseException:
        await server.close()
        raise
    return server, None


async def _warn_of_others(server: AnyServer) -> None:
    """Requests that run before we have sent any are somebody else's: perhaps a run on another machine, which a
    `ServerClaim` does not see, and whose updates would replace our weights."""
    try:
        pressure = await server.pressure()
    except ServerFailed as error:
        log.info("%s does not say how busy it is: %s", server.url, error)
        return
    if count := pressure.running + pressure.waiting:
        log.warning(
            "the server is busy with requests of others, %d of them: if another run updates %s, neither can train on "
            "what it samples; stop that run, or take another server",
            count,
            server.url,
        )


async def _open(door: Door, server: AnyServer) -> Door:
    try:
        await door.start()
    except ServerFailed as failed:
        raise BadInput(trouble(server.url, failed)) from failed
    return door


def wanted(config: Config, tokens: dict[str, list[int]]) -> Wanted:
    return Wanted(
        model=_model_name(config.model.path),
        dtype=config.model.dtype,
        context=config.engine.context,
        tokenizer=tokens,
        transport=transport_of(config),
        adapters=config.lora.rank > 0,
        temperature=config.rollout.temperature,
        lora_rank=config.lora.rank,
    )


def _model_name(path: str) -> str:
    """The directory, where the model is one of this machine; the hub's name otherwise."""
    is_here = path in BUILT_IN or path == SMOLLM2 or Path(path).expanduser().exists()
    return str(resolve_model(path)) if is_here else path


def _door(
    config: Config,
    place: Place,
    server: AnyServer,
    facts: Facts,
    process: ServerProcess | None,
    stale: bool,
    send: Send | None,
    claim: ServerClaim | None = None,
) -> Door:
    engine = config.engine
    slots = min(engine.resolved_slots, int(facts.details.get("slots") or engine.resolved_slots))
    counts_cores = process is not None and not uses_gpu(config)
    settings = DoorSettings(
        name=place.name,
        incarnation=place.incarnation,
        version=STALE if stale or process is None else 0,
        context=min((most for most in (engine.context, facts.context) if most is not None), default=None),
        retries=engine.retries,
        idle_s=engine.idle_s,
        control_s=engine.control_s,
        probe_s=engine.probe_s,
        probe_deadline_s=engine.probe_deadline_s,
        kv=engine.kv,
        pins=config.lora.rank > 0,
        slots=slots,
        threads=engine_threads(config) if counts_cores else 0,
    )
    weights = transport_for(config, place, server, send)
    return Door(server, weights, HealthMachine(), Limit(slots), settings, process, claim)


def transport_for(config: Config, place: Place, server: AnyServer, send: Send | None) -> Transport:
    """How weights get there. What lies in files lies in a directory of this engine's own."""
    http, control_s, name = server.http, config.engine.control_s, transport_of(config)
    directory = _files_of(config, place)
    copy = LocalSnapshot(_made(place.scratch / f"{place.name}-copy")) if config.weights.delta else None
    if kind_of(config) == "sglang":
        if name != "files":
            raise BadInput(f'weights.transport: sglang takes weights as files, not by "{name}"; leave this out')
        adapts = config.lora.rank > 0
        return SglangAdapters(http, control_s, directory) if adapts else SglangFiles(http, control_s, directory, copy)
    if config.lora.rank:
        return AdapterTransport(http, control_s, directory)
    if name == "files":
        return FilesTransport(http, control_s, directory, copy)
    memory = MemoryTransport(http, control_s, copy)
    if name != "collective":
        return memory
    assert send is not None, "a collective has two ends"
    return CollectiveTransport(memory, send, "nccl" if uses_gpu(config) else "gloo", control_s)


def _files_of(config: Config, place: Place) -> Path:
    """In memory, unless the servers can read a directory that everybody shares: there another run may have its own."""
    shared = Path(config.weights.dir).expanduser() / place.incarnation if config.weights.dir else place.scratch
    return shared / f"{place.name}-weights"


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
