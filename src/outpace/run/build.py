"""Component specs and builders.

    controller:       ComponentSpecs(config, ...) ─▶ one ComponentSpec per component ─▶ runtime.start
    child (or inline): build_engine / build_learner / build_worker (spec, peers) ─▶ the component

`spec.settings` holds everything a component gets: the resolved config and a few values of this start of the run. Only
engines and the learner import torch; a worker must not.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outpace.config import Config
from outpace.config.sections import ModelConfig
from outpace.errors import BadInput
from outpace.hardware.cores import available_cores, engine_threads, learner_shares_cores, learner_threads, shares_cores
from outpace.hardware.placement import ON_CPU, GpuAssignment, learner_name, placement_of
from outpace.monitoring.run_directory import WEIGHTS_FOLDER
from outpace.protocols import Engine, Learner, TaskStream
from outpace.run.learner_group import rank_environment
from outpace.runtime import by_value
from outpace.runtime.cleanup import temporary_files_environment
from outpace.runtime.components import START_DEADLINE_S, ComponentSpec, Resources, RestartSettings
from outpace.runtime.reconnect import reconnecting_proxy
from outpace.runtime.references import load_function
from outpace.runtime.torchrun import TorchrunProcess, torchrun_process
from outpace.types import FleetMember

if TYPE_CHECKING:
    from outpace.hardware.cores import CoreSharing, Role
    from outpace.learner.ranks import Ranks
    from outpace.rollouts.build import BuiltRollout


LEARNER = "learner"
PRODUCER = "producer"
SERVER_GRACE_S = 60.0
"""Added to `launch.start_s`, so that an engine component can report why its server did not start."""


def engine_name(index: int) -> str:
    return f"engine-{index}"


class ComponentSettings(msgspec.Struct, frozen=True):
    """Settings of one component in one start of a run."""

    config: dict[str, Any]
    incarnation: str
    run_dir: str
    scratch: str
    torchrun: TorchrunProcess | None = None  # the controller's; None: all processes are its children
    index: int = 0  # of an engine, or the rank of a learner
    url: str = ""  # of a running server; empty for embedded engines and servers to launch. Producer: learner's socket

    @property
    def parsed(self) -> Config:
        return Config.model_validate(self.config)

    @property
    def journal(self) -> Path:
        return Path(self.run_dir) / "journal"

    @property
    def several_machines(self) -> bool:
        """Whether the learner runs on several machines."""
        return self.torchrun is not None and self.torchrun.several_machines

    @property
    def snapshots(self) -> Path:
        """Directory in which the learner publishes weights: in memory, or on disk if several machines write them."""
        if not self.several_machines:
            return Path(self.scratch) / "weights"
        return (self.weight_files or Path(self.run_dir) / WEIGHTS_FOLDER) / "learner"

    @property
    def weight_files(self) -> Path | None:
        """This run's folder in `weights.dir`, which other runs may use too. If the learner runs on several machines,
        every start of the run uses the same folder and removes what a killed start left."""
        if (folder := self.parsed.weights.dir) is None:
            return None
        of_run = hashlib.sha256(self.run_dir.encode()).hexdigest()[:16]
        return Path(folder).expanduser() / (of_run if self.several_machines else self.incarnation)


class ComponentSpecs:
    """Builds the spec of every component for one start of a run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        runtime_dir: Path,
        code: bytes = b"",
        learner_code: bytes = b"",
        engine_code: bytes = b"",
        producer_code: bytes | None = None,
    ) -> None:
        """`producer_code`: None if the run has no data producer."""
        self.placement = placement_of(config)
        # Child processes see only their own GPUs, so settings that depend on all GPUs are resolved here.
        weights = config.weights.model_copy(update={"transport": self.placement.transport})
        config = self._config = config.model_copy(update={"weights": weights})
        self._settings = settings = ComponentSettings(
            config.model_dump(), secrets.token_hex(8), str(run_dir.absolute()), str(runtime_dir), torchrun_process()
        )
        folders = (run_dir / WEIGHTS_FOLDER if settings.several_machines else None, settings.weight_files)
        self.weight_folders = list(filter(None, folders))  # on disk, removed with the run
        self._shared_settings: dict[str, Any] = msgspec.to_builtins(settings)
        self._token = secrets.token_hex(16)
        self._logs = run_dir.absolute() / "logs"
        self._runtime_dir = runtime_dir
        self._code = code
        self._learner_code = learner_code
        self._engine_code = engine_code
        self._producer_code = producer_code
        self.sockets: dict[str, str] = {}  # engine name -> socket path
        self.assigned: dict[str, GpuAssignment] = {}  # engine name -> GPUs
        self._learner_socket = str(runtime_dir / f"{LEARNER}.sock")
        self._learner_sends = config.weights.transport == "collective"  # engines then call the learner for weights
        self._restart = RestartSettings(config.supervise.restarts, config.supervise.window_s)
        # Temporary files of a killed worker, or of user programs it ran, are removed together with this directory.
        self._temporary_files = temporary_files_environment(runtime_dir)

    def engines(self) -> list[ComponentSpec]:
        engine = self._config.engine
        assert engine.count is not None, "the config must be resolved"
        gpus = self.placement.engines
        return [
            self._engine(index, engine.urls[index] if engine.urls else "", gpus[index]) for index in range(engine.count)
        ]

    def joining_engine(self, url: str, others: Collection[str]) -> ComponentSpec:
        """Return the spec of an engine that joins while `others` are running."""
        if self._config.engine.urls and not url and self.placement.learner.gpus:
            raise BadInput(
                "engine.urls: this run reserves no GPU for servers; start one with `outpace serve` and add its URL"
            )
        running = [self.assigned[name] for name in others]
        return self._engine(len(self.sockets), url, ON_CPU if url else self.placement.assign_joining_engine(running))

    def _engine(self, index: int, url: str, gpus: GpuAssignment) -> ComponentSpec:
        """`url`: address of a running server; empty if the engine is embedded or its server must be launched."""
        name = engine_name(index)
        self.assigned[name] = gpus
        self.sockets[name] = str(self._runtime_dir / f"{name}.sock")
        embedded = self._config.engine.kind == "embedded"
        return ComponentSpec(
            name,
            "outpace.run.build:build_engine",
            "outpace.protocols:Engine",
            kind="engine",
            settings=self._shared_settings | {"index": index, "url": url},
            resources=_resources(engine_threads(self._config) if embedded else 1, gpus),
            restart=self._restart,
            code=self._engine_code,
            listen=self.sockets[name],
            token=self._token,
            peers={LEARNER: self._learner_socket} if self._learner_sends else {},
            peer_protocol="outpace.protocols:Learner",
            start_s=max(START_DEADLINE_S, self._config.launch.start_s + SERVER_GRACE_S),
        )

    def learners(self) -> list[ComponentSpec]:
        """Return the spec of each rank of the learner. Other components know only the first. Ranks that torchrun
        started on other machines choose their GPUs themselves."""
        calls = self._learner_sends or self._producer_code is not None
        gpus = self.placement.learners
        torchrun, several = self._settings.torchrun, self._settings.several_machines
        connect_s = 0.0 if torchrun is None else self._config.learner.collective_timeout_s
        return [
            ComponentSpec(
                learner_name(rank),
                "outpace.run.build:build_learner",
                "outpace.protocols:Learner",
                kind="learner",
                settings=self._shared_settings | {"index": rank},
                resources=_resources(learner_threads(self._config), gpus[rank % len(gpus)]),
                environment=rank_environment(self._logs, several) if self._config.learner.sharded else {},
                code=self._learner_code,
                start_s=START_DEADLINE_S + connect_s,  # the first rank waits until the others have connected
                remote=rank if rank > 0 and torchrun is not None else None,
                listen=self._learner_socket if calls and rank == 0 else None,
                token=self._token,
            )
            for rank in range(self._config.learner.devices)
        ]

    def workers(self) -> list[ComponentSpec]:
        return [
            ComponentSpec(
                f"worker-{index}",
                "outpace.run.build:build_worker",
                "outpace.protocols:Worker",
                kind="worker",
                settings=self._shared_settings,
                resources=Resources(cpus=1, gpus=self.placement.workers),
                restart=self._restart,
                environment=self._temporary_files,
                code=self._code,
                token=self._token,
                # The controller sends the engine list to child processes. With peers here, a restarted
                # worker would wait for dead engines.
                peers=dict(self.sockets) if self._config.run.runtime == "inline" else {},
            )
            for index in range(self._config.rollout.workers)
        ]

    def producer(self) -> ComponentSpec | None:
        if self._producer_code is None:
            return None
        inline = self._config.run.runtime == "inline"
        return ComponentSpec(
            PRODUCER,
            "outpace.run.build:build_producer",
            "outpace.protocols:Producer",
            kind="producer",
            settings=self._shared_settings | {"url": self._learner_socket},
            resources=Resources(cpus=1, gpus=self.placement.workers),
            restart=self._restart,
            environment=self._temporary_files,
            code=self._producer_code,
            token=self._token,
            peers={**self.sockets, LEARNER: self._learner_socket} if inline else {},  # as for workers
        )


