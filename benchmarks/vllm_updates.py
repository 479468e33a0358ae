"""How long a weight update stops a vLLM server, by phase, and what the server samples meanwhile.

    python benchmarks/vllm_updates.py --python ~/vllm/bin/python [--requests 512] [--updates 6] [--calls]

Starts a vLLM server as a run would, and a process that holds the same model and publishes snapshots as the learner
does. Requests are replaced as they finish, so their number stays the same. The cases tell the causes apart:

    alone     updates of an idle server
    running   updates while all requests run
    busy      the same while the learner process trains without a break, on the same GPU if there is one

`prepare` is outside of the pause; `hold`, `copy` and `resume` are the pause; `load` is the whole update. `silence` is
the longest time without a token, seen from here: the streams of all requests together. `call` is the longest time of a
GET that only the server's event loop answers: what every call of an update waits for when the server is busy. `cores`
are the CPU cores that the server's API process and this process use before the updates; each has one event loop, so
one core is all it can use. `--calls` adds the cases `running` and `busy` with the update as separate calls to the
server: pause, start, update, finish, resume.

Any version of vLLM from 0.25, on CPU or GPU. Needs no network. A model name such as 135M stands for random weights of
that shape.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from outpace.commands.bench_options import BenchParser, run_benchmark
from outpace.config import Config
from outpace.config.load import make_config, parse_arguments
from outpace.config.validation import resolve
from outpace.engines.server.build import EngineSetup, transport_for
from outpace.engines.server.http import HttpClient
from outpace.engines.server.launch import LaunchPlan, launch_server
from outpace.engines.server.protocol import Piece, PreparedWeights, ServerRequest, Transport
from outpace.engines.server.server_engine import ServerEngine
from outpace.engines.server.state import ServerEngineSettings
from outpace.engines.server.transports import MemoryTransport
from outpace.engines.server.vllm import VllmServer
from outpace.errors import BadInput, ServerFailed
from outpace.hardware.placement import Placement, placement_of, uses_gpu
from outpace.runtime.cleanup import RuntimeDirectory, temporary_directory, temporary_files_environment
from outpace.types import LoadPhases, LoadReport, Manifest, Sampling
from outpace.weights.process_group import send_snapshot

LIMIT_S = 1.0
"""Longest pause of an update with all requests running."""

SHAPES: dict[str, dict[str, int]] = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    "1.5B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49152},
}  # fmt: skip
"""Random models: SmolLM2-135M's shape, and a larger one."""

PUBLISHER = Path(__file__).with_name("snapshot_publisher.py")
INCARNATION = "bench"
CALLS = ", separate calls"
POLL_S = 0.1
COLUMNS = ("prepare_s", "hold_s", "copy_s", "resume_s", "pause_s", "load_s", "silence_s", "call_s")


# ---------------------------------------------------------------------------------------------------------- the figures


@dataclass(frozen=True)
class Update:
    """One update: seconds of its phases, and what was seen of the server around it."""

    prepare_s: float
    hold_s: float
    copy_s: float
    resume_s: float
    pause_s: float
    load_s: float
    silence_s: float
    call_s: float
    tok_s_during: float

    @classmethod
    def of(cls, report: LoadReport, silence_s: float, call_s: float, tok_s: float) -> Update:
        phases = report.phases or LoadPhases()
        return cls(
            **msgspec.structs.asdict(phases), pause_s=report.pause_s, load_s=report.seconds,
            silence_s=silence_s, call_s=call_s, tok_s_during=tok_s,
        )  # fmt: skip


@dataclass
class Case:
    name: str
    requests: int
    updates: list[Update] = field(default_factory=list)
    tok_s_before: float = 0.0  # without updates
    tok_s_after: float = 0.0
    cores: tuple[float, float] = (0.0, 0.0)  # of the server's API process and of this process

    def median(self, column: str) -> float:
        return statistics.median(getattr(update, column) for update in self.updates)

    def summary(self) -> dict[str, Any]:
        medians = {column: round(self.median(column), 4) for column in (*COLUMNS, "tok_s_during")}
        pauses = [round(update.pause_s, 3) for update in self.updates]
        return {**asdict(self), "updates": len(self.updates)} | medians | {"pauses_s": pauses}


