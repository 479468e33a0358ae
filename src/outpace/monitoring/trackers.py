"""Experiment trackers: the protocol, and adapters for trackio, tensorboard, mlflow and wandb.

A tracker is a class of the registry (`outpace.runtime.registry`). It is created without arguments in the reporter
process (`outpace.monitoring.reporter`). All calls come from one thread. A call may block or raise without affecting
training. After an error the tracker is created anew and started with its run id, and receives again what it had not
confirmed with `flush`. So a step may arrive twice. A resumed run also repeats the steps after its checkpoint.

Every package is imported when its adapter is created. A tracker's own environment variables (`WANDB_MODE`,
`MLFLOW_TRACKING_URI`, `TRACKIO_DIR`, …) control where it stores its data.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TABLE = "completions"
ID = "outpace.run_id"
"""Key of `TrackedRun.new_id` in a tracker that does not use it as its run id."""

Row = Mapping[str, Any]
"""A row of a table: prompt, completion, rewards, advantage, versions. All rows of one table have the same keys."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of the run for a tracker."""

    project: str
    name: str
    directory: Path
    config: dict[str, Any]  # every setting, by section
    new_id: str  # an id for the run, the same at every start
    run_id: str | None  # returned by an earlier `start`; None: no start has succeeded, though one may have failed
    step: int  # last step that the tracker surely has; later ones are sent again


class Tracker(Protocol):
    def start(self, run: TrackedRun) -> str:
        """Begin the run, or continue the one with `run.run_id`. Returns its id."""

    def metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Take the metrics of a step, or of an evaluation of version `step`. `at`: seconds since the epoch."""

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Take the recorded completions of a step."""

    def flush(self) -> None:
        """Return once everything so far is stored; it is not sent again."""

    def finish(self, summary: Mapping[str, Any] | None, active: bool) -> None:
        """End the run with the content of `summary.json`. None: the run is still `active`, or was killed.

        A tracker may also have a method `close`, which is called instead after an error."""


class Trackio:
    """trackio stores runs in a local database or a Space, and continues a run by its name."""

    FLUSH_S = 60.0
    LOST = ("write-", "local-")
    """trackio only warns if it cannot store data. Warnings with these keys mean that data is lost."""

    def __init__(self) -> None:
        import trackio

        self._trackio = trackio
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        name, exists = (run.run_id, True) if run.run_id else self._new_name(run)
        # If trackio cannot read its database, "allow" would begin another run of the same name.
        resume = "never" if not exists else "must" if run.step > 0 else "allow"
        self._run = self._trackio.init(
            project=run.project, name=name, config={ID: run.new_id, **flat_config(run.config)}, auto_log_cpu=False,
            auto_log_gpu=False, resume=resume, embed=False,
        )  # fmt: skip
        return name

    def _new_name(self, run: TrackedRun) -> tuple[str, bool]:
        """Return the run's name, with a suffix if another run of the project has it, and whether a failed start has
        already created it."""
        try:
            known = {each.name: (each.config or {}).get(ID) for each in self._trackio.Api().runs(run.project)}
        except ValueError:  # no such project yet
            known = {}
        name = run.name if known.get(run.name, run.new_id) == run.new_id else f"{run.name}-{run.new_id[:6]}"
        return name, name in known

    def metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        columns = list(rows[0])
        data = [[row[name] for name in columns] for row in rows]
        self._run.log({TABLE: self._trackio.Table(columns=columns, data=data)}, step=step)

    def flush(self) -> None:
        """Wait until trackio's thread has written everything; raise if it could not. Uses private attributes:
        trackio has no public API for this."""
        deadline = time.monotonic() + self.FLUSH_S
        while self._run._queued_logs or self._run._sending_batch:
            if time.monotonic() > deadline:
                raise TimeoutError("it has not stored everything")
            time.sleep(0.05)
        if lost := [key for key in self._run._warned_failures if key.startswith(self.LOST)]:
            raise OSError(f"it could not store everything ({', '.join(lost)}); see logs/reporter.log")

    def finish(self, summary: Mapping[str, Any] | None, active: bool) -> None:
        if summary is not None:
            numbers = {f"summary/{name}": value for name, value in summary.items() if isinstance(value, int | float)}
            self._run.log(numbers, step=int(summary.get("steps", 0)))
            self.flush()
        self._run.finish()

    def close(self) -> None:
        """Stop trackio's thread, which might still store data that will be sent again."""
        if self._run is not None:
            self._run._queued_logs.clear()
            self._run._stop_flag.set()