def _resources(cpus: int, gpus: GpuAssignment) -> Resources:
    return Resources(cpus, gpus.gpus or None, gpus.memory)


def component_settings(spec: ComponentSpec) -> ComponentSettings:
    return msgspec.convert(spec.settings, ComponentSettings)


async def build_engine(spec: ComponentSpec, peers: dict[str, Any]) -> object:
    settings, stale = component_settings(spec), spec.attempt > 0
    if settings.parsed.engine.kind == "embedded":
        return await asyncio.to_thread(_embedded_engine, settings, _device(spec), stale)
    from outpace.engines.server.build import build_server_engine

    _install_registered(by_value.unpickle_objects(spec.code))
    return await build_server_engine(
        settings.parsed,
        spec.name,
        settings.index,
        url=settings.url,
        gpus=GpuAssignment(spec.resources.gpus or [], spec.resources.gpu_memory),
        incarnation=settings.incarnation,
        weight_files=settings.weight_files,
        scratch=Path(settings.scratch),
        logs=Path(settings.run_dir) / "logs",
        stale=stale,
        send=peers[LEARNER].send if LEARNER in peers else None,
    )


def _embedded_engine(settings: ComponentSettings, device: str, stale: bool) -> object:
    from outpace.engines.embedded.engine import EmbeddedEngine

    config = settings.parsed
    return EmbeddedEngine(
        model=config.model.path,
        dtype=config.model.dtype,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        slots=config.engine.resolved_slots,
        context=config.engine.context,
        kv=config.engine.kv,
        path=config.engine.decoder,
        deterministic=config.run.deterministic,
        threads=engine_threads(config),
        sharing=_core_sharing(settings, "engine", settings.index + 1, available_cores())
        if shares_cores(config, config.engine.threads)
        else None,
        stale=stale,
        pinned_slots=pinned_slots(config),
    )


