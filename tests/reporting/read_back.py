"""Reads what trackers have stored, with their own interfaces: `python read_back.py TRACKER RUN`, in their environment.

Prints JSON: `steps`, all values of reward/mean with their steps, in the order they were logged; `evals` and `tables`,
likewise; `config` (a setting of the run), `summary` (its number of steps) and `runs` (ids of the runs in the store)."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRIC = "reward/mean"
EVAL = "eval/reward"


def read_tensorboard(run: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "trackers" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    text = {tag: [(each.step, _text(each)) for each in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    return {
        "steps": [(each.step, each.value) for each in events.Scalars(METRIC)],
        "evals": [
            (each.step, each.value) for each in (events.Scalars(EVAL) if EVAL in events.Tags()["scalars"] else [])
        ],
        "tables": [(step, table.count("\n") - 1) for step, table in text["completions"]],
        "config": _fenced(text["config"][-1][1])["run"]["seed"],
        "summary": _fenced(text["summary"][-1][1])["steps"] if "summary" in text else None,
        "runs": ["only"],
    }


def _text(event: Any) -> str:
    return str(event.tensor_proto.string_val[0].decode())


def _fenced(text: str) -> Any:
    return json.loads(text.removeprefix("```json\n").removesuffix("\n```"))


def read_mlflow(run: Path) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "outpace"]
    runs = client.search_runs([experiment.experiment_id])
    run_id = runs[0].info.run_id
    tables = [
        (
            int(item.path[-11:-5]),
            len(json.loads(Path(client.download_artifacts(run_id, item.path)).read_text())["data"]),
        )
        for item in client.list_artifacts(run_id, "completions")
    ]
    summary = [item.path for item in client.list_artifacts(run_id) if item.path == "summary.json"]
    return {
        "steps": [(each.step, each.value) for each in client.get_metric_history(run_id, METRIC)],
        "evals": [(each.step, each.value) for each in client.get_metric_history(run_id, EVAL)],
        "tables": tables,
        "config": int(runs[0].data.params["run.seed"]),
        "summary": json.loads(Path(client.download_artifacts(run_id, summary[0])).read_text())["steps"]
        if summary
        else None,
        "runs": [each.info.run_id for each in runs],
    }


def read_trackio(run: Path) -> dict[str, Any]:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(Api().runs("outpace"))
    logs = SQLiteStorage.get_logs("outpace", runs[0].name)
    summary = [log["summary/steps"] for log in logs if "summary/steps" in log]
    return {
        "steps": [(log["step"], log[METRIC]) for log in logs if METRIC in log],
        "evals": [(log["step"], log[EVAL]) for log in logs if EVAL in log],
        "tables": [(log["step"], len(log["completions"]["_value"])) for log in logs if "completions" in log],
        "config": (runs[0].config or {})["run.seed"],
        "summary": summary[-1] if summary else None,
        "runs": [each.id for each in runs],
    }


def read_wandb(run: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"steps": [], "evals": [], "tables": [], "config": None, "summary": None, "runs": []}
    for file in sorted(Path(os.environ["WANDB_DIR"]).glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            _add_record(record, found)
    found["runs"] = sorted(set(found["runs"]))
    return found


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file, which is a LevelDB log: blocks of 32 KiB with records, each of which may be
    split. Ends at a record that a killed process cut short."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        data = content[position + 7 : position + 7 + length]
        if kind not in (1, 2, 3, 4) or len(data) < length:
            return
        position += 7 + length
        parts += data
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def _add_record(record: Any, found: dict[str, Any]) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        found["runs"].append(record.run.run_id)
        _add_config(record.run.config, found)
    elif kind == "config":
        _add_config(record.config, found)
    elif kind == "history":
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, key in (("steps", METRIC), ("evals", EVAL)):
            if key in values:
                found[name].append((values["step"], values[key]))
        if "completions/nrows" in values:
            found["tables"].append((values["step"], values["completions/nrows"]))
    elif kind == "summary":
        for item in record.summary.update:
            if (item.key or "/".join(item.nested_key)) == "summary/steps":
                found["summary"] = json.loads(item.value_json)


def _add_config(config: Any, found: dict[str, Any]) -> None:
    for item in config.update:
        if item.key == "run":
            found["config"] = json.loads(item.value_json)["seed"]


if __name__ == "__main__":
    print(json.dumps(globals()[f"read_{sys.argv[1]}"](Path(sys.argv[2]))))
