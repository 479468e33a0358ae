"""Memory estimates of the learner and embedded engines, made before anything starts.

Each estimate has two figures. The minimum is always used: weights, gradients, optimizer states, the first part of the
KV cache. The maximum is reached only when every sequence fills the context and every learner pass is full, which never
happens in many runs. A run is rejected if the minimum does not fit, and gets a warning if the maximum does not.

The estimate of a sharded learner covers one of its processes:

    weights, gradients, optimizer state    divided by learner.devices; in host memory with learner.offload
    gathered: embeddings and output head   whole, in float32; after the pass, their gradient and the buffer that sums it
    gathered: layers                       two of them, one computing and one arriving, or all without learner.reshard;
                                           gradient and summation buffer of one
    activations of one pass                as in a learner that is not sharded

Estimates are for Llama-style decoders. A model whose config.json lacks the needed values is not estimated.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from outpace.config import Config
from outpace.config.defaults import with_defaults
from outpace.config.sections import DEFAULT_TOKENS_PER_PASS
from outpace.errors import BadInput
from outpace.hardware.placement import GpuAssignment, Placement, placement_of

GB = 10**9
MIB = 1 << 20
BYTES = {"float32": 4, "bfloat16": 2}
FIRST_CAPACITY = 128
"""Initial capacity of a KV cache, in tokens."""
PREFILL_TOKENS = 4096
LOGITS_PER_SLICE = {"cpu": 1 << 24, "cuda": 1 << 27}
NVIDIA_SMI_S = 20.0

MOST_TOKENS_PER_PASS = {"cpu": DEFAULT_TOKENS_PER_PASS, "cuda": 65_536}
"""Upper limit of the chosen `learner.tokens_per_pass`: larger passes are not faster."""
TOKENS_STEP = 1024
"""The chosen default is a multiple of this."""
PASS_SHARE = 0.5


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int  # sum over all experts that one token is routed to
    vocabulary: int
    context: int
    vocabulary_matrices: int = 1  # 2 if the output head is not tied to the embeddings
    stored: str = "bfloat16"  # dtype that frozen matrices can be loaded in: bfloat16 if the files have it, else float32

    @property
    def outside_layers(self) -> int:
        """Parameters that are in no layer: embeddings, output head, last norm."""
        return self.vocabulary_matrices * self.vocabulary * self.width + self.width

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return max(0, self.parameters - self.outside_layers) // self.layers

    @classmethod
    def read(cls, directory: Path) -> ModelShape | None:
        """Read the shape from the model's files. Returns None if they lack a needed value."""
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text())
            config = config.get("text_config") or config
            heads = int(config["num_attention_heads"])
            experts = int(config.get("num_experts_per_tok") or 1)
            tensors = {name: each for file in _weight_files(directory) for name, each in _tensors(file).items()}
            matrices = {name: tensor for name, tensor in tensors.items() if len(tensor["shape"]) > 1}
            # Experts are loaded in float32. Some checkpoints with experts are loaded in float32 as a whole.
            halves = all(each["dtype"] == "BF16" and ".experts." not in name for name, each in matrices.items())
            return cls(
                parameters=sum(math.prod(tensor["shape"]) for tensor in tensors.values()),
                layers=int(config["num_hidden_layers"]),
                width=int(config["hidden_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
                feed_forward=experts * int(config.get("moe_intermediate_size") or config["intermediate_size"]),
                vocabulary=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
                vocabulary_matrices=1 + any(name.endswith("lm_head.weight") for name in tensors),
                stored="bfloat16" if halves else "float32",
            )
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def kv_bytes(self, dtype: str) -> int:
        """Return the bytes of the KV cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES[dtype]


def _weight_files(directory: Path) -> set[Path]:
    """Return the files that are loaded. Some models also contain the same weights in another format."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return {directory / name for name in json.loads(index.read_text())["weight_map"].values()}
    whole = directory / "model.safetensors"
    return {whole} if whole.exists() else set(directory.glob("*.safetensors"))


def _tensors(file: Path) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each tensor in a safetensors file, from its header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(opened.read(size))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory in bytes: `fixed` always, plus `filled` with full contexts and passes.

    `setting` is the setting to lower if it does not fit. Its value is `units`; each unit always takes `fixed_per_unit`,
    and `per_unit` with full contexts and passes."""

    fixed: int
    filled: int
    setting: str
    units: int
    per_unit: int
    fixed_per_unit: int = 0
    lowest: int = 1
    """Lowering `setting` below this alone saves no memory."""

    @property
    def most(self) -> int:
        return self.fixed + self.filled

    def largest_fitting(self, available: float) -> int:
        """Return a value of `setting` with which `most` fits. Below 1 means that no value does."""
        return math.floor(self.units - max(0.0, self.most - available) / max(self.per_unit, 1))


# ----------------------------------------------------------------------------------------------------------- estimates


def engine_memory(config: Config, shape: ModelShape) -> MemoryEstimate:
    """Estimate the memory of one embedded engine."""
    slots, size = config.engine.resolved_slots, BYTES[config.model.dtype]
    context = min(config.engine.context or shape.context, shape.context)
    kv = shape.kv_bytes(config.model.dtype)
    weights = shape.parameters * size
    first = context if config.run.deterministic else min(context, FIRST_CAPACITY)
    evaluated = config.eval.count > 0
    pinned = (slots if config.run.deterministic else min(slots, config.eval.max_running)) if evaluated else 0
    # One row of a step: logits as computed and in float32, logprobs, probabilities, cumulative sums in float64;
    # attention scores in float32 and in the model's dtype.
    row = shape.vocabulary * (size + 20) + shape.heads * context * (4 + 2 * size)
    prefill = max(PREFILL_TOKENS, context) * size * (8 * shape.width + 4 * shape.feed_forward)
    per_slot = context * kv + row
    fixed = 2 * weights + slots * first * kv  # one weight set in use, one being loaded
    full = slots * per_slot + pinned * context * kv + (weights if evaluated else 0) + prefill
    return MemoryEstimate(fixed, full - slots * first * kv, "engine.slots", slots, per_slot, first * kv)


def learner_memory(config: Config, shape: ModelShape, on_gpu: bool = False) -> MemoryEstimate:
    """Estimate the memory of one learner process, on its device."""
    parameters, learner = shape.parameters, config.learner
    halves, compiled = config.model.dtype == "bfloat16", on_gpu and learner.compile
    state = learner_state(config, shape)
    if learner.sharded:
        in_host = learner.offload and on_gpu
        fixed = (0 if in_host else -(-state // learner.devices)) + gathered_memory(config, shape)
    else:
        fixed = state + (2 * parameters if halves and not config.lora.rank else 0)  # a bfloat16 copy to compute with
    context = min(config.engine.context or shape.context, shape.context)
    batch = -(-config.pacing.groups_per_step * config.rollout.group_size // learner.devices) * context
    tokens = min(max(learner.resolved_tokens_per_pass, context), batch)
    layer = _layer_activations(shape, halves, compiled)
    kept = shape.layers * 4 * shape.width + layer if learner.gradient_checkpointing else shape.layers * layer
    per_token = kept + 16 * shape.width
    logits = LOGITS_PER_SLICE["cuda"] * 8 if compiled else LOGITS_PER_SLICE["cpu"] * 16
    casts_all = halves and config.lora.rank and not learner.sharded and _frozen_size(config, shape) > 2
    casts = 2 * parameters if casts_all else 0
    filled = tokens * per_token + logits + 4 * shape.vocabulary * shape.width + casts
    if learner.resolved_tokens_per_pass <= context:  # a pass holds at least one sequence
        return MemoryEstimate(fixed, filled, "engine.context", tokens, per_token)
    return MemoryEstimate(fixed, filled, "learner.tokens_per_pass", tokens, per_token, lowest=context)


def learner_state(config: Config, shape: ModelShape) -> int:
    """Return the bytes of weights, gradients, optimizer state and reference of the whole learner. All are float32,
    except frozen matrices that the files store in `model.dtype`."""
    if config.lora.rank:
        embeddings = shape.vocabulary * shape.width
        frozen = 4 * embeddings + _frozen_size(config, shape) * (shape.parameters - embeddings)
        return frozen + 16 * _adapter_parameters(config, shape)
    return (20 if config.kl.coefficient > 0 else 16) * shape.parameters


def _frozen_size(config: Config, shape: ModelShape) -> int:
    """Return the bytes per parameter of a frozen matrix, with adapters."""
    return BYTES[config.model.dtype] if shape.stored == config.model.dtype else 4


def gathered_memory(config: Config, shape: ModelShape) -> int:
    """Return the bytes that a process of a sharded learner holds of gathered weights and of gradients before they are
    summed. Gradients of a layer are in the dtype of its weights and are summed in float32."""
    size = BYTES[config.model.dtype]
    trained = 0 if config.lora.rank else 1  # gradients of adapters are small
    layers = min(2, shape.layers) if config.learner.reshard else shape.layers
    in_layers = layers * size * shape.layer + trained * (size + 4) * shape.layer
    outside = 4 * shape.outside_layers
    if config.lora.rank:
        head = (shape.vocabulary_matrices - 1) * shape.vocabulary * shape.width
        outside -= (4 - _frozen_size(config, shape)) * head
    # Gradients of embeddings and head are summed when the layers and the weights outside them have been freed.
    return max(in_layers + outside, trained * 2 * outside)


def _layer_activations(shape: ModelShape, halves: bool, compiled: bool) -> int:
    """Return the bytes per token that one layer keeps for its backward pass. Norms keep their float32 input and output;
    with bfloat16 matmuls every linear layer keeps its own bfloat16 copy of its input. Compiled layers recompute what is
    cheap."""
    width, queries = shape.width, shape.heads * shape.head_size
    keys, wide = shape.kv_heads * shape.head_size, shape.feed_forward
    if halves and compiled:
        return 9 * width + 4 * queries + 4 * keys + 6 * wide
    if halves:
        return 26 * width + 6 * queries + 4 * keys + 8 * wide
    return 24 * width + 12 * queries + 8 * keys + 16 * wide


def _adapter_parameters(config: Config, shape: ModelShape) -> int:
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {
        "q_proj": shape.width + queries,
        "k_proj": shape.width + keys,
        "v_proj": shape.width + keys,
        "o_proj": queries + shape.width,
    }
    feed_forward = shape.width + shape.feed_forward
    return sum(shape.layers * config.lora.rank * sizes.get(target, feed_forward) for target in config.lora.targets)


# ------------------------------------------------------------------------------------------------------------ checking


@dataclass(frozen=True)
class AvailableMemory:
    """Total bytes per GPU, named as in CUDA_VISIBLE_DEVICES, and of the host. GPUs of unknown size are missing."""

    gpus: Mapping[str, int]
    host: int


def check_memory(config: Config, placement: Placement, shape: ModelShape, available: AvailableMemory) -> list[str]:
    """Return warnings for what may not fit. Raises `BadInput` for what cannot fit."""
    learner = learner_memory(config, shape, on_gpu=_device(placement.learner) != "")
    engines = [engine_memory(config, shape)] * len(placement.engines) if config.engine.kind == "embedded" else []
    where: dict[tuple[float, tuple[MemoryEstimate, ...]], list[str]] = {}  # devices by memory and what runs there
    for device in dict.fromkeys(_device(each) for each in (*placement.learners, *placement.engines)):
        room: float | None = available.gpus.get(device) if device else available.host
        if room is None:
            continue
        estimates = [each for each, gpus in zip(engines, placement.engines, strict=False) if _device(gpus) == device]
        if ranks := [each for each in placement.learners if _device(each) == device]:
            room *= ranks[0].memory
            estimates += [learner] * len(ranks)
        where.setdefault((room, tuple(estimates)), []).append(device)
    warnings: list[str] = []
    for (room, on_device), devices in where.items():
        warnings += _check_device(list(on_device), room, _named(devices), learner, adapters=config.lora.rank > 0)
    _check_host(config, placement, shape, available.host)
    return warnings


def _named(devices: list[str]) -> str:
    if len(devices) > 1:
        return f"each of GPUs {', '.join(devices)}"
    return f"GPU {devices[0]}" if devices[0] else "this machine"


def _check_host(config: Config, placement: Placement, shape: ModelShape, host: int) -> None:
    """Check that host memory suffices for the learner processes on GPUs that offload to it."""
    if not config.learner.offload or not _device(placement.learner):
        return
    needed = learner_state(config, shape) * len(placement.learners) // config.learner.devices
    if needed > host:
        raise BadInput(
            f"learner.offload: weights, gradients and optimizer state need {needed / GB:.1f} GB of host memory, but "
            f"{host / GB:.1f} GB are available; use more GPUs (learner.devices) instead, or a smaller model"
        )


def fitting_tokens_per_pass(
    config: Config, placement: Placement, shape: ModelShape | None, available: AvailableMemory
) -> int:
    """Return a default for `learner.tokens_per_pass`. A full pass takes at most half of the memory that weights,
    optimizer states and idle engines leave on the learner's device; the other half is for the KV cache. It is above
    16,384 only if it also fits beside engines whose contexts are full."""
    device = _device(placement.learner)
    total = available.gpus.get(device) if device else available.host
    if shape is None or total is None or config.run.deterministic:
        return config.learner.resolved_tokens_per_pass
    learner = learner_memory(config, shape, on_gpu=bool(device))
    ranks = sum(_device(each) == device for each in placement.learners)  # several only on the CPU
    beside = [gpus for gpus in placement.engines if _device(gpus) == device] if config.engine.kind == "embedded" else []
    engine, room = engine_memory(config, shape), total * placement.learner.memory - ranks * learner.fixed
    fitting = PASS_SHARE * (room - engine.fixed * len(beside)) / (ranks * learner.per_unit)
    beside_full = (room - engine.most * len(beside)) / (ranks * learner.per_unit)  # with every context full
    fitting = min(fitting, max(beside_full, DEFAULT_TOKENS_PER_PASS))
    rounded = int(fitting) // TOKENS_STEP * TOKENS_STEP
    return max(TOKENS_STEP, min(rounded, MOST_TOKENS_PER_PASS["cuda" if device else "cpu"]))


def _device(assignment: GpuAssignment) -> str:
    """Return the first GPU, or an empty string for the host."""
    return assignment.gpus[0] if assignment.gpus else ""


def _check_device(
    estimates: list[MemoryEstimate], room: float, where: str, learner: MemoryEstimate, adapters: bool
) -> Iterator[str]:
    if not estimates:
        return
    least, most = sum(each.fixed for each in estimates), sum(each.most for each in estimates)
    if least > room:
        largest = max(estimates, key=lambda each: each.fixed)
        shardable = largest is learner and "GPU" in where
        raise BadInput(_does_not_fit(largest, least, room, where, adapters, shardable))
    if most > room:
        largest = max(estimates, key=lambda each: each.filled)
        value = largest.largest_fitting(room - (most - largest.most))
        both = dict.fromkeys((largest.setting, "engine.context"))
        advice = f"set {largest.setting} = {value}" if value >= largest.lowest else f"lower {' and '.join(both)}"
        yield (
            f"memory of {where}: the run needs {most / GB:.1f} GB if every context and pass is full, but only "
            f"{room / GB:.1f} GB are available; if it runs out of memory, {advice}"
        )


def _does_not_fit(largest: MemoryEstimate, least: int, room: float, where: str, adapters: bool, shardable: bool) -> str:
    sizes = f"the run needs at least {least / GB:.1f} GB on {where}, but {room / GB:.1f} GB are available"
    excess = (least - room) / largest.fixed_per_unit if largest.fixed_per_unit else math.inf
    if largest.units - excess >= 1:
        return f"{largest.setting}: {sizes}; set {math.floor(largest.units - excess)} or less"
    remedies = "use more GPUs (learner.devices), " if shardable else ""
    remedies += "" if adapters else "set lora.rank = 16 to train adapters only, "
    return f"model.path: {sizes}; {remedies}{'or ' if remedies else ''}use a smaller model"


# -------------------------------------------------------------------------------------------------------- this machine


def with_tokens_per_pass(config: Config, model: Path) -> Config:
    """Return the config with `learner.tokens_per_pass`, chosen by this machine's memory unless it is set.

    The choice does not count as set by the user: a resume on other hardware chooses again."""
    if config.learner.tokens_per_pass is not None:
        return config
    placement = placement_of(config)
    tokens = fitting_tokens_per_pass(config, placement, ModelShape.read(model), available_memory(placement))
    return with_defaults(config, {"learner.tokens_per_pass": tokens})


def memory_warnings(config: Config, placement: Placement, model: Path) -> list[str]:
    """Check a run of the model in directory `model` on this machine. Raises `BadInput` if it cannot fit."""
    shape = ModelShape.read(model)
    return [] if shape is None else check_memory(config, placement, shape, available_memory(placement))


def available_memory(placement: Placement) -> AvailableMemory:
    gpus = [gpu for each in (*placement.learners, *placement.engines) for gpu in each.gpus]
    swap = psutil.swap_memory().total
    return AvailableMemory(_gpu_totals(gpus) if gpus else {}, psutil.virtual_memory().total + swap)


def _gpu_totals(gpus: list[str]) -> dict[str, int]:
    """Query nvidia-smi, because torch is not loaded in this process. Empty if it is missing or its output is
    invalid."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpu_totals(output, gpus, os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def parse_gpu_totals(output: str, gpus: list[str], in_bus_order: bool) -> dict[str, int]:
    """Parse the total bytes of these GPUs from nvidia-smi's output. CUDA may number GPUs in another order than
    nvidia-smi; an index then gets the largest total."""
    rows = [tuple(map(str.strip, line.split(","))) for line in output.splitlines()]
    totals = {row[0]: int(row[1]) * MIB for row in rows if len(row) == 2 and row[1].isdecimal()}
    by_index = list(totals.values())
    found: dict[str, int] = {}
    for gpu in gpus:
        if gpu.isdecimal() and int(gpu) < len(by_index):
            found[gpu] = by_index[int(gpu)] if in_bus_order else max(by_index)
        elif matching := [total for uuid, total in totals.items() if uuid.startswith(gpu)]:
            found[gpu] = matching[0]
    return found
