"""Component specs and builders.

    controller:       ComponentSpecs(config, ...) ─▶ one ComponentSpec and environment per component ─▶ runtime.start
    child (or inline): build_engine / build_learner / build_worker (spec, peers) ─▶ the component

`spec.settings` holds all that a component gets: the resolved config and a few values of this start of the run. Only
engines and the learner import torch; a worker must not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outpace.config import Config
from outpace.errors import BadInput
from outpace.hardware.cores import available_cores, engine_threads, learner_threads, shares_cores
from outpace.hardware.placement import CUDA_VISIBLE_DEVICES, ON_CPU, GpuAssignment, placement_of
from outpace.protocols import Engine
from outpace.runtime import by_value
from outpace.runtime.async_tools import gather_or_cancel
from outpace.runtime.cleanup import temporary_files_environment
from outpace.runtime.components import START_DEADLINE_S, ComponentSpec, Runtime
from outpace.runtime.process_tree import child_environment
from outpace.runtime.reconnect import reconnecting_proxy
from outpace.types import FleetMember

if TYPE_CHECKING:
    from outpace.hardware.cores import CoreSharing
    from outpace.rollouts.build import BuiltRollout


LEARNER = "learner"
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
    index: int = 0  # engines only
    url: str = ""  # of a running server; empty for embedded engines and servers to launch
    gpus: GpuAssignment = ON_CPU  # of this component

    @property
    def parsed(self) -> Config:
        return Config.model_validate(self.config)

    @property
    def journal(self) -> Path:
        return Path(self.run_dir) / "journal"


class ComponentSpecs:
    """Builds the spec and process environment of every component for one start of a run."""

    def __init__(
        self, config: Config, run_dir: Path, runtime_dir: Path, code: bytes = b"", learner_code: bytes = b""
    ) -> None:
        self.placement = placement_of(config)
        # Child processes see only their own GPUs, so settings that depend on all GPUs are resolved here.
        weights = config.weights.model_copy(update={"transport": self.placement.transport})
        config = self._config = config.model_copy(update={"weights": weights})
        settings = ComponentSettings(
            config.model_dump(), secrets.token_hex(8), str(run_dir.absolute()), str(runtime_dir)
        )
        self._shared_settings: dict[str, Any] = msgspec.to_builtins(settings)
        self._token = secrets.token_hex(16)
        self._runtime_dir = runtime_dir
        self._code = code
        self._learner_code = learner_code
        self.sockets: dict[str, str] = {}  # engine name -> socket path
        self.assigned: dict[str, GpuAssignment] = {}  # engine name -> GPUs
        self._learner_socket = str(runtime_dir / f"{LEARNER}.sock")
        self._learner_sends = config.weights.transport == "collective"  # engines then call the learner for weights
        # Temporary files of a killed worker, or of user programs it ran, are removed together with this directory.
        self._temporary_files = temporary_files_environment(runtime_dir)

    def engines(self) -> list[tuple[ComponentSpec, dict[str, str]]]:
        engine = self._config.engine
        assert engine.count is not None, "the config must be resolved"
        gpus = self.placement.engines
        return [
            self._engine(index, engine.urls[index] if engine.urls else "", gpus[index]) for index in range(engine.count)
        ]

    def joining_engine(self, url: str, others: Collection[str]) -> tuple[ComponentSpec, dict[str, str]]:
        """Return the spec of an engine that joins while `others` are running."""
        if self._config.engine.urls and not url and self.placement.learner.gpus:
            raise BadInput(
                "engine.urls: this run reserves no GPU for servers; start one with `outpace serve` and add its URL"
            )
        running = [self.assigned[name] for name in others]
        return self._engine(len(self.sockets), url, ON_CPU if url else self.placement.assign_joining_engine(running))

    def _engine(self, index: int, url: str, gpus: GpuAssignment) -> tuple[ComponentSpec, dict[str, str]]:
        """`url`: address of a running server; empty if the engine is embedded or its server must be launched."""
        name = engine_name(index)
        self.assigned[name] = gpus
        self.sockets[name] = str(self._runtime_dir / f"{name}.sock")
        spec = ComponentSpec(
            name,
            "outpace.run.build:build_engine",
            "outpace.protocols:Engine",
            self._shared_settings | {"index": index, "url": url, "gpus": msgspec.to_builtins(gpus)},
            listen=self.sockets[name],
            token=self._token,
            peers={LEARNER: self._learner_socket} if self._learner_sends else {},
            peer_protocol="outpace.protocols:Learner",
            start_s=max(START_DEADLINE_S, self._config.launch.start_s + SERVER_GRACE_S),
        )
        embedded = self._config.engine.kind == "embedded"
        return spec, child_environment(engine_threads(self._config) if embedded else 1) | gpus.environment

    def learner(self) -> tuple[ComponentSpec, dict[str, str]]:
        spec = ComponentSpec(
            LEARNER,
            "outpace.run.build:build_learner",
            "outpace.protocols:Learner",
            self._shared_settings | {"gpus": msgspec.to_builtins(self.placement.learner)},
            code=self._learner_code,
            listen=self._learner_socket if self._learner_sends else None,
            token=self._token,
        )
        return spec, child_environment(learner_threads(self._config)) | self.placement.learner.environment

    def workers(self) -> list[tuple[ComponentSpec, dict[str, str]]]:
        return [
            (
                ComponentSpec(
                    f"worker-{index}",
                    "outpace.run.build:build_worker",
                    "outpace.protocols:Worker",
                    self._shared_settings,
                    code=self._code,
                    token=self._token,
                    # The controller sends the engine list to child processes. With peers here, a restarted
                    # worker would wait for dead engines.
                    peers=dict(self.sockets) if self._config.run.runtime == "inline" else {},
                ),
                child_environment(1) | {CUDA_VISIBLE_DEVICES: ",".join(self.placement.workers)} | self._temporary_files,
            )
            for index in range(self._config.rollout.workers)
        ]


async def start_engines(runtime: Runtime, engines: Sequence[tuple[ComponentSpec, dict[str, str]]]) -> list[Engine]:
    """Start engines in parallel, but servers that share a GPU in sequence: each measures free memory as it starts."""
    gpu_locks: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(spec: ComponentSpec, environment: dict[str, str]) -> Engine:
        gpus = component_settings(spec).gpus
        async with gpu_locks[tuple(gpus.gpus)] if gpus.memory < 1 else nullcontext():
            return await runtime.start(Engine, spec, environment)

    return await gather_or_cancel(*(start(*engine) for engine in engines))


def component_settings(spec: ComponentSpec) -> ComponentSettings:
    return msgspec.convert(spec.settings, ComponentSettings)


async def build_engine(spec: ComponentSpec, peers: dict[str, Any]) -> object:
    settings, stale = component_settings(spec), spec.attempt > 0
    if settings.parsed.engine.kind == "embedded":
        return await asyncio.to_thread(_embedded_engine, settings, stale)
    from outpace.engines.server.build import build_server_engine

    return await build_server_engine(
        settings.parsed,
        spec.name,
        settings.index,
        url=settings.url,
        gpus=settings.gpus,
        incarnation=settings.incarnation,
        scratch=Path(settings.scratch),
        logs=Path(settings.run_dir) / "logs",
        stale=stale,
        send=peers[LEARNER].send if LEARNER in peers else None,
    )


def _embedded_engine(settings: ComponentSettings, stale: bool) -> object:
    from outpace.engines.embedded.engine import EmbeddedEngine

    config = settings.parsed
    return EmbeddedEngine(
        model=config.model.path,
        dtype=config.model.dtype,
        device=_device(settings),
        trust_remote_code=config.model.trust_remote_code,
        slots=config.engine.resolved_slots,
        context=config.engine.context,
        kv=config.engine.kv,
        path=config.engine.decoder,
        deterministic=config.run.deterministic,
        threads=engine_threads(config),
        sharing=_engine_sharing(settings) if shares_cores(config, config.engine.threads) else None,
        stale=stale,
        pinned_slots=pinned_slots(config),
    )


def pinned_slots(config: Config) -> int:
    """Return the slots of the pinned weight set used for evaluation.

    At most `eval.max_running`, except in deterministic runs, whose exact results depend on the slot count."""
    slots = config.engine.resolved_slots
    return slots if config.run.deterministic else min(slots, config.eval.max_running)


def _engine_sharing(settings: ComponentSettings) -> CoreSharing:
    import torch

    from outpace.hardware.cores import THREAD_COUNTS_FILE, CoreSharing, ThreadCounts

    board = ThreadCounts(Path(settings.scratch) / THREAD_COUNTS_FILE)
    return CoreSharing(board, "engine", settings.index + 1, available_cores(), torch.set_num_threads)


def _install_registered(given: dict[str, Any]) -> None:
    if "registered" in given:
        given["registered"].install()


async def build_learner(spec: ComponentSpec, peers: dict[str, Any]) -> object:
    _install_registered(by_value.unpickle_objects(spec.code))
    return await asyncio.to_thread(_learner, component_settings(spec))


def _learner(settings: ComponentSettings) -> object:
    from outpace.hardware.cores import THREAD_COUNTS_FILE
    from outpace.learner.learner import TorchLearner, TorchLearnerSettings

    config = settings.parsed
    return TorchLearner(
        TorchLearnerSettings(
            config=config,
            device=_device(settings),
            gpu_memory=settings.gpus.memory,
            threads=learner_threads(config),
            incarnation=settings.incarnation,
            journal=settings.journal,
            snapshots=Path(settings.scratch) / "weights",
            share_cores=Path(settings.scratch) / THREAD_COUNTS_FILE
            if shares_cores(config, config.learner.threads)
            else None,
        )
    )


def _device(settings: ComponentSettings) -> str:
    return "cuda" if settings.gpus.gpus else "cpu"


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
    from outpace.models.chat_format import chat_format_for
    from outpace.models.loading import eos_ids, load_tokenizer
    from outpace.rewards.grading import MAX_THREADS
    from outpace.rollouts.gateway.server import Gateway
    from outpace.rollouts.worker import RolloutWorker
    from outpace.runtime.async_tools import start_idle_threads
    from outpace.tasks.registry import open_tasks

    def connect(member: FleetMember) -> Awaitable[Engine]:
        return reconnecting_proxy(Engine, member.socket, spec.token, member.name)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    config, name = settings.parsed, spec.name
    start_idle_threads(MAX_THREADS)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    train, heldout = given["tasks"] if "tasks" in given else open_tasks(config)
    return RolloutWorker(
        settings=_worker_settings(config),
        engines=EngineFleet(peers, connect=connect, decode=decode),
        chat_format=chat_format_for(tokenizer, eos_ids(config.model.path), config.model.renderer),
        train=train,
        heldout=heldout,
        rollout=assembled.rollout,
        reward_functions=build_reward_functions(config, given.get("rewards")),
        journal=JournalWriter(settings.journal, name),
        endpoint_provider=Gateway(config.gateway.host, _gateway_port(config, name), config.model.path),
        closers=assembled.closers,
        turns=_turn_log(config, settings.journal, name),
        recorder=_recorder(config, settings, decode),
    )


def _turn_log(config: Config, journal: Path, name: str) -> Any:
    """Return the log of sampled turns. None if disabled or deterministic: such a run samples the same turns again."""
    from outpace.checkpoint.turn_log import TurnLog

    return TurnLog(journal, name) if config.checkpoint.turns and not config.run.deterministic else None


def _recorder(config: Config, settings: ComponentSettings, decode: Callable[[Sequence[int]], str]) -> Any:
    from outpace.config.algorithm import configured_advantage
    from outpace.monitoring.rollout_files import RolloutWriter
    from outpace.rollouts.recording import RolloutRecorder

    if not config.run.save_rollouts:
        return None
    writer = RolloutWriter(Path(settings.run_dir), config.run.rollouts_mb * 10**6, config.rollout.workers)
    return RolloutRecorder(writer, settings.journal, decode, configured_advantage(config.advantage).registration.critic)


def _gateway_port(config: Config, worker: str) -> int:
    """Return this worker's port: `gateway.port` plus its index, or 0 for any free port."""
    first = config.gateway.port
    return first + int(worker.rpartition("-")[2]) if first else 0


