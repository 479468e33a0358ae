"""Exports a trained policy as a Hugging Face model directory, or its LoRA adapters as a PEFT directory.

Weights come from the newest complete checkpoint, or from the best one by held-out reward. Config, tokenizer and chat
template come from the base model of the run. The directory is written under a temporary name and renamed when it is
complete.

torch is needed only to merge adapters into the base model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.checkpoint.commit import CHECKPOINTS, MANIFEST, best_complete, newest_complete, verify
from outpace.config.load import RESOLVED_FILE, read_resolved
from outpace.errors import BadInput, CorruptData
from outpace.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config_json, parse_adapter_config

WEIGHTS = "model.safetensors"

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "preprocessor_config.json",
    "LICENSE*",
)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def export(run_or_checkpoint_dir: str | Path, out_dir: str | Path, best: bool = False, adapter: bool = False) -> Path:
    """Write the policy of a run or checkpoint to `out_dir`.

    `best` selects the checkpoint with the best held-out reward instead of the newest. `adapter` writes only the trained
    adapters instead of the merged model."""
    given, out = Path(run_or_checkpoint_dir), Path(out_dir)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadInput(f"export: {out} exists and is not an empty directory")
    run, checkpoint = _find(given, best)
    adapters = next(iter(sorted(checkpoint.rglob(ADAPTER_WEIGHTS))), None)
    if adapter and adapters is None:
        raise BadInput(f"--adapter: {checkpoint} has no adapters; the run trained the full model")
    weights = adapters or _find_weights(checkpoint)
    model = _model_of(run)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise BadInput(f"export: cannot write to {out.parent}: {error.strerror}") from None
    try:
        if adapter:
            _copy_adapters(model["path"], weights, temporary)
        else:
            _copy(model, weights, temporary)
        temporary.chmod(0o755)
        os.replace(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out


def _find(given: Path, best: bool) -> tuple[Path, Path]:
    """Return the run directory and the checkpoint to export."""
    if not given.is_dir():
        raise BadInput(f"export: {given} is not a directory")
    if (given / MANIFEST).is_file():
        if best:
            raise BadInput(f"--best: needs a run directory, but {given} is a checkpoint")
        try:
            verify(given)
        except CorruptData as error:
            raise BadInput(f"export: {given} is not a complete checkpoint: {error}") from None
        return given.resolve().parent.parent, given
    if not (given / "config.toml").is_file():
        raise BadInput(f"export: {given} is neither a run directory nor a checkpoint")
    checkpoint = best_complete(given) if best else newest_complete(given / CHECKPOINTS)
    if checkpoint is None:
        raise BadInput(f"export: {given} has no complete checkpoint" + " that was evaluated" * best)
    return given, checkpoint


def _find_weights(checkpoint: Path) -> Path:
    found = sorted(checkpoint.rglob(WEIGHTS))
    if not found:
        raise BadInput(f"export: {checkpoint} has no {WEIGHTS}")
    return found[0]


def _model_of(run: Path) -> dict[str, Any]:
    """Return the `[model]` settings of the run."""
    model: dict[str, Any] = read_resolved(run).get("model", {})
    if not isinstance(model.get("path"), str):
        raise BadInput(f"export: {run / RESOLVED_FILE} does not set model.path")
    return model


def _copy(model: dict[str, Any], weights: Path, target: Path) -> None:
    from outpace.models.loading import resolve_model  # lazy: may build or unpack a model

    source = Path(resolve_model(model["path"]))
    for companion in _companions(source):
        shutil.copyfile(companion, target / companion.name)
    if weights.name == ADAPTER_WEIGHTS:
        _merge(model, weights, target / WEIGHTS)
    else:
        shutil.copyfile(weights, target / WEIGHTS)
    config_path = target / "config.json"
    if not config_path.is_file():
        raise BadInput(f"export: {source} has no config.json")
    config = json.loads(config_path.read_text())
    dtype = _dtype(target / WEIGHTS)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _merge(model: dict[str, Any], adapters: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from outpace.models.loading import load_model
    from outpace.models.lora import LoraAdapters
    from outpace.weights.shared_memory import distinct_tensors

    trusted = bool(model.get("trust_remote_code", False))
    loaded = load_model(model["path"], dtype="float32", device="cpu", trust_remote_code=trusted)
    adapted = LoraAdapters(loaded, parse_adapter_config(adapters.with_name(ADAPTER_CONFIG).read_bytes()))
    adapted.load(load_file(adapters))
    save_file(distinct_tensors(adapted.merged(torch.float32)), target, metadata={"format": "pt"})


def _copy_adapters(model: str, adapters: Path, target: Path) -> None:
    """Write the files that peft, transformers and vLLM load on top of the base model.

    The base model is referenced by its hub name, or by its path if it is not on the hub."""
    from outpace.models.loading import resolve_model

    on_hub = "/" in model and not Path(model).expanduser().exists()
    described = parse_adapter_config(adapters.with_name(ADAPTER_CONFIG).read_bytes())
    shutil.copyfile(adapters, target / ADAPTER_WEIGHTS)
    (target / ADAPTER_CONFIG).write_bytes(
        adapter_config_json(described, model if on_hub else str(resolve_model(model)))
    )


def _companions(source: Path) -> Iterator[Path]:
    for pattern in _COMPANIONS:
        yield from (path for path in sorted(source.glob(pattern)) if path.is_file())


def _dtype(weights: Path) -> str | None:
    """Return the dtype of most weights, or None if it is not in `_DTYPES`."""
    from safetensors import SafetensorError, safe_open

    sizes: Counter[str] = Counter()
    try:
        with safe_open(weights, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_slice(name)
                sizes[tensor.get_dtype()] += math.prod(tensor.get_shape())
    except SafetensorError as error:
        raise CorruptData(f"{weights} is not a safetensors file: {error}") from None
    return _DTYPES.get(max(sizes, key=sizes.__getitem__)) if sizes else None
