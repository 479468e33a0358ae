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
from outpace.placement import ON_CPU, VARIABLE, GpuAssignment, placement_of
from outpace.protocols import Engine
from outpace.resources import child_environment, cores, engine_threads, learner_threads, shares_cores
from outpace.runtime import code
from outpace.runtime.peers import peer
from outpace.runtime.scratch import temporary_files
from outpace.runtime.spec import START_DEADLINE_S, PartSpec, Runtime
from outpace.runtime.together import together
from outpace.types import Member

if TYPE_CHECKING:
    from outpace.rollouts.assembly import Assembled
    from outpace.runtime.core_sharing import CoreSharing


LEARNER = "learner"
GRACE_S = 60.0
"""Added to `launch.start_s`, so that an engine component can report why its server did not start."""


def engine_name(index: int) -> str:
    return f"engine-{index}"


class PartSettings(msgspec.Struct, frozen=True):
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


class PartSpecs:
    """Builds the spec and process environment of every component for one start of a run."""

    def __init__(
        self, config: Config, run_dir: Path, runtime_dir: Path, code: bytes = b"", learner_code: bytes = b""
    ) -> None:
        self.placement = placement_of(config)
        # Child processes see only their own GPUs, so settings that depend on all GPUs are resolved here.
        weights = config.weights.model_copy(update={"transport": self.placement.transport})
        config = self._config = config.model_copy(update={"weights": weights})
        settings = PartSettings(config.model_dump(), secrets.token_hex(8), str(run_dir.absolute()), str(runtime_dir))
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
        self._temporary_files = temporary_files(runtime_dir)

    def engines(self) -> list[tuple[PartSpec, dict[str, str]]]:
        engine = self._config.engine
        assert engine.count is not None, "the config must be resolved"
        gpus = self.placement.engines
        return [
            self._engine(index, engine.urls[index] if engine.urls else "", gpus[index]) for index in range(engine.count)
        ]

    def joining_engine(self, url: str, others: Collection[str]) -> tuple[PartSpec, dict[str, str]]:
        """Return the spec of an engine that joins while `others` are running."""
        if self._config.engine.urls and not url and self.placement.learner.gpus:
            raise BadInput(
                "engine.urls: this run reserves no GPU for servers; start one with `outpace serve` and add its URL"
            )
        running = [self.assigned[name] for name in others]
        return self._engine(len(self.sockets), url, ON_CPU if url else self.placement.joining(running))

    def _engine(self, index: int, url: str, gpus: GpuAssignment) -> tuple[PartSpec, dict[str, str]]:
        """`url`: address of a running server; empty if the engine is embedded or its server must be launched."""
        name = engine_name(index)
        self.assigned[name] = gpus
        self.sockets[name] = str(self._runtime_dir / f"{name}.sock")
        spec = PartSpec(
            name,
            "outpace.parts:build_engine",
            "outpace.protocols:Engine",
            self._shared_settings | {"index": index, "url": url, "gpus": msgspec.to_builtins(gpus)},
            listen=self.sockets[name],
            token=self._token,
            peers={LEARNER: self._learner_socket} if self._learner_sends else {},
            peer_protocol="outpace.protocols:Learner",
            start_s=max(START_DEADLINE_S, self._config.launch.start_s + GRACE_S),
        )
        embedded = self._config.engine.kind == "embedded"
        return spec, child_environment(engine_threads(self._config) if embedded else 1) | gpus.environment

    def learner(self) -> tuple[PartSpec, dict[str, str]]:
        spec = PartSpec(
            LEARNER,
            "outpace.parts:build_learner",
            "outpace.protocols:Learner",
            self._shared_settings | {"gpus": msgspec.to_builtins(self.placement.learner)},
            code=self._learner_code,
            listen=self._learner_socket if self._learner_sends else None,
            token=self._token,
        )
        return spec, child_environment(learner_threads(self._config)) | self.placement.learner.environment

    def workers(self) -> list[tuple[PartSpec, dict[str, str]]]:
        return [
            (
                PartSpec(
                    f"worker-{index}",
                    "outpace.parts:build_worker",
                    "outpace.protocols:Worker",
                    self._shared_settings,
                    code=self._code,
                    token=self._token,
                    # The controller sends the engine list to child processes. With peers here, a restarted
                    # worker would wait for dead engines.
                    peers=dict(self.sockets) if self._config.run.runtime == "inline" else {},
                ),
                child_environment(1) | {VARIABLE: ",".join(self.placement.workers)} | self._temporary_files,
            )
            for index in range(self._config.rollout.workers)
        ]


