"""GPU placement: which process computes on which GPU, and how weights reach the engines.

`assign_gpus` is a pure function of the config and the visible GPUs. The learner gets the first `learner.devices` GPUs,
one per process, and the engines the others, round-robin. Under torchrun the learner gets, on every machine, one GPU per
process that torchrun starts there. Engines share the learner's one GPU only if the other GPUs are too few.
Launched servers and the learner share a GPU with fixed memory budgets. Each child process sees only its own GPUs,
through CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from outpace.config import Config
from outpace.config.engines import server_address
from outpace.errors import BadInput
from outpace.runtime.torchrun import torchrun_process

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
"""Path of the CUDA driver under WSL, which has no /dev/nvidia*."""

MARGIN = 0.05
"""Fraction of a shared GPU's memory outside all budgets: CUDA contexts and library workspaces."""

SMALLEST_LEARNER = 0.1
"""Smallest fraction of a GPU's memory that a learner can work with."""

SERVERS_ALONE = 0.9
"""Fraction of a GPU's memory that all servers on it take together if the learner is on another GPU. Default for
launch.gpu_memory."""

SERVERS_BESIDE_LEARNER = 0.4
"""The same for a GPU that the servers share with the learner."""

PARALLELISM = {
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size"),
    "data": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}
"""Options of vLLM and SGLang that multiply the number of GPUs of one server."""


class GpuAssignment(msgspec.Struct, frozen=True):
    """The GPUs of one process (empty: it computes on the CPU) and its fraction of each GPU's memory."""

    gpus: list[str] = []
    memory: float = 1.0

    @property
    def environment(self) -> dict[str, str]:
        return {CUDA_VISIBLE_DEVICES: ",".join(self.gpus)} if self.gpus else {}


ON_CPU = GpuAssignment()


class Placement(msgspec.Struct, frozen=True):
    """GPU assignments of all processes of a run. GPUs are named as in CUDA_VISIBLE_DEVICES."""

    learners: list[GpuAssignment]  # one per learner process on this machine, by rank
    engines: list[GpuAssignment]
    workers: list[str]  # the GPUs that rollout workers may use
    transport: str
    groups: list[list[str]] = []  # sets of GPUs for one engine each, assigned round-robin
    joining_memory: list[float] = []  # memory fraction of one more server, per group; empty: engines have no budgets

    @property
    def learner(self) -> GpuAssignment:
        """The assignment of the learner's first process, rank 0."""
        return self.learners[0]

    def assign_joining_engine(self, others: Collection[GpuAssignment]) -> GpuAssignment:
        """Return the assignment of an engine that joins while `others` run: the GPUs with the most free memory."""
        if not self.groups:
            return ON_CPU
        taken = [sum(engine.memory for engine in others if engine.gpus == group) for group in self.groups]
        if not self.joining_memory:
            return GpuAssignment(self.groups[taken.index(min(taken))])
        for index, group in enumerate(self.groups):
            taken[index] += sum(each.memory for each in self.learners if set(each.gpus) & set(group))
        best = min(range(len(self.groups)), key=lambda index: taken[index] + self.joining_memory[index])
        group, memory = self.groups[best], self.joining_memory[best]
        if taken[best] + memory > 1.0:
            beside_learner = any(set(each.gpus) & set(group) for each in self.learners)
            smaller = "" if beside_learner else " or a smaller launch.gpu_memory"
            raise BadInput(
                f"launch.gpu_memory: one more server needs {memory:g} of the memory of {_named(group)}, but "
                f"{taken[best]:.2f} is already assigned; start the run with more engines{smaller}"
            )
        return GpuAssignment(group, memory)

    def lines(self, config: Config) -> Iterator[str]:
        """Yield one line per process with its GPUs, for display. `config` is the config of this placement."""
        local = len(self.learners)
        for rank in range(config.learner.devices):
            elsewhere = f" of machine {rank // local + 1}" if rank >= local else ""  # every machine has as many ranks
            yield f"{learner_name(rank)}: {_shown(self.learners[rank % local])}{elsewhere}"
        if config.kl.coefficient > 0:
            gpus = _named([gpu for learner in self.learners for gpu in learner.gpus])
            yield f"reference model: {gpus}, inside the learner" + (", without a copy" if config.lora.rank else "")
        parallelism = _parallelism_shown(config)
        for index, engine in enumerate(self.engines):
            url = config.engine.urls[index] if config.engine.urls else ""
            yield f"engine-{index}: " + (f"the server at {_host(url)}" if url else _shown(engine) + parallelism)
        yield f"rollout workers and reward functions: {_named(self.workers)}"
        if config.judge.base_url is not None:
            yield f"judge: the server at {_host(config.judge.base_url)}"
        yield f"weights: {self.transport}"


