"""Translation of an Axolotl file with `rl: grpo` or `rl: gdpo` to outpace settings.

    content ─▶ fields of AsyncGRPOConfig ─▶ outpace.compat.trl.settings ─┐
            ─▶ data, adapter, rewards, intervals, trackers, servers ─────┴─▶ settings, or one error with every refusal

The settings name the data by `outpace.compat.axolotl.data` and need no Python objects, so everything that outpace does
with a config file works: overrides, `--dry-run`, `--resume`, `outpace eval` and `outpace serve`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outpace.compat.axolotl import keys
from outpace.compat.axolotl.config import FIELDS, AsyncGRPOConfig, find_async, producer_options
from outpace.compat.axolotl.data import open_tasks
from outpace.compat.trl.settings import Found, Refusal, as_settings, find, make_schedule
from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.monitoring.transformers_callbacks import Schedule
from outpace.runtime.references import closest_names

SECTIONS = ("trl", "vllm", "special_tokens")
NOT_SET = (None, "", [], {})
OFF = (*NOT_SET, False, "false", "no")
SINGLE = (
    "context_parallel_size",
    "sequence_parallel_degree",
    "tensor_parallel_size",
    "dp_shard_size",
    "dp_replicate_size",
)
"""Refused keys for which 1 is off too."""

DEFAULTS: Mapping[str, Any] = {
    "output_dir": "./model-out", "per_device_train_batch_size": 1, "num_train_epochs": 1.0, "save_total_limit": 4,
    "lr_scheduler_type": "cosine", "gradient_checkpointing": False, "reroll_start_fraction": 1.0,
    "ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64,
}  # fmt: skip
"""Fields whose default in a file differs from that of `AsyncGRPOConfig`."""

LOCAL = ("0.0.0.0", "localhost", "127.0.0.1")
NO_EFFECT_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")
DATASET_KEYS = {"path", "name", "split", "type", "data_files", "ds_type"}
EXPONENT = re.compile(r"[-+]?[\d.]+e[-+]?\d+", re.IGNORECASE)
"""YAML reads numbers such as 1e-5 as text."""


def settings_of(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings of a file. Reads its datasets, for the length of an epoch."""
    given = dict(_flat(content))
    if given.get("rl") not in ("grpo", "gdpo"):
        raise BadInput(f"rl: {given.get('rl')} is not supported; outpace trains with grpo and gdpo")
    options = _without_empty({**content, **{key: _datasets(key, given, file) for key in ("datasets", "test_datasets")}})
    places = {field: key for key in given if (field := _field(key)) is not None}
    args = AsyncGRPOConfig(**_fields(given, {field: given[key] for field, key in places.items()}))
    data = {"tasks.name": f"{open_tasks.__module__}:open_tasks", "tasks.options": options}
    named = make_config({**data, "model.path": given.get("base_model", ""), "rewards.functions": ["number"]})
    train, heldout = open_tasks(named)
    schedule = make_schedule(args, len(train))
    args.warmup_steps = _warmup(given, schedule)
    found = [
        *find(args, schedule, frozenset(FIELDS)),
        *find_async(args, schedule),
        *data.items(),
        *_refused(given),
        *_rewards(given, file),
        *_adapter(given),
        *_reporting(given),
        *_intervals(given, schedule, 0 if heldout is None else len(heldout)),
        *_engines(given, args),
    ]
    if args.use_data_producer:
        found += {"tasks.producer": "outpace:GRPODataProducer", "producer.options": producer_options(args)}.items()
    found += {"model.path": given.get("base_model"), "run.overwrite": False}.items()
    by_key = [
        Refusal(places.get(each.name, each.name), each.reason) if isinstance(each, Refusal) else each for each in found
    ]
    settings = as_settings(by_key)
    if given.get("vllm.enforce_eager") and "launch.args" in settings:
        settings["launch.args"] = [*settings["launch.args"], "--enforce-eager"]
    return settings


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _flat({f"{key}.{name}": each for name, each in value.items()})
        elif value not in NOT_SET:
            yield key, float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _without_empty(value: Any) -> Any:
    """Return the content without what TOML cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _without_empty(each) for key, each in value.items() if each is not None}
    return [_without_empty(each) for each in value if each is not None] if isinstance(value, list) else value


def _field(key: str) -> str | None:
    section, _, name = key.rpartition(".")
    if key in keys.RENAMED:
        return keys.RENAMED[key]
    return name if (section == "trl" and name in keys.TRL) or key in keys.TRAINING else None


def _fields(given: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    fields = {**DEFAULTS, **fields}
    fields["bf16"] = bool(given.get("bf16", given.get("bfloat16", "float32" not in given)))
    fields["gradient_checkpointing"] = bool(fields["gradient_checkpointing"])
    fields["shuffle_dataset"] = not given.get("curriculum_sampling", False)
    fields.setdefault("beta", given.get("rl_beta", 0.0))
    if given["rl"] == "gdpo":
        fields.setdefault("multi_objective_aggregation", "normalize_then_sum")
    if "vllm_importance_sampling_clip_max" in fields:
        fields.setdefault("vllm_importance_sampling_cap", None)
    host = given.get("trl.vllm_server_host", given.get("vllm.host", LOCAL[0]))
    fields |= {
        "vllm_server_host": host,
        "vllm_server_port": given.get("trl.vllm_server_port", given.get("vllm.port", 8000)),
    }
    if host in LOCAL:  # outpace starts the server
        fields["vllm_mode"] = "colocate"
    else:
        fields.setdefault("vllm_mode", "server")
    return fields


def _refused(given: Mapping[str, Any]) -> Iterator[Refusal]:
    refused, harmless = keys.by_key(keys.REFUSED), keys.by_key(keys.WITHOUT_EFFECT)
    known = {*keys.TRAINING, *keys.RENAMED, *keys.SETTINGS, *(f"trl.{key}" for key in keys.TRL), *harmless, *refused}
    for key, value in given.items():
        reason = refused.get(key, refused.get(key.partition(".")[0]) if key not in known else None)
        if reason is not None and value not in OFF and not (key in SINGLE and value == 1):
            yield Refusal(key, reason)
        elif reason is None and key not in known:
            close = closest_names(key, known)
            yield Refusal(key, f"Axolotl has no such key; did you mean {close[0]}?" if close else "no such key")
    if given.get("chat_template", "tokenizer_default") != "tokenizer_default":
        yield Refusal("chat_template", refused["chat_template_jinja"])
    for plugin in given.get("plugins", []):
        if not plugin.endswith(NO_EFFECT_PLUGINS):
            yield Refusal("plugins", f"{plugin} is not supported; leave it out")
    if "base_model" not in given:
        yield Refusal("base_model", "must be set")


def _datasets(key: str, given: Mapping[str, Any], file: Path) -> list[dict[str, Any]] | None:
    found = given.get(key)
    if found is None and key == "datasets":
        raise BadInput("datasets: must be set")
    return None if found is None else [_dataset(key, each, file) for each in found]


def _dataset(key: str, given: Mapping[str, Any], file: Path) -> dict[str, Any]:
    if unknown := [name for name, value in given.items() if name not in DATASET_KEYS and value not in OFF]:
        raise BadInput(f"{key}: {', '.join(unknown)} is not supported; leave it out")
    path = given["path"] if "data_files" not in given else given["data_files"]
    if isinstance(path, list):
        if len(path) > 1:
            raise BadInput(f"{key}.data_files: list one dataset for each file")
        path = path[0]
    local = next((folder / path for folder in _folders(file) if (folder / path).exists()), None)
    place = str(local) if local is not None else f"{path}:{given['name']}" if given.get("name") else path
    kind = given.get("type")
    return {
        "path": place,
        "split": given.get("split", "train"),
        "type": None if kind is None else _reference(kind, file),
    }


def _folders(file: Path) -> tuple[Path, Path]:
    """Return where files and modules are searched: the working directory, then the folder of the file."""
    return Path.cwd(), file.absolute().parent


def _reference(name: str, file: Path) -> str:
    module, _, function = name.rpartition(".")
    source = next((path for folder in _folders(file) if (path := folder / f"{module}.py").is_file()), None)
    return f"{source or module}:{function}"


def _rewards(given: Mapping[str, Any], file: Path) -> Iterator[Found]:
    names = given.get("trl.reward_funcs", [])
    for name in names:
        if "/" in name or "." not in name:
            yield Refusal("trl.reward_funcs", f"{name} is not module.function; serve reward models and use judge")
    yield "rewards.functions", [_reference(name, file) for name in names]


def _adapter(given: Mapping[str, Any]) -> Iterator[Found]:
    if "adapter" not in given:
        return
    if given["adapter"] != "lora":
        yield Refusal("adapter", f"{given['adapter']} is not supported; use lora")
    yield "lora.rank", given.get("lora_r", 8)
    if "lora_alpha" in given:
        yield "lora.alpha", float(given["lora_alpha"])
    if "lora_target_modules" in given and not given.get("lora_target_linear"):
        yield "lora.targets", list(given["lora_target_modules"])


def _warmup(given: Mapping[str, Any], schedule: Schedule) -> float:
    if "warmup_steps" in given:
        return float(given["warmup_steps"])
    return (
        int(schedule.max_steps * given["warmup_ratio"])
        if "warmup_ratio" in given
        else min(schedule.max_steps * 3 // 100, 100)
    )


def _intervals(given: Mapping[str, Any], schedule: Schedule, heldout: int) -> Iterator[Found]:
    """Yield when the run evaluates and saves."""
    evaluates = heldout > 0 and given.get("eval_strategy") != "no"
    yield from {"eval.count": heldout if evaluates else 0, "eval.start": evaluates, "eval.end": evaluates}.items()
    for word, setting, default in (("eval", "eval.every", "no"), ("save", "checkpoint.every", "epoch")):
        steps, times = given.get(f"{word}_steps"), given.get(f"{word}s_per_epoch")
        strategy = "steps" if steps or times else given.get(f"{word}_strategy", default)
        if strategy not in ("steps", "epoch", "no"):
            yield Refusal(f"{word}_strategy", f"{strategy} is not supported; use steps, epoch or no")
        steps = steps or schedule.epoch_steps / (times or 1)
        every = steps if steps >= 1 else steps * schedule.max_steps
        yield setting, 0 if strategy == "no" else max(1, math.ceil(every / schedule.updates))


def _reporting(given: Mapping[str, Any]) -> Iterator[Found]:
    used = {name for name in ("wandb", "mlflow", "trackio", "tensorboard") if given.get(f"use_{name}")}
    if "wandb_project" in given and given.get("use_wandb", True) and given.get("wandb_mode") != "disabled":
        used.add("wandb")
    if used:
        yield "run.report_to", sorted(used)
    for key, setting in (("project", "report.project"), ("name", "report.name")):
        named = [f"wandb_{key}", f"trackio_{'project_name' if key == 'project' else 'run_name'}"]
        named.append("mlflow_experiment_name" if key == "project" else "mlflow_run_name")
        if used and (found := next((given[name] for name in named if name in given), None)):
            yield setting, found


def _engines(given: Mapping[str, Any], args: AsyncGRPOConfig) -> Iterator[Found]:
    if args.use_vllm and given.get("vllm.data_parallel_size"):
        yield "engine.count", given["vllm.data_parallel_size"]
