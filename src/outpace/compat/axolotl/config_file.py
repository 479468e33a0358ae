"""Translation of an Axolotl file with `rl: grpo` or `rl: gdpo` to outpace settings.

    content ─▶ fields of AsyncGRPOConfig ─▶ outpace.compat.trl.settings ─┐
            ─▶ data, adapter, rewards, intervals, trackers, servers ─────┴─▶ settings, or one error with every refusal

The settings name the data by `outpace.compat.axolotl.data` and need no Python objects, so everything that outpace does
with a config file works: overrides, `--dry-run`, `--resume`, `outpace eval` and `outpace serve`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outpace.compat.axolotl import keys
from outpace.compat.axolotl.config import AsyncGRPOConfig, producer_options, translate_async
from outpace.compat.axolotl.data import open_tasks
from outpace.compat.trl.config import AS_IN_TRL
from outpace.compat.trl.settings import Refuse, Settings, refuse
from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.monitoring.transformers_callbacks import Schedule
from outpace.runtime.references import closest_names

ALL_FIELDS = {field.name: field.default for field in dataclasses.fields(AsyncGRPOConfig)}  # type: ignore[arg-type]
DEFAULTS: Mapping[str, Any] = {
    "output_dir": "./model-out", "per_device_train_batch_size": 1, "num_train_epochs": 1.0, "save_total_limit": 4,
    "lr_scheduler_type": "cosine", "gradient_checkpointing": False, "reroll_start_fraction": 1.0,
    "ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64,
}  # fmt: skip
"""Fields whose default in a file differs from the one in `AsyncGRPOConfig`."""

SECTIONS = ("trl", "vllm", "special_tokens")
NOT_SET: tuple[Any, ...] = (None, "", [], {})
OFF = (*NOT_SET, False, "false")
LOCAL = ("0.0.0.0", "localhost", "127.0.0.1")
NO_EFFECT_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")
DATASET_KEYS = {"path", "name", "split", "type", "data_files", "ds_type"}
LISTS: Mapping[str, Any] = {"datasets": Mapping, "test_datasets": Mapping, "plugins": str, "trl.reward_funcs": str}
"""Keys whose values must be lists, with the type of their elements."""
EXPONENT = re.compile(r"[-+]?[\d.]+e[-+]?\d+", re.IGNORECASE)  # YAML reads numbers such as 1e-5 as text


def settings_of(content: Mapping[str, Any], file: Path) -> Settings:
    """Return the settings of a file. Reads its datasets, because the length of a run depends on them."""
    given = dict(_flat(content))
    if given.get("rl") not in ("grpo", "gdpo"):
        raise BadInput(f"rl: {given.get('rl')} is not supported; outpace trains with grpo and gdpo")
    lists = {key: value if isinstance(value := given.get(key, []), list) else [None] for key in LISTS}
    wrong = [key for key, kind in LISTS.items() if not all(isinstance(each, kind) for each in lists[key])]
    refuse({key: f"must be a list, each element {'a name' if LISTS[key] is str else 'a mapping'}" for key in wrong})
    places = {field: key for key in given if (field := _field(key)) is not None}
    for field, key in places.items():
        if type(ALL_FIELDS[field]) in (int, float) and not isinstance(given[key], int | float):
            raise BadInput(f"{key}: should be a number, not {given[key]!r}")
    args = AsyncGRPOConfig(**_fields(given, {field: given[key] for field, key in places.items()}))
    data = _data(content, given, file)
    train, heldout = open_tasks(make_config(data | {"rewards.functions": ["number"]}))
    refused: dict[str, str] = {}
    settings, schedule = translate_async(args, len(train), refused)
    refused = {places.get(name, name): reason for name, reason in refused.items()} | dict(_refused(given))
    settings |= data | {"run.overwrite": False, "rewards.functions": _rewards(given, file, refused.setdefault)}
    settings |= _adapter(given, refused.setdefault) | _reporting(given)
    settings |= _intervals(given, schedule, 0 if heldout is None else len(heldout), refused.setdefault)
    refuse(refused)
    if args.use_data_producer:
        settings |= {"tasks.producer": "outpace:GRPODataProducer", "producer.options": producer_options(args)}
    if args.use_vllm and "engine.urls" not in settings and "vllm.data_parallel_size" in given:
        settings["engine.count"] = given["vllm.data_parallel_size"]
    settings.get("launch.args", []).extend(["--enforce-eager"] * bool(given.get("vllm.enforce_eager")))
    return settings


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _flat({f"{key}.{name}": each for name, each in value.items()})
        elif value not in NOT_SET:
            yield key, _number(value)


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _field(key: str) -> str | None:
    """Return the field that a key sets, or None if it has another meaning."""
    section, _, name = key.rpartition(".")
    is_field = name in ALL_FIELDS and (section == "trl" or (not section and name not in AS_IN_TRL))
    return keys.RENAMED.get(key, name if is_field and key not in keys.TRANSLATED else None)


def _fields(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    host = given.get("trl.vllm_server_host", given.get("vllm.host", LOCAL[0]))
    fields = {
        **DEFAULTS,
        "beta": given.get("rl_beta", 0.0),
        "multi_objective_aggregation": "normalize_then_sum" if given["rl"] == "gdpo" else "sum_then_normalize",
        "vllm_server_port": given.get("vllm.port", 8000),
        "vllm_mode": "server",
        **found,
        "vllm_server_host": host,
        "bf16": bool(given.get("bf16", given.get("bfloat16", "float32" not in given))),
        "shuffle_dataset": not given.get("curriculum_sampling", False),
    }
    fields["gradient_checkpointing"] = bool(fields["gradient_checkpointing"])
    if host in LOCAL and not {"vllm_mode", "vllm_server_base_url"} & set(found):
        fields["vllm_mode"] = "colocate"  # outpace starts the server
    if "vllm_importance_sampling_clip_max" in fields:
        fields.setdefault("vllm_importance_sampling_cap", None)
    return fields


def _refused(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    refused, harmless = keys.by_key(keys.REFUSED), keys.by_key(keys.WITHOUT_EFFECT)
    known = {*keys.TRANSLATED, *keys.RENAMED, *harmless, *refused, *ALL_FIELDS, *(f"trl.{name}" for name in ALL_FIELDS)}
    for key, value in given.items():
        reason = refused.get(key if key in known else key.partition(".")[0])
        is_off = value in OFF or (key in keys.OFF_AT_1 and value == 1)
        if reason is not None and not is_off:
            yield key, reason
        elif reason is None and key not in known:
            close = closest_names(key, known)
            yield key, "Axolotl has no such key" + (f"; did you mean {close[0]}?" if close else "")
    if given.get("chat_template", "tokenizer_default") != "tokenizer_default":
        yield "chat_template", refused["chat_template_jinja"]
    if given.get("wandb_mode", "online") not in ("online", "disabled"):
        yield "wandb_mode", refused["wandb_entity"]
    for plugin in given.get("plugins", []):
        if not plugin.endswith(NO_EFFECT_PLUGINS):
            yield "plugins", f"{plugin} is not supported; leave it out"


# ------------------------------------------------------------------------------------------------- data and rewards


def _data(content: Mapping[str, Any], given: Mapping[str, Any], file: Path) -> dict[str, Any]:
    for key in ("base_model", "datasets"):
        if key not in given:
            raise BadInput(f"{key}: must be set")
    found = {key: [_dataset(key, each, file) for each in given.get(key, [])] for key in ("datasets", "test_datasets")}
    return {
        "model.path": given["base_model"],
        "tasks.name": f"{open_tasks.__module__}:{open_tasks.__name__}",
        "tasks.options": _without_none({**content, **found}),
    }


def _dataset(key: str, given: Mapping[str, Any], file: Path) -> dict[str, Any]:
    if unknown := [name for name, value in given.items() if name not in DATASET_KEYS and value not in OFF]:
        raise BadInput(f"{key}: {', '.join(unknown)} is not supported; leave it out")
    path = given.get("data_files") or given.get("path")
    if not path:
        raise BadInput(f"{key}: path must be set, in each dataset")
    if isinstance(path, list) and len(path) > 1:
        raise BadInput(f"{key}: data_files has several files; list one dataset for each")
    path = path[0] if isinstance(path, list) else path
    local = next((folder / path for folder in _folders(file) if (folder / path).exists()), None)
    place = path if local is None else str(local)
    return {
        "path": f"{place}:{given['name']}" if local is None and given.get("name") else place,
        "split": given.get("split") or "train",
        "type": given.get("type") and _reference(given["type"], file),
    }


def _without_none(value: Any) -> Any:
    """Return the value without None, which the config of a run cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value if each is not None] if isinstance(value, list) else value