def learner_name(rank: int) -> str:
    """Return the name of the component that runs this rank of the learner."""
    return "learner" if rank == 0 else f"learner-{rank}"


def _host(url: str) -> str:
    """Return host and port of a URL, without a user name or password."""
    address = server_address(url)
    return address.host if address.port is None else f"{address.host}:{address.port}"


def _parallelism_shown(config: Config) -> str:
    sizes = dict(_parallelism(config.launch.args)) if launches_servers(config) else {}
    return "".join(f", {kind}-parallel {size}" for kind, size in sizes.items() if size > 1)


def _shown(assignment: GpuAssignment) -> str:
    share = f", {assignment.memory:.0%} of its memory" if assignment.memory < 1 else ""
    return _named(assignment.gpus) + share


def _named(gpus: Sequence[str]) -> str:
    if not gpus:
        return "CPU"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(gpus)}"


# -------------------------------------------------------------------------------------------------------- this machine


def listed_gpus(variable: str) -> list[str]:
    """Parse a value of CUDA_VISIBLE_DEVICES into indices or UUIDs. As in CUDA, -1 ends the list."""
    gpus: list[str] = []
    for gpu in (word.strip() for word in variable.split(",")):
        if gpu in ("", "-1", "NoDevFiles"):
            break
        if gpu not in gpus:
            gpus.append(gpu)
    return gpus


def visible_gpus(config: Config) -> list[str]:
    """Return the GPUs visible to this process, without loading torch. With run.device = "auto" and a CPU build of torch
    there are none. Otherwise CUDA_VISIBLE_DEVICES is trusted if set, so a run can be planned on another machine. If
    unset, run.device = "cuda" with a CUDA build of torch means at least one."""
    if config.run.device == "auto" and not torch_has_cuda():
        return []
    variable = os.environ.get(CUDA_VISIBLE_DEVICES)
    if variable is not None:
        return listed_gpus(variable)
    count = len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(WSL_DRIVER.exists())
    assumed = int(config.run.device == "cuda" and torch_has_cuda())
    return [str(index) for index in range(count or assumed)]