def print_table(cases: Sequence[Case], console: Console | None = None) -> None:
    names = [column.removesuffix("_s") for column in COLUMNS]
    table = Table("medians, s", "requests", *names, "longest pause", "tok/s before, during, after", "cores", box=None)
    for case in cases:
        rates = (case.tok_s_before, case.median("tok_s_during"), case.tok_s_after)
        table.add_row(
            case.name,
            str(case.requests),
            *(f"{case.median(column):.3f}" for column in COLUMNS),
            f"{max(update.pause_s for update in case.updates):.3f}",
            ", ".join(f"{rate:,.0f}" for rate in rates),
            ", ".join(f"{cores:.2f}" for cores in case.cores),
        )
    (console or Console(width=160)).print(table)


def missed_targets(cases: Sequence[Case]) -> list[str]:
    return [
        f"{case.name}: the median pause is {case.median('pause_s'):.2f} s, the limit is {LIMIT_S} s"
        for case in cases
        if CALLS not in case.name and case.median("pause_s") > LIMIT_S
    ]


# ----------------------------------------------------------------------------------------------------------- the server


class CountingServer(VllmServer):
    """A client that records when tokens arrive."""

    tokens = 0
    silence_s = 0.0  # longest time between two arrivals, since it was set to 0
    _last_at = math.inf

    async def stream(self, request: ServerRequest) -> AsyncGenerator[Piece, None]:
        async with aclosing(super().stream(request)) as pieces:
            async for piece in pieces:
                if request.salt != "probe":
                    now = time.perf_counter()
                    self.silence_s = max(self.silence_s, now - self._last_at)
                    self._last_at = now
                    self.tokens += len(piece.tokens)
                yield piece


class SeparateCalls(MemoryTransport):
    """The update as separate calls, between a pause and a resume by the engine."""

    needs_pause = True

    async def swap(self, ready: PreparedWeights) -> None:  # type: ignore[override]
        calls = [
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": ready.source}),
            ("/finish_weight_update", {}),
        ]
        for route, body in calls:
            await self._http.post(route, body, deadline_s=self._control_s)