def _folders(file: Path) -> tuple[Path, Path]:
    """Return the folders to search for files and modules: the working directory, then the folder of the file."""
    return Path.cwd(), file.absolute().parent


def _reference(name: str, file: Path) -> str:
    module, _, function = name.rpartition(".")
    source = next((path for folder in _folders(file) if (path := folder / f"{module}.py").is_file()), None)
    return f"{source or module}:{function}"


def _rewards(given: Mapping[str, Any], file: Path, refuse: Refuse) -> list[str]:
    names = given.get("trl.reward_funcs", [])
    for name in names:
        if "/" in name or "." not in name:
            refuse("trl.reward_funcs", f"{name} is not module.function; serve a reward model and use judge")
    return [_reference(name, file) for name in names]


# ----------------------------------------------------------------------------------------- adapter, intervals, trackers


def _adapter(given: Mapping[str, Any], refuse: Refuse) -> Settings:
    if "adapter" not in given:
        return {}
    if given["adapter"] != "lora":
        refuse("adapter", f"{given['adapter']} is not supported; use lora")
    targets = None if given.get("lora_target_linear") else given.get("lora_target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    found = {"lora.rank": given.get("lora_r", 8), "lora.alpha": given.get("lora_alpha"), "lora.targets": targets}
    return {key: value for key, value in found.items() if value is not None}


def _intervals(given: Mapping[str, Any], schedule: Schedule, heldout: int, refuse: Refuse) -> Settings:
    """Return the evaluation and checkpoint intervals, and the warm-up steps of the learning rate."""
    evaluates = heldout > 0 and given.get("eval_strategy") != "no"
    found = {"eval.count": heldout if evaluates else 0, "eval.start": evaluates, "eval.end": evaluates}
    for word, setting, default in (("eval", "eval.every", "no"), ("save", "checkpoint.every", "epoch")):
        steps, times = given.get(f"{word}_steps"), given.get(f"{word}s_per_epoch")
        strategy = "steps" if steps or times else given.get(f"{word}_strategy", default)
        if strategy not in ("steps", "epoch", "no"):
            refuse(f"{word}_strategy", f"{strategy} is not supported; use steps, epoch or no")
        steps = steps or schedule.epoch_steps / (times or 1)
        every = steps if steps >= 1 else steps * schedule.max_steps
        found[setting] = 0 if strategy == "no" else max(1, math.ceil(every / schedule.updates))
    if given.get("lr_scheduler") != "constant":
        ratio = given.get("warmup_ratio", min(0.03, 100 / schedule.max_steps))
        warmup = int(given.get("warmup_steps", ratio * schedule.max_steps))
        found["learner.lr_warmup_steps"] = math.ceil(warmup / schedule.updates)
    return found


def _reporting(given: Mapping[str, Any]) -> Settings:
    used = [name for name in ("wandb", "mlflow", "trackio", "tensorboard") if given.get(f"use_{name}")]
    if "wandb_project" in given and given.get("use_wandb", True) and "wandb" not in used:
        used.append("wandb")
    if not used or given.get("wandb_mode") == "disabled":
        return {}
    found = {setting: [given[name] for name in names if name in given] for setting, names in keys.REPORT.items()}
    return {"run.report_to": used, **{setting: named[0] for setting, named in found.items() if named}}