def build_reward_functions(config: Config, given: list[Any] | None) -> Any:
    """Build the reward functions: those passed from Python, or those named in the config."""
    from outpace.rewards.grader_pool import GraderPool
    from outpace.rewards.registry import isolated_sources, resolve_rewards
    from outpace.rollouts.worker import RewardFunctions

    rewards = config.rewards
    functions = resolve_rewards(rewards.functions, config) if given is None else given
    in_graders = isolated_sources(functions, rewards.isolation, rewards.functions if given is None else None)
    pool = GraderPool(in_graders, rewards.workers, rewards.memory_mb) if in_graders else None
    return RewardFunctions(functions, rewards.weights or [1.0] * len(functions), pool)


def _worker_settings(config: Config) -> Any:
    from outpace.algorithms.token_advantages import advantage_settings
    from outpace.config.algorithm import configured_advantage
    from outpace.rewards.grading import OverlongPenalty
    from outpace.rollouts.group_scoring import GroupFilter, ScoringRules
    from outpace.rollouts.requests import ClientSettings
    from outpace.rollouts.worker import WorkerSettings

    rollout, advantage, rewards, filters = config.rollout, config.advantage, config.rewards, config.filter
    assert rollout.max_tokens is not None, "the config must be resolved"
    assert filters.uniform is not None, "the config must be resolved"
    assert filters.min_group is not None, "the config must be resolved"
    return WorkerSettings(
        client=ClientSettings(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_strings=tuple(rollout.stop),
            system=config.model.system_prompt,
            seed=config.run.seed,
        ),
        eval_seed=config.eval.seed,
        eval_temperature=rollout.temperature if config.eval.temperature is None else config.eval.temperature,
        episode_timeout_s=rollout.timeout_s,
        reward_timeout_s=rewards.timeout_s,
        scoring=ScoringRules(
            advantage_settings(configured_advantage(advantage), advantage.credit, advantage.gamma),
            GroupFilter(
                uniform=filters.uniform,
                tolerance=filters.tolerance if filters.uniform else 0.0,
                min_group=filters.min_group,
                truncated=filters.truncated,
                longer_than=filters.longer_than,
            ),
        ),
        overlong=OverlongPenalty(rollout.max_tokens, rewards.overlong_buffer, rewards.overlong_penalty)
        if rewards.overlong_buffer
        else None,
    )