class Pings:
    """Calls a route of the server that only its event loop answers, again and again."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.longest_s = 0.0  # since it was set to 0

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            with suppress(ServerFailed):
                await self._http.text("/health", deadline_s=60)
            self.longest_s = max(self.longest_s, time.perf_counter() - began)
            await asyncio.sleep(POLL_S)


@dataclass
class Bench:
    """A running server, the engine in front of it, and the learner."""

    pid: int  # of the server's API process
    server: CountingServer
    engine: ServerEngine
    learner: Learner
    lengths: tuple[int, int]  # prompt, completion
    settle_s: float
    version: int = 0

    async def measure(self, name: str, updates: int, requests: int, busy: bool) -> Case:
        case = Case(name, requests)
        pings = Pings(self.server.http)
        async with self.learner.working(busy), _running(self._load(requests)), _running(pings.run()):
            await self._fill(requests)
            case.tok_s_before, case.cores = await self._rates()
            for _ in range(updates):
                case.updates.append(await self._update(pings))
                await asyncio.sleep(self.settle_s / 2)
            case.tok_s_after, _ = await self._rates()
        return case

    async def _rates(self) -> tuple[float, tuple[float, float]]:
        """Tokens per second, and cores of the API process and of this process."""
        processes = psutil.Process(self.pid), psutil.Process()
        began, before = time.perf_counter(), (self.server.tokens, *map(_cpu_s, processes))
        await asyncio.sleep(self.settle_s)
        passed_s, after = time.perf_counter() - began, (self.server.tokens, *map(_cpu_s, processes))
        tokens, api, own = ((new - old) / passed_s for old, new in zip(before, after, strict=True))
        return tokens, (api, own)

    async def _update(self, pings: Pings) -> Update:
        self.version += 1
        manifest = await self.learner.publish(self.version)
        began, tokens = time.perf_counter(), self.server.tokens
        self.server.silence_s = pings.longest_s = 0.0
        report = await self.engine.load(manifest, pinned=False)
        rate = (self.server.tokens - tokens) / (time.perf_counter() - began)
        await asyncio.sleep(self.settle_s / 2)  # the silence may end after the report, a call too
        return Update.of(report, self.server.silence_s, pings.longest_s, rate)

    async def _fill(self, requests: int) -> None:
        """Wait until all requests sample."""
        while requests and (await self.server.pressure()).running < 0.95 * requests:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(self.settle_s)

    async def _load(self, requests: int) -> None:
        """Keep this many requests running."""
        await asyncio.gather(*(self._requests(number) for number in range(requests)))

    async def _requests(self, number: int) -> None:
        """Send one request after the other. The first ones have other lengths, so that they do not end together."""
        draw, (prompt, most) = random.Random(number), self.lengths
        vocabulary = 256
        for turn in itertools.count():
            tokens = np.array([draw.randrange(vocabulary) for _ in range(prompt)], dtype=np.int32)
            length = draw.randint(1, most) if turn == 0 else draw.randint(most // 2, most)
            await self.engine.generate(f"{number}.{turn}", tokens, Sampling(length, seed=turn), 0, None)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def _running(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------------- the learner


class Learner:
    """The process that holds the weights and publishes them."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, settings: dict[str, Any], directory: Path, environment: dict[str, str]) -> Learner:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(PUBLISHER), str(directory), INCARNATION, json.dumps(settings),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **environment}, limit=1 << 24,
        )  # fmt: skip
        learner = cls(process)
        await learner._ask("ready")
        return learner

    async def publish(self, version: int) -> Manifest:
        return msgspec.json.decode(await self._ask(f"publish {version}"), type=Manifest)

    @asynccontextmanager
    async def working(self, busy: bool) -> AsyncIterator[None]:
        await self._ask("busy" if busy else "idle")
        try:
            yield
        finally:
            await self._ask("idle")

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _ask(self, command: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        reply = await self._process.stdout.readline()
        if not reply:
            raise BadInput("the learner process ended; its error is above")
        return reply


# -------------------------------------------------------------------------------------------------------------- the run


async def run(config: Config, settings: dict[str, Any], options: Any) -> list[Case]:
    placement = placement_of(config)
    settings = {**settings, "weights.transport": placement.transport}
    runtime = await asyncio.to_thread(RuntimeDirectory)
    try:
        learner = await Learner.start(settings, runtime.path, placement.learner.environment)
        try:
            return await _with_server(config, placement, learner, runtime, options)
        finally:
            await learner.stop()
    finally:
        await asyncio.to_thread(runtime.remove)


async def _with_server(
    config: Config, placement: Placement, learner: Learner, runtime: RuntimeDirectory, options: Any
) -> list[Case]:
    directory = runtime.path
    plan = await LaunchPlan.of(config, directory, INCARNATION)
    environment = runtime.cleanup.marked(runtime.cleanup.new_mark()) | temporary_files_environment(directory)
    started = await launch_server(plan, 0, Path("vllm_updates.log"), _say, environment, placement.engines[0])
    _say(f"vLLM {plan.found.version}, weights by {placement.transport}")
    cases: list[Case] = []
    version = 0
    try:
        for name, by_calls in options.plan:
            server = CountingServer(HttpClient(started.server.url), control_s=120, incarnation=INCARNATION)
            setup = EngineSetup("engine-0", 0, "", INCARNATION, directory, directory, placement.engines[0])
            transport: Transport = transport_for(config, setup, server, send_snapshot)
            if by_calls:
                transport = SeparateCalls(server.http, 120)
            settings = ServerEngineSettings(
                "engine-0", INCARNATION, version=version, slots=options.requests, kv=config.engine.kv,
                context=config.engine.context,
            )  # fmt: skip
            engine = ServerEngine(server, transport, settings)
            await engine.start()
            lengths = (options.prompt, options.tokens)
            bench = Bench(started.process.pid, server, engine, learner, lengths, options.settle, version)
            requests = 0 if name == "alone" else options.requests
            title = name + CALLS * by_calls
            cases.append(await bench.measure(title, options.updates, requests, busy=name == "busy"))
            version = bench.version
            await engine.close()
            _say(json.dumps(cases[-1].summary()))
    finally:
        await started.stop()
    return cases


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextmanager
def _model(name: str, context: int) -> Iterator[str]:
    """The model to serve: a name of `SHAPES` is written to a temporary directory, anything else is left to outpace."""
    if name not in SHAPES:
        yield name
        return
    with temporary_directory("vllm-updates") as directory:
        yield str(random_model(SHAPES[name], directory, context))


def random_model(shape: dict[str, int], directory: Path, context: int) -> Path:
    """Write a model of this shape with random weights, and the tokenizer of the starter model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outpace.models.loading import load_tokenizer

    torch.manual_seed(0)
    made = LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=max(2048, context))
    LlamaForCausalLM(made).bfloat16().save_pretrained(directory)  # type: ignore[no-untyped-call]
    load_tokenizer("starter").save_pretrained(directory)
    return directory


def parsed(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The options, and settings of the run (`--section.key value`)."""
    parser = BenchParser(prog="vllm_updates.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable, help="Python of the environment that has vLLM")
    parser.add_argument("--model", default="", help=f"directory, name, or {', '.join(SHAPES)} (default: by device)")
    parser.add_argument("--requests", type=int, default=0, help="running at once (default: 512 on a GPU, else 64)")
    parser.add_argument("--updates", type=int, default=6, help="per case")
    parser.add_argument("--tokens", type=int, default=0, help="longest completion")
    parser.add_argument("--prompt", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--cases", default="alone,running,busy")
    parser.add_argument("--calls", action="store_true", help="also update by separate calls")
    parser.add_argument("--transport", default="auto", help="weights.transport")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds of every measurement without updates")
    return parser.parse_known_args(words)


def main(words: Sequence[str]) -> int:
    options, others = parsed(words)
    names = options.cases.split(",")
    if unknown := set(names) - {"alone", "running", "busy"}:
        raise BadInput(f"--cases: no case {sorted(unknown)[0]}; there are alone, running and busy")
    options.plan = [(name, False) for name in names]
    options.plan += [(name, True) for name in names if options.calls and name != "alone"]
    on_gpu = uses_gpu(make_config(parse_arguments(others)))
    options.requests = options.requests or (512 if on_gpu else 64)
    options.tokens = options.tokens or (512 if on_gpu else 160)
    context = options.prompt + options.tokens
    with _model(options.model or ("135M" if on_gpu else "starter"), context) as model:
        settings = {
            "engine.kind": "vllm", "launch.python": options.python, "model.path": model,
            "model.dtype": "bfloat16" if on_gpu else "float32", "engine.slots": options.requests,
            "engine.context": context, "weights.transport": options.transport, "engine.threads": 1,
            **parse_arguments(others),
        }  # fmt: skip
        config = resolve(make_config(settings))
        cases = asyncio.run(run(config, settings, options))
    print_table(cases)
    print(json.dumps([case.summary() for case in cases]))
    missed = missed_targets(cases)
    for message in missed:
        print(f"missed: {message}")
    return 1 if missed else 0


if __name__ == "__main__":
    run_benchmark(main)