async def start_engines(runtime: Runtime, engines: Sequence[tuple[PartSpec, dict[str, str]]]) -> list[Engine]:
    """Start engines in parallel, but servers that share a GPU in sequence: each measures free memory as it starts."""
    gpu_locks: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(spec: PartSpec, environment: dict[str, str]) -> Engine:
        gpus = settings_of(spec).gpus
        async with gpu_locks[tuple(gpus.gpus)] if gpus.memory < 1 else nullcontext():
            return await runtime.start(Engine, spec, environment)

    return await together(*(start(*engine) for engine in engines))


def settings_of(spec: PartSpec) -> PartSettings:
    return msgspec.convert(spec.settings, PartSettings)


async def build_engine(spec: PartSpec, peers: dict[str, Any]) -> object:
    settings, stale = settings_of(spec), spec.attempt > 0
    if settings.parsed.engine.kind == "embedded":
        return await asyncio.to_thread(_embedded_engine, settings, stale)
    from outpace.engines.servers.build import build_door

    return await build_door(
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


def _embedded_engine(settings: PartSettings, stale: bool) -> object:
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
        path=config.engine.path,
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


def _engine_sharing(settings: PartSettings) -> CoreSharing:
    import torch

    from outpace.runtime.core_sharing import BOARD, Board, CoreSharing

    board = Board(Path(settings.scratch) / BOARD)
    return CoreSharing(board, "engine", settings.index + 1, cores(), torch.set_num_threads)


def _install_registered(given: dict[str, Any]) -> None:
    if "registered" in given:
        given["registered"].install()


async def build_learner(spec: PartSpec, peers: dict[str, Any]) -> object:
    _install_registered(code.unpack(spec.code))
    return await asyncio.to_thread(_learner, settings_of(spec))


def _learner(settings: PartSettings) -> object:
    from outpace.learn.learner import TorchLearner
    from outpace.learn.settings import LearnerSettings
    from outpace.runtime.core_sharing import BOARD

    config = settings.parsed
    return TorchLearner(
        LearnerSettings(
            config=config,
            device=_device(settings),
            gpu_memory=settings.gpus.memory,
            threads=learner_threads(config),
            incarnation=settings.incarnation,
            journal=settings.journal,
            snapshots=Path(settings.scratch) / "weights",
            share_cores=Path(settings.scratch) / BOARD if shares_cores(config, config.learner.threads) else None,
        )
    )


def _device(settings: PartSettings) -> str:
    return "cuda" if settings.gpus.gpus else "cpu"


async def build_worker(spec: PartSpec, peers: dict[str, Any]) -> object:
    from outpace.rollouts.assembly import assemble

    given, settings = code.unpack(spec.code), settings_of(spec)
    _install_registered(given)
    assembled = await assemble(settings.parsed, given)
    try:
        return await asyncio.to_thread(_worker, spec, settings, peers, given, assembled)
    except BaseException:
        await assembled.close()
        raise


def _worker(
    spec: PartSpec, settings: PartSettings, peers: dict[str, Engine], given: dict[str, Any], assembled: Assembled
) -> object:
    from outpace.checkpoint.journal import JournalWriter
    from outpace.engines.fleet.fleet import Fleet
    from outpace.models.loading import eos_ids, load_tokenizer
    from outpace.models.speaking import dialect_of
    from outpace.rewards.grading import MAX_THREADS
    from outpace.rollouts.gateway.server import Gateway
    from outpace.rollouts.worker import RolloutWorker
    from outpace.runtime.threads import warm_up
    from outpace.tasks.registry import open_tasks

    def connect(member: Member) -> Awaitable[Engine]:
        return peer(Engine, member.socket, spec.token, member.name)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    config, name = settings.parsed, spec.name
    warm_up(MAX_THREADS)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    train, heldout = given["tasks"] if "tasks" in given else open_tasks(config)
    return RolloutWorker(
        settings=_worker_settings(config),
        engines=Fleet(peers, connect=connect, decode=decode),
        dialect=dialect_of(tokenizer, eos_ids(config.model.path), config.model.renderer),
        train=train,
        heldout=heldout,
        rollout=assembled.rollout,
        judges=judges_of(config, given.get("rewards")),
        journal=JournalWriter(settings.journal, name),
        doors=Gateway(config.gateway.host, _gateway_port(config, name), config.model.path),
        closers=assembled.closers,
        turns=_turns(config, settings.journal, name),
        recorder=_recorder(config, settings, decode),
    )


def _turns(config: Config, journal: Path, name: str) -> Any:
    """Return the log of sampled turns. None if disabled or deterministic: such a run samples the same turns again."""
    from outpace.checkpoint.turn_log import TurnLog

    return TurnLog(journal, name) if config.checkpoint.turns and not config.run.deterministic else None


def _recorder(config: Config, settings: PartSettings, decode: Callable[[Sequence[int]], str]) -> Any:
    from outpace.config.methods import chosen_advantage
    from outpace.observe.rollout_files import RolloutWriter
    from outpace.rollouts.recording import RolloutRecorder

    if not config.run.show_rollouts:
        return None
    writer = RolloutWriter(Path(settings.run_dir), config.run.rollouts_mb * 10**6, config.rollout.workers)
    return RolloutRecorder(writer, settings.journal, decode, chosen_advantage(config.algorithm).facts.critic)


def _gateway_port(config: Config, worker: str) -> int:
    """Return this worker's port: `gateway.port` plus its index, or 0 for any free port."""
    first = config.gateway.port
    return first + int(worker.rpartition("-")[2]) if first else 0


def judges_of(config: Config, given: list[Any] | None) -> Any:
    """Build the reward functions: those passed from Python, or those named in the config."""
    from outpace.rewards.pool import GraderPool
    from outpace.rewards.registry import isolated, resolve_rewards
    from outpace.rollouts.worker import Judges

    rewards = config.rewards
    functions = resolve_rewards(rewards.functions, config) if given is None else given
    in_graders = isolated(functions, rewards.isolation, rewards.functions if given is None else None)
    pool = GraderPool(in_graders, rewards.workers, rewards.memory_mb) if in_graders else None
    return Judges(functions, rewards.weights or [1.0] * len(functions), pool)


def _worker_settings(config: Config) -> Any:
    from outpace.algorithms.credit import credit_settings
    from outpace.config.methods import chosen_advantage
    from outpace.rewards.shaping import Overlong
    from outpace.rollouts.closing import ClosingRules, Filter
    from outpace.rollouts.policy.requests import ClientSettings
    from outpace.rollouts.worker import WorkerSettings

    rollout, algorithm, rewards, filters = config.rollout, config.algorithm, config.rewards, config.filter
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
            system=config.model.system,
            seed=config.run.seed,
        ),
        eval_seed=config.eval.seed,
        eval_temperature=rollout.temperature if config.eval.temperature is None else config.eval.temperature,
        episode_timeout_s=rollout.timeout_s,
        reward_timeout_s=rewards.timeout_s,
        closing=ClosingRules(
            credit_settings(chosen_advantage(algorithm), algorithm.credit, algorithm.gamma),
            Filter(
                uniform=filters.uniform,
                tolerance=filters.tolerance or 0.0,
                min_group=filters.min_group,
                truncated=filters.truncated,
                longer_than=filters.longer_than,
            ),
        ),
        overlong=Overlong(rollout.max_tokens, rewards.overlong_buffer, rewards.overlong_penalty or 1.0)
        if rewards.overlong_buffer
        else None,
    )