@functools.cache
def torch_has_cuda() -> bool:
    """Return whether torch is a CUDA build, from the source of `torch.version`: loading torch takes seconds. True if
    unknown."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    try:
        version = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return True
    return re.search(r"^cuda\b.*= *None", version, re.MULTILINE) is None


def uses_gpu(config: Config) -> bool:
    return config.run.device == "cuda" or (config.run.device == "auto" and bool(visible_gpus(config)))


def placement_of(config: Config) -> Placement:
    """Return the placement on this machine. Raises `BadInput` if there are not enough GPUs."""
    return assign_gpus(config, visible_gpus(config), local_ranks(config))


def planned_placement(config: Config, gpus: Sequence[str]) -> Placement:
    """Like `placement_of` with these visible GPUs. Also plans a run on several machines before torchrun starts it: a
    learner with more devices than this machine has GPUs uses all of them, and as many on every other machine."""
    ranks = local_ranks(config)
    if torchrun_process() is None and config.run.device != "cpu" and 0 < len(gpus) < ranks:
        if ranks % len(gpus):
            raise BadInput(
                f"learner.devices: {ranks} GPUs for the learner, but {_count(len(gpus))} visible, and {ranks} cannot "
                f"be divided among machines with {len(gpus)}; set another number, or use torchrun"
            )
        ranks = len(gpus)
    return assign_gpus(config, gpus, ranks)


def missing_machines(config: Config, placement: Placement) -> str:
    """Return how to start a planned run that needs several machines; empty if it needs only this one."""
    devices, local = config.learner.devices, len(placement.learners)
    if torchrun_process() is not None or devices == local:
        return ""
    return (
        f"learner.devices: {devices} GPUs for the learner need {devices // local} machines like this one; start the "
        f"run with torchrun --nnodes {devices // local} --nproc-per-node {local}, or lower it"
    )


def local_ranks(config: Config) -> int:
    """Return the number of learner processes on this machine."""
    torchrun = torchrun_process()
    return config.learner.devices if torchrun is None else torchrun.local_size


# ----------------------------------------------------------------------------------------------------------- the rules


def assign_gpus(config: Config, gpus: Sequence[str], ranks: int | None = None) -> Placement:
    """Assign GPUs to all processes on this machine. `gpus` are the visible ones, named as in CUDA_VISIBLE_DEVICES;
    `config` is resolved; `ranks`: learner processes on this machine, None: all.

    Raises `BadInput` if there are not enough GPUs."""
    engines = config.engine.count or max(len(config.engine.urls), 1)
    wanted, ranks = config.rollout.gpus, ranks or config.learner.devices
    if wanted > len(gpus):
        raise BadInput(
            f"rollout.gpus: {wanted} requested, but {_count(len(gpus))} visible; lower it or make more GPUs visible"
        )
    if config.run.device == "cuda" and not gpus:
        raise BadInput('run.device: "cuda" is set, but no GPU is visible; set "cpu", or use a machine with a GPU')
    if config.run.device == "cpu" or not gpus:
        on_cpu = [ON_CPU] * engines
        return Placement([ON_CPU] * ranks, on_cpu, list(gpus[:wanted]), _transport(config, shares=False))

    size = _gpus_per_engine(config)
    enough_for_all = len(gpus) - wanted >= ranks + size
    workers = list(gpus[len(gpus) - wanted :])
    learner, groups = _groups(config, gpus[: len(gpus) - wanted] if enough_for_all else gpus, size, ranks)
    if not launches_servers(config) or not groups:
        assigned = [GpuAssignment(groups[index % len(groups)] if groups else []) for index in range(engines)]
        transport = _transport(config, shares=False)
        return Placement([GpuAssignment([gpu]) for gpu in learner], assigned, workers, transport, groups)
    shares = bool(set(learner) & set(groups[0]))
    on_group = [len(range(index, engines, len(groups))) for index in range(len(groups))]
    memory = [_server_memory(config, servers, shares) for servers in on_group]
    learner_memory = 1.0 - on_group[0] * memory[0] - MARGIN if shares else 1.0
    return Placement(
        [GpuAssignment([gpu], learner_memory) for gpu in learner],
        [GpuAssignment(groups[index % len(groups)], memory[index % len(groups)]) for index in range(engines)],
        workers,
        _transport(config, shares=groups == [learner]),
        groups,
        joining_memory=[_server_memory(config, 1, shares)] * len(groups),
    )


def assign_servers(config: Config, gpus: Sequence[str]) -> list[GpuAssignment]:
    """Assign all GPUs to servers, on a machine without a learner. Raises `BadInput` if there are not enough."""
    servers, size = config.engine.count or 1, _gpus_per_engine(config)
    if config.run.device == "cpu" or not gpus:
        return [ON_CPU] * servers
    if size > len(gpus):
        raise BadInput(_too_few_for_a_server(size, len(gpus)))
    groups = [list(gpus[start : start + size]) for start in range(0, len(gpus) - size + 1, size)]
    on_group = [len(range(index, servers, len(groups))) for index in range(len(groups))]
    memory = [_server_memory(config, count, shares=False) for count in on_group]
    return [GpuAssignment(groups[index % len(groups)], memory[index % len(groups)]) for index in range(servers)]


def _too_few_for_a_server(size: int, visible: int) -> str:
    return (
        f"launch.args: the parallelism needs {size} GPUs per server, but {_count(visible)} visible; "
        f"lower --tensor-parallel-size or make more GPUs visible"
    )


def launches_servers(config: Config) -> bool:
    """Whether the run starts its engines as servers."""
    return config.engine.kind != "embedded" and not config.engine.urls


def _groups(config: Config, gpus: Sequence[str], size: int, ranks: int) -> tuple[list[str], list[list[str]]]:
    """Return the GPUs of the learner, one per process, and the sets of GPUs that are assigned to engines
    round-robin."""
    if ranks > len(gpus):
        raise BadInput(
            f"learner.devices: {ranks} GPUs for the learner, but {_count(len(gpus))} visible; "
            f"lower it, make more GPUs visible, or use several machines (torchrun)"
        )
    learner, others = list(gpus[:ranks]), list(gpus[ranks:])
    if config.engine.urls:
        return learner, []
    if config.run.runtime == "inline":  # one process, whose device is the first GPU
        return learner, [learner]
    if launches_servers(config) and CUDA_VISIBLE_DEVICES in config.launch.env:
        return _given_groups(config, gpus, size, ranks)
    if config.weights.transport == "ipc":  # works only within one GPU
        if size > 1:
            raise BadInput(f'weights.transport: "ipc" needs one GPU, but a server uses {size}; set "memory"')
        return learner, [learner]
    if size > len(others) and ranks > 1:
        raise BadInput(
            f"learner.devices: {ranks} GPUs for the learner and {size} for an engine, but {_count(len(gpus))} visible; "
            f"lower it, make more GPUs visible, or use servers on other machines (engine.urls)"
        )
    if size > len(gpus):
        raise BadInput(_too_few_for_a_server(size, len(gpus)))
    if size > len(others):
        return learner, [list(gpus[:size])]
    return learner, [others[start : start + size] for start in range(0, len(others) - size + 1, size)]


def _given_groups(config: Config, gpus: Sequence[str], size: int, ranks: int) -> tuple[list[str], list[list[str]]]:
    """Use the GPUs from launch.env for every server. The learner gets other GPUs; if it needs one and there is no
    other, it shares the first."""
    given = listed_gpus(config.launch.env[CUDA_VISIBLE_DEVICES])
    if not given:  # servers on the CPU
        return list(gpus[:ranks]), []
    if size > len(given):
        raise BadInput(
            f"launch.env: {CUDA_VISIBLE_DEVICES} gives a server {len(given)} GPUs, but its parallelism needs {size}; "
            f"add GPUs there or lower --tensor-parallel-size"
        )
    free = [gpu for gpu in gpus if gpu not in given]
    if ranks > max(len(free), 1):
        raise BadInput(
            f"learner.devices: {ranks} GPUs for the learner, but launch.env gives the servers all except "
            f"{_named(free) if free else 'none'}; lower it, or name fewer GPUs in {CUDA_VISIBLE_DEVICES} there"
        )
    return free[:ranks] or [gpus[0]], [given]


def _gpus_per_engine(config: Config) -> int:
    if not launches_servers(config):
        return 1
    sizes = dict(_parallelism(config.launch.args))
    if "--enable-dp-attention" in config.launch.args:  # SGLang: data parallelism inside the tensor-parallel GPUs
        sizes.pop("data", None)
    product = 1
    for size in sizes.values():
        product *= size
    return product


def _parallelism(args: Sequence[str]) -> Iterator[tuple[str, int]]:
    names = {option: kind for kind, options in PARALLELISM.items() for option in options}
    for index, word in enumerate(args):
        option, is_joined, value = word.partition("=")
        kind = names.get(option.replace("_", "-"))
        if kind is None:
            continue
        text = value if is_joined else args[index + 1] if index + 1 < len(args) else ""
        if not text.isdecimal() or int(text) < 1:
            raise BadInput(f"launch.args: {option} must be a positive integer, not {text!r}")
        yield kind, int(text)


def _server_memory(config: Config, servers: int, shares: bool) -> float:
    """Return the memory fraction of one of `servers` on the same GPUs. `shares`: the learner is on one of these
    GPUs."""
    given = config.launch.gpu_memory
    if given is None:
        return (SERVERS_BESIDE_LEARNER if shares else SERVERS_ALONE) / max(servers, 1)
    most = 1.0 - MARGIN - SMALLEST_LEARNER if shares else 1.0
    if servers * given > most + 1e-9:
        whose = "one server" if servers == 1 else f"each of {servers} servers"
        problem = "leaves too little GPU memory for the learner" if shares else "exceeds the memory of the GPU"
        raise BadInput(
            f"launch.gpu_memory: {given:g} for {whose} {problem}; set {int(100 * most / servers) / 100:g} or less, "
            f"or start fewer servers"
        )
    return given


def transport_of(config: Config) -> str:
    """Return the weight transport. The controller resolves "auto" in the config of a child process, because a child
    does not see all GPUs."""
    return placement_of(config).transport if config.weights.transport == "auto" else config.weights.transport


def _transport(config: Config, shares: bool) -> str:
    """Resolve weights.transport = "auto" to the fastest transport that is certain to work.
    `shares`: every engine is a server on the learner's GPU. A sharded learner writes its weights to host memory."""
    if config.weights.transport != "auto":
        return config.weights.transport
    if config.engine.kind == "sglang" or config.engine.urls:
        return "files"
    in_host_memory = config.lora.rank > 0 or config.weights.delta or config.learner.sharded
    return "ipc" if shares and config.engine.kind == "vllm" and not in_host_memory else "memory"


def _count(gpus: int) -> str:
    return "none is" if gpus == 0 else "only one is" if gpus == 1 else f"only {gpus} are"