def pinned_slots(config: Config) -> int:
    """Return the slots of the pinned weight set used for evaluation.

    At most `eval.max_running`, except in deterministic runs, whose exact results depend on the slot count."""
    slots = config.engine.resolved_slots
    return slots if config.run.deterministic else min(slots, config.eval.max_running)


def _core_sharing(settings: ComponentSettings, role: Role, row: int, cores: int) -> CoreSharing:
    import torch

    from outpace.hardware.cores import THREAD_COUNTS_FILE, CoreSharing, ThreadCounts

    board = ThreadCounts(Path(settings.scratch) / THREAD_COUNTS_FILE)
    return CoreSharing(board, role, row, cores, torch.set_num_threads)


def _install_registered(given: dict[str, Any]) -> None:
    if given.get("registered") is not None:
        given["registered"].install()


async def build_learner(spec: ComponentSpec, peers: dict[str, Any]) -> object:
    _install_registered(by_value.unpickle_objects(spec.code))
    return await asyncio.to_thread(_learner, spec, component_settings(spec))


def _learner(spec: ComponentSpec, settings: ComponentSettings) -> object:
    from outpace.checkpoint.journal import read_record
    from outpace.hardware.cores import LEARNER_ROW
    from outpace.learner.backend import LearnerSettings
    from outpace.learner.learner import LearnerHost
    from outpace.learner.torch_backend import TorchBackend

    config, threads, device = settings.parsed, spec.resources.cpus, _device(spec)
    shares = learner_shares_cores(config)
    return LearnerHost(
        LearnerSettings(
            config=config,
            device=device,
            ranks=_ranks(settings, device) if config.learner.sharded else None,
            gpu_memory=spec.resources.gpu_memory,
            threads=threads,
            incarnation=settings.incarnation,
            read_group=partial(read_record, settings.journal),
            snapshots=settings.snapshots,
            bad_steps=Path(settings.run_dir) / "bad_steps" if settings.index == 0 else None,
            sharing=_core_sharing(settings, "learner", LEARNER_ROW, threads) if shares else None,
        ),
        TorchBackend if config.learner.backend is None else load_function(config.learner.backend, "learner.backend"),
    )