class Tensorboard:
    """Event files in `trackers/tensorboard` of the run directory. Repeated steps replace the earlier ones."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        # Not its EventFileWriter, whose `flush` never returns once its thread could not write.
        self._record_writer = RecordWriter
        self._writer: Any = None

    def start(self, run: TrackedRun) -> str:
        folder = run.directory / "trackers" / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = self._record_writer(open(folder / name, "wb"))  # noqa: SIM115 - open until `finish`
        self._add(0, file_version="brain.Event:2")
        if run.run_id is not None:
            began = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(run.step + 1, session_log=began)
        self._text("config", 0, "```json\n" + json.dumps(run.config, indent=2) + "\n```")
        self._writer.flush()
        return str(folder)

    def metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        scalars = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, at, summary=self._summary.Summary(value=scalars))

    def table(self, step: int, rows: Sequence[Row]) -> None:
        self._text(TABLE, step, markdown_table(rows))

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None, active: bool) -> None:
        if summary is not None:
            text = "```json\n" + json.dumps(summary, indent=2) + "\n```"
            self._text("summary", int(summary.get("steps", 0)), text)
        self._writer.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _text(self, tag: str, step: int, text: str) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode(errors="replace")])
        value = self._summary.Summary.Value(
            tag=tag, metadata=self._summary.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        self._add(step, summary=self._summary.Summary(value=[value]))

    def _add(self, step: int, at: float = 0.0, **content: Any) -> None:
        event = self._event.Event(wall_time=at or time.time(), step=step, **content)
        self._writer.write(event.SerializeToString())


class Mlflow:
    """A run in the experiment named by the project. Metrics of a repeated step are added to the earlier ones; mlflow
    shows the newest."""

    MAX_METRICS = 1000
    """Maximum number of metrics in one request."""
    MAX_PARAMS = 100
    REFUSED = re.compile(r"[^\w\-./: ]")
    """Characters not allowed in metric names."""

    def __init__(self) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        self._client = mlflow.MlflowClient()
        self._run = ""
        self._waiting: list[Any] = []

    def start(self, run: TrackedRun) -> str:
        if run.run_id is None:
            self._run = self._begun(run)
        else:
            self._run = run.run_id
            self._client.update_run(self._run, status="RUNNING")
        self._log_config(run.config)
        return self._run

    def _begun(self, run: TrackedRun) -> str:
        """Return the id of the run that a failed start has created, or of a new run."""
        experiment = self._client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        for begun in self._client.search_runs([place], f"tags.`{ID}` = '{run.new_id}'"):
            return str(begun.info.run_id)
        return str(self._client.create_run(place, run_name=run.name, tags={ID: run.new_id}).info.run_id)

    def _log_config(self, config: dict[str, Any]) -> None:
        """Log the config as parameters, which never change, and as a file, which a resumed run replaces."""
        known = self._client.get_run(self._run).data.params
        params = [
            self._param(name, str(value)[:6000]) for name, value in flat_config(config).items() if name not in known
        ]
        for first in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + self.MAX_PARAMS])
        self._client.log_dict(self._run, config, "config.json")

    def metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._waiting += [
            self._metric(self.REFUSED.sub("_", name), value, int(at * 1000), step) for name, value in values.items()
        ]

    def table(self, step: int, rows: Sequence[Row]) -> None:
        names, path = list(rows[0]), f"{TABLE}/step-{step:06d}.json"
        if path in {known.path for known in self._client.list_artifacts(self._run, TABLE)}:  # replace it
            data = {"columns": names, "data": [[row[name] for name in names] for row in rows]}
            self._client.log_dict(self._run, data, path)
        else:
            self._client.log_table(self._run, {name: [row[name] for row in rows] for name in names}, path)

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[: self.MAX_METRICS])
            del self._waiting[: self.MAX_METRICS]

    def finish(self, summary: Mapping[str, Any] | None, active: bool) -> None:
        if summary is not None:
            self._client.log_dict(self._run, dict(summary), "summary.json")
            self._client.set_terminated(self._run, "FAILED" if summary.get("exit") else "FINISHED")
        elif not active:
            self._client.set_terminated(self._run, "KILLED")


class Wandb:
    """A run with outpace's step as the x-axis of every chart, because wandb drops values of a step lower than its
    own."""

    settle_s = 10.0
    """wandb stores in the background without confirmation: after a failure, data logged within this time is sent
    again."""
    MIN_FREE_BYTES = 1024 * 1024
    """With less free disk space wandb silently loses values."""
    STORE_S = 1.0
    """Interval at which wandb writes its local file. Its default is 15 seconds."""

    def __init__(self) -> None:
        import wandb

        wandb.teardown()  # after a failure, its process still has the run and would refuse to continue it
        self._wandb = wandb
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        run_id = run.run_id or run.new_id
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            x_disable_stats=True,
            x_transaction_log_flush_interval=self.STORE_S,
        )
        self._run = self._wandb.init(
            project=run.project, name=run.name, id=run_id, resume="allow", config=run.config, settings=settings,
            reinit="create_new",
        )  # fmt: skip
        self._run.config.update(run.config, allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run_id

    def metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log({**values, "step": step})

    def table(self, step: int, rows: Sequence[Row]) -> None:
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({TABLE: table, "step": step})

    def flush(self) -> None:
        if shutil.disk_usage(self._run.dir).free < self.MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._run.dir)

    def finish(self, summary: Mapping[str, Any] | None, active: bool) -> None:
        if summary is not None:
            self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0 if active else int(summary.get("exit", 0)) if summary else 1)


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by dotted name, with lists and tables as JSON."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            plain = json.dumps(value) if isinstance(value, list | dict) else value
            flat[f"{section}.{key}".rstrip(".")] = plain
    return flat


def markdown_table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
