"""How much memory learner and embedded engines take, estimated before anything is started.

Two figures each. `least` is taken whatever the run does: weights, gradients, optimizer states, the first part of the
key-value cache. `most` is reached when every sequence is as long as the context and every pass of the learner is full,
which many runs never see. So a run is refused only where `least` does not fit, and warned where `most` does not.

Estimates are for decoders of the Llama kind; a model whose config.json does not say what is needed is not estimated.
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
from outpace.errors import BadInput
from outpace.placement import GpuAssignment, Placement

GB = 10**9
MIB = 1 << 20
BYTES = {"float32": 4, "bfloat16": 2}
FIRST_CAPACITY = 128
"""Tokens that a key-value cache holds at first."""
PREFILL_TOKENS = 4096
LOGITS_PER_SLICE = 1 << 24
NVIDIA_SMI_S = 20.0


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int  # of all experts that one token passes through
    vocabulary: int
    context: int

    @classmethod
    def read(cls, directory: Path) -> ModelShape | None:
        """None where the files do not say enough."""
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text())
            config = config.get("text_config") or config
            heads = int(config["num_attention_heads"])
            experts = int(config.get("num_experts_per_tok") or 1)
            return cls(
                parameters=sum(_parameters(file) for file in _weight_files(directory)),
                layers=int(config["num_hidden_layers"]),
                width=int(config["hidden_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
                feed_forward=experts * int(config.get("moe_intermediate_size") or config["intermediate_size"]),
                vocabulary=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
            )
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def kv_bytes(self, dtype: str) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES[dtype]


def _weight_files(directory: Path) -> set[Path]:
    """The files that are loaded. Some models come with the same weights in another format beside them."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return {directory / name for name in json.loads(index.read_text())["weight_map"].values()}
    whole = directory / "model.safetensors"
    return {whole} if whole.exists() else set(directory.glob("*.safetensors"))