def _ranks(settings: ComponentSettings, device: str) -> Ranks:
    from outpace.learner.ranks import Ranks, RankSettings

    learner = settings.parsed.learner
    rendezvous, logs = Path(settings.scratch) / f"ranks-{settings.incarnation}", Path(settings.run_dir) / "logs"
    timeout_s = learner.collective_timeout_s
    return Ranks(RankSettings(settings.index, learner.devices, rendezvous, timeout_s, logs, settings.torchrun), device)


def _device(spec: ComponentSpec) -> str:
    return "cuda" if spec.resources.gpus else "cpu"


async def build_worker(spec: ComponentSpec, peers: dict[str, Any]) -> object:
    from outpace.rollouts.build import build_rollout

    given, settings = by_value.unpickle_objects(spec.code), component_settings(spec)
    _install_registered(given)
    assembled = await build_rollout(settings.parsed, given)
    try:
        return await asyncio.to_thread(_worker, spec, settings, peers, given, assembled)
    except BaseException:
        await assembled.close()
        raise


def _worker(
    spec: ComponentSpec,
    settings: ComponentSettings,
    peers: dict[str, Engine],
    given: dict[str, Any],
    assembled: BuiltRollout,
) -> object:
    from outpace.checkpoint.journal import JournalWriter
    from outpace.engines.fleet import EngineFleet
    from outpace.models.chat import text_decoder
    from outpace.models.chat_format import chat_format_for
    from outpace.models.loading import eos_ids
    from outpace.rewards.grading import MAX_THREADS
    from outpace.rollouts.gateway.server import Gateway
    from outpace.rollouts.worker import RolloutWorker
    from outpace.runtime.async_tools import start_idle_threads
    from outpace.tasks.registry import open_sets, open_tasks
    from outpace.tasks.stream import FILE as STREAM_FILE
    from outpace.tasks.stream import StreamedTasks

    config, name = settings.parsed, spec.name
    start_idle_threads(MAX_THREADS)
    tokenizer = _tokenizer(config.model)
    decode = text_decoder(tokenizer, special_tokens=True)
    train, heldout = given["tasks"] if "tasks" in given else open_tasks(config)
    if train is None or isinstance(train, TaskStream):
        train = StreamedTasks(settings.journal / STREAM_FILE)
    return RolloutWorker(
        config=config,
        engines=EngineFleet(peers, connect=_connector(spec), decode=decode),
        chat_format=chat_format_for(tokenizer, eos_ids(config.model.path), config.model.chat_renderer),
        train=train,
        heldout={**({} if heldout is None else {"": heldout}), **open_sets(config)},
        rollout=assembled.rollout,
        evaluation_rollout=assembled.evaluation,
        reward_functions=build_reward_functions(config, given.get("rewards")),
        journal=JournalWriter(settings.journal, name, sync=settings.several_machines),
        gateway=Gateway(config.gateway.host, _gateway_port(config, name), config.model.path),
        closers=assembled.closers,
        turns=_turn_log(config, settings.journal, name),
        recorder=_recorder(config, settings, decode),
    )


def _connector(spec: ComponentSpec) -> Callable[[FleetMember], Awaitable[Engine]]:
    return lambda member: reconnecting_proxy(Engine, member.socket, spec.token, member.name)


def _tokenizer(model: ModelConfig) -> Any:
    from outpace.models.loading import load_tokenizer

    return load_tokenizer(
        model.path, trust_remote_code=model.trust_remote_code, template_arguments=model.template_arguments
    )


async def build_producer(spec: ComponentSpec, peers: dict[str, Any]) -> object:
    from outpace.engines.fleet import EngineFleet
    from outpace.models.chat import text_decoder
    from outpace.models.chat_format import chat_format_for
    from outpace.models.loading import eos_ids, vocabulary_size
    from outpace.rollouts.producer_host import ProducerHost, ProducerModel, make_producer
    from outpace.tasks.stream import FILE as STREAM_FILE
    from outpace.tasks.stream import StreamedTasks

    settings, given = component_settings(spec), by_value.unpickle_objects(spec.code)
    _install_registered(given)
    config = settings.parsed
    tokenizer = await asyncio.to_thread(_tokenizer, config.model)
    learner = peers.pop(LEARNER, None)

    async def connect_learner() -> Learner:
        nonlocal learner
        if config.learner.devices > 1:  # all ranks must make the call at the same point of their sequence
            raise BadInput("learner.devices: a producer can use model.logprobs only with one learner process; set 1")
        if learner is None:
            learner = await reconnecting_proxy(Learner, settings.url, spec.token, LEARNER)
        return learner  # type: ignore[no-any-return]

    model = ProducerModel(
        config,
        EngineFleet(peers, connect=_connector(spec), decode=text_decoder(tokenizer, special_tokens=True)),
        chat_format_for(tokenizer, eos_ids(config.model.path), config.model.chat_renderer),
        connect_learner,
    )
    named = given.get("producer")
    if named is None:
        named = load_function(config.tasks.producer or "", "tasks.producer")
    producer = await asyncio.to_thread(make_producer, named, config)
    module = getattr(getattr(learner, "backend", None), "model", None)  # of a learner in this process
    tasks = StreamedTasks(settings.journal / STREAM_FILE)
    graded, vocabulary = given.get("graded", True), vocabulary_size(config.model.path)
    # On a thread, because it calls the user's `set_trainer`.
    return await asyncio.to_thread(ProducerHost, config, producer, tasks, model, tokenizer, module, graded, vocabulary)


def _turn_log(config: Config, journal: Path, name: str) -> Any:
    """Return the log of sampled turns. None if disabled or deterministic: such a run samples the same turns again."""
    from outpace.checkpoint.turn_log import TurnLog

    return TurnLog(journal, name) if config.checkpoint.turns and not config.run.deterministic else None


def _recorder(config: Config, settings: ComponentSettings, decode: Callable[[Sequence[int]], str]) -> Any:
    from outpace.monitoring.rollout_files import RolloutWriter
    from outpace.rollouts.recording import RolloutRecorder

    if not config.run.save_rollouts:
        return None
    writer = RolloutWriter(Path(settings.run_dir), config.run.rollouts_mb * 10**6, config.rollout.workers)
    return RolloutRecorder(writer, settings.journal, decode)


def _gateway_port(config: Config, worker: str) -> int:
    """Return this worker's port: `gateway.port` plus its index, or 0 for any free port."""
    first = config.gateway.port
    return first + int(worker.rpartition("-")[2]) if first else 0


def build_reward_functions(config: Config, given: list[Any] | None) -> Any:
    """Build the reward functions: those passed from Python, or those named in the config."""
    from outpace.rewards.grading import GraderPool
    from outpace.rewards.registry import isolated_sources, resolve_rewards
    from outpace.rollouts.worker import RewardFunctions

    rewards = config.rewards
    functions = resolve_rewards(rewards.functions, config) if given is None else given
    in_graders = isolated_sources(functions, rewards.isolation, rewards.functions if given is None else None)
    pool = GraderPool(in_graders, rewards.workers, rewards.memory_mb) if in_graders else None
    return RewardFunctions(functions, rewards.weights or [1.0] * len(functions), pool)