def _parameters(file: Path) -> int:
    """Of a safetensors file, by its header alone."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(opened.read(size))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


@dataclass(frozen=True)
class Estimate:
    """Bytes: `fixed` in any case, `filled` on top with full contexts and passes. `setting` is now `units`, each
    taking `fixed_per_unit` in any case and `per_unit` with full contexts and passes."""

    fixed: int
    filled: int
    setting: str
    units: int
    per_unit: int
    fixed_per_unit: int = 0
    lowest: int = 1
    """Below this, a smaller `setting` alone takes no less memory."""

    @property
    def most(self) -> int:
        return self.fixed + self.filled

    def fitting(self, available: float) -> int:
        """A value of `setting` with which `most` would fit; below 1: none would."""
        return math.floor(self.units - max(0.0, self.most - available) / max(self.per_unit, 1))


# ----------------------------------------------------------------------------------------------------------- estimates


def engine_memory(config: Config, shape: ModelShape) -> Estimate:
    """Of one embedded engine."""
    slots, size = config.engine.resolved_slots, BYTES[config.model.dtype]
    context = min(config.engine.context or shape.context, shape.context)
    kv = shape.kv_bytes(config.model.dtype)
    weights = shape.parameters * size
    first = context if config.run.deterministic else min(context, FIRST_CAPACITY)
    evaluated = config.eval.count > 0
    pinned = (slots if config.run.deterministic else min(slots, config.eval.max_running)) if evaluated else 0
    # Of one row of a step: logits as computed and in float32, logprobs, probabilities, cumulative sums in float64;
    # attention scores in float32 and in the model's dtype.
    row = shape.vocabulary * (size + 20) + shape.heads * context * (4 + 2 * size)
    prefill = max(PREFILL_TOKENS, context) * size * (8 * shape.width + 4 * shape.feed_forward)
    per_slot = context * kv + row
    fixed = 2 * weights + slots * first * kv  # one set in use, one that is being loaded
    full = slots * per_slot + pinned * context * kv + (weights if evaluated else 0) + prefill
    return Estimate(fixed, full - slots * first * kv, "engine.slots", slots, per_slot, first * kv)


def learner_memory(config: Config, shape: ModelShape) -> Estimate:
    parameters = shape.parameters
    if config.lora.rank:
        fixed = 4 * parameters + 16 * _adapter_parameters(config, shape)
    else:
        fixed = 16 * parameters  # float32: weights, gradients, two moments
        fixed += 4 * parameters if config.kl.coefficient > 0 else 0
    halves = config.model.dtype == "bfloat16"
    context = min(config.engine.context or shape.context, shape.context)
    batch = config.pacing.groups_per_step * config.rollout.group_size * context
    tokens = min(max(config.learner.tokens_per_pass, context), batch)
    layer = _layer_activations(shape, halves)
    if config.learner.gradient_checkpointing:
        per_token = shape.layers * 4 * shape.width + layer
    else:
        per_token = shape.layers * layer
    per_token += 16 * shape.width
    slices = 4 * LOGITS_PER_SLICE * 4 + 4 * shape.vocabulary * shape.width
    casts = 2 * parameters if halves else 0
    filled = tokens * per_token + slices + casts
    if config.learner.tokens_per_pass <= context:  # a pass holds at least one sequence
        return Estimate(fixed, filled, "engine.context", tokens, per_token)
    return Estimate(fixed, filled, "learner.tokens_per_pass", tokens, per_token, lowest=context)


def _layer_activations(shape: ModelShape, halves: bool) -> int:
    """Bytes per token that one layer keeps for its backward pass. Norms keep their float32 input and result; with
    bfloat16 products every linear layer keeps its own bfloat16 copy of its input."""
    width, queries = shape.width, shape.heads * shape.head_size
    keys, wide = shape.kv_heads * shape.head_size, shape.feed_forward
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
class Available:
    """Bytes in all, by GPU as CUDA_VISIBLE_DEVICES names it, and of the host. A GPU that is not here is not known."""

    gpus: Mapping[str, int]
    host: int


def check_memory(config: Config, placement: Placement, shape: ModelShape, available: Available) -> list[str]:
    """Warnings for what may not fit. Raises `BadInput` for what cannot."""
    learner = learner_memory(config, shape)
    engines = [engine_memory(config, shape)] * len(placement.engines) if config.engine.kind == "embedded" else []
    warnings: list[str] = []
    for device in dict.fromkeys(_device(each) for each in (placement.learner, *placement.engines)):
        room: float | None = available.gpus.get(device) if device else available.host
        if room is None:
            continue
        parts = [each for each, place in zip(engines, placement.engines, strict=False) if _device(place) == device]
        if _device(placement.learner) == device:
            room *= placement.learner.memory
            parts.append(learner)
        where = f"GPU {device}" if device else "this machine"
        warnings += _checked(parts, room, where, adapters=config.lora.rank > 0)
    return warnings


def _device(assignment: GpuAssignment) -> str:
    """Empty: the host."""
    return assignment.gpus[0] if assignment.gpus else ""


def _checked(parts: list[Estimate], room: float, where: str, adapters: bool) -> Iterator[str]:
    if not parts:
        return
    least, most = sum(part.fixed for part in parts), sum(part.most for part in parts)
    if least > room:
        largest = max(parts, key=lambda part: part.fixed)
        raise BadInput(_refusal(largest, least, room, where, adapters))
    if most > room:
        largest = max(parts, key=lambda part: part.filled)
        value = largest.fitting(room - (most - largest.most))
        both = dict.fromkeys((largest.setting, "engine.context"))
        advice = f"set {largest.setting} = {value}" if value >= largest.lowest else f"lower {' and '.join(both)}"
        yield (
            f"memory of {where}: {most / GB:.1f} GB if every context and pass is full, and there are "
            f"{room / GB:.1f} GB; if it runs out, {advice}"
        )


def _refusal(largest: Estimate, least: int, room: float, where: str, adapters: bool) -> str:
    sizes = f"at least {least / GB:.1f} GB of {where} would be taken, which has {room / GB:.1f} GB for it"
    too_much = (least - room) / largest.fixed_per_unit if largest.fixed_per_unit else math.inf
    if largest.units - too_much >= 1:
        return f"{largest.setting}: {sizes}; set {math.floor(largest.units - too_much)} or less"
    remedy = "take" if adapters else "set lora.rank = 16 to train adapters only, or take"
    return f"model.path: {sizes}; {remedy} a smaller model"


# -------------------------------------------------------------------------------------------------------- this machine


def memory_warnings(config: Config, placement: Placement, model: Path) -> list[str]:
    """For a run of the model in this directory, on this machine. Raises `BadInput` for what cannot fit."""
    shape = ModelShape.read(model)
    return [] if shape is None else check_memory(config, placement, shape, available_memory(placement))


def available_memory(placement: Placement) -> Available:
    gpus = [gpu for each in (placement.learner, *placement.engines) for gpu in each.gpus]
    swap = psutil.swap_memory().total
    return Available(_gpu_totals(gpus) if gpus else {}, psutil.virtual_memory().total + swap)


def _gpu_totals(gpus: list[str]) -> dict[str, int]:
    """By nvidia-smi: torch is not loaded in this process. Nothing where it is missing or says something else."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return named_totals(said, gpus, os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def named_totals(said: str, gpus: list[str], in_bus_order: bool) -> dict[str, int]:
    """Bytes of these GPUs. CUDA may number GPUs in another order than nvidia-smi: then an index has the largest."""
    rows = [tuple(map(str.strip, line.split(","))) for line in said.splitlines()]
    totals = {row[0]: int(row[1]) * MIB for row in rows if len(row) == 2 and row[1].isdecimal()}
    by_index = list(totals.values())
    found: dict[str, int] = {}
    for gpu in gpus:
        if gpu.isdecimal() and int(gpu) < len(by_index):
            found[gpu] = by_index[int(gpu)] if in_bus_order else max(by_index)
        elif matching := [total for uuid, total in totals.items() if uuid.startswith(gpu)]:
            found[gpu] = matching[0]
    return found
