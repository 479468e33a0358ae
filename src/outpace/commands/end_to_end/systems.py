"""One training of outpace or of TRL, in its own processes, and what it measured.

Steps of the first third do not count: processes warm up, and the pipeline of outpace fills. outpace trains
`pacing.max_lag` + 1 further steps that do not count either: near its end a run samples nothing new, and these
steps would be too fast.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import outpace
from outpace.commands.end_to_end.work import Work
from outpace.config.load import dump_toml
from outpace.errors import ComponentFailed
from outpace.monitoring.line_file import read_lines

OUTPACE, TRL = "outpace", "trl"
CONFIG = "config.json"
POLL_S = 0.05

DETAILS = {
    "learner waits, s": "idle/learner_s",
    "engine waits, s": "idle/engine_s",
    "sampling paused, s": "sync/pause_s",
    "tokens thrown away": "waste/tokens",
    "tokens filtered": "waste/filtered_tokens",
}
"""Metrics of an outpace run, per counted step."""


class SystemRun(msgspec.Struct, frozen=True, kw_only=True):
    """One training. Figures are means over the counted steps, the reward over the last third of all steps."""

    step_s: float
    samples: float
    completion_tokens: float
    trained_tokens: float
    reward: float
    first_step_s: float  # from the command to the end of the first step
    clock: list[float] = []  # seconds from the start of training to the end of each step
    weights: dict[int, str] = {}  # files saved for evaluation, by step
    details: dict[str, float] = {}

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def completion_tokens_per_s(self) -> float:
        return self.completion_tokens / self.step_s

    @property
    def trained_tokens_per_s(self) -> float:
        return self.trained_tokens / self.step_s

    @property
    def mean_length(self) -> float:
        return self.completion_tokens / self.samples


def counted_steps(steps: int) -> slice:
    return slice(steps // 3, steps)


def all_steps(work: Work, steps: int) -> int:
    """Return the number of steps that outpace trains, including those at the end that do not count."""
    return steps + work.config.pacing.max_lag + 1


RUN = "run"
"""Run directory of outpace, in the directory of a training."""


@dataclass(frozen=True)
class OutpaceSystem:
    work: Work
    save_every: int = 0

    def run(self, steps: int, directory: Path) -> SystemRun:
        config = directory / "config.toml"
        config.write_text(dump_toml(self.work.config))
        in_all = all_steps(self.work, steps)
        words = [f"--run.dir={directory / RUN}", f"--run.steps={in_all}"]
        if self.save_every:
            words += [f"--checkpoint.every={self.save_every}", f"--checkpoint.keep={in_all}"]
        command = [sys.executable, "-m", "outpace.cli", "train", str(config), "--quiet", *words]
        metrics = directory / RUN / "metrics.jsonl"
        first_step_s = _run(OUTPACE, command, directory, metrics)
        lines = list(read_lines(metrics))
        return self._measured(steps, lines, first_step_s, directory / RUN / "checkpoints")

    def _measured(
        self, steps: int, lines: Sequence[Mapping[str, float]], first_step_s: float, checkpoints: Path
    ) -> SystemRun:
        counted = lines[counted_steps(steps)]

        def mean(name: str) -> float:
            return statistics.fmean(line.get(name, 0.0) for line in counted)

        details = {label: mean(name) for label, name in DETAILS.items()}
        details["largest lag"] = max(line.get("lag/max", 0.0) for line in counted)
        return SystemRun(
            step_s=mean("time/step_s"),
            samples=self.work.samples,
            completion_tokens=mean("completions/mean_length") * self.work.samples,
            trained_tokens=mean("throughput/trained_tokens"),
            reward=statistics.fmean(line["reward/mean"] for line in lines[2 * steps // 3 : steps]),
            first_step_s=first_step_s,
            clock=[line["time/wall_s"] for line in lines[:steps]],
            weights={step: file for step, file in _weight_files(checkpoints).items() if step <= steps},
            details=details,
        )


@dataclass(frozen=True)
class TrlSystem:
    work: Work
    python: str
    vllm: bool
    batch: int
    save_every: int = 0

    def run(self, steps: int, directory: Path) -> SystemRun:
        job, result, saved = directory / "job.json", directory / "result.json", directory / "saved"
        given = {
            "model": str(_model_in(self.work.config.model.dtype, self.work.model, directory / "model")),
            "vllm": self.vllm,
            "save_every": self.save_every,
            "save_to": str(saved),
        }
        job.write_text(json.dumps(self.work.trl_job(steps, self.batch) | given))
        command = [self.python, "-m", "outpace.commands.end_to_end.trl_process", str(job), str(result)]
        began = time.monotonic()
        _run(TRL, command, directory, result, {"PYTHONPATH": _importable(directory)})
        found = json.loads(result.read_text())
        ends, counted = found["ends"], counted_steps(steps)
        durations = [after - before for before, after in zip([found["began"], *ends], ends, strict=False)]
        tokens = statistics.fmean(found["completion_tokens"][counted])
        return SystemRun(
            step_s=statistics.fmean(durations[counted]),
            samples=statistics.fmean(found["samples"][counted]),
            completion_tokens=tokens,
            trained_tokens=tokens,
            reward=statistics.fmean(found["rewards"][2 * steps // 3 :]),
            first_step_s=ends[0] - began,
            clock=[end - found["began"] for end in ends],
            weights=_weight_files(saved),
        )


def _model_in(dtype: str, source: Path, target: Path) -> Path:
    """Link the model to `target`, with this dtype in its config: vLLM in TRL samples in the dtype of the config."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file.resolve())
    config = json.loads((source / CONFIG).read_text())
    config.pop("torch_dtype", None)
    (target / CONFIG).unlink()
    (target / CONFIG).write_text(json.dumps({**config, "dtype": dtype}))
    return target


def _weight_files(directory: Path) -> dict[int, str]:
    """Return the weights in `step-N/`, by N."""
    files = directory.glob("step-*/**/model.safetensors")
    return {int(file.relative_to(directory).parts[0].removeprefix("step-")): str(file) for file in files}


def _importable(directory: Path) -> str:
    """Return a PYTHONPATH with which another Python imports outpace, but no other package of this environment."""
    path = directory / "path"
    path.mkdir()
    (path / "outpace").symlink_to(Path(outpace.__file__ or "").resolve().parent)
    return os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))


def _run(
    name: str, command: Sequence[str], directory: Path, watched: Path, environment: Mapping[str, str] | None = None
) -> float:
    """Run the command, with its output in `directory`. Returns the seconds until the file `watched` had content."""
    log = directory / "output.log"
    began, first_s = time.monotonic(), 0.0
    given = {**os.environ, **(environment or {})}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=given)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if not first_s and watched.exists() and watched.stat().st_size:
                    first_s = time.monotonic() - began
        finally:
            process.terminate()  # does nothing if it has ended
            process.wait()
    if process.returncode != 0:
        raise ComponentFailed(name, f"exit code {process.returncode}", _tail(log))
    return first_s


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def evaluate(work: Work, files: Sequence[str], count: int, directory: Path) -> list[float]:
    """Return the held-out accuracy of the model before training, and then of these weights."""
    job, result = directory / "job.json", directory / "accuracy.json"
    job.write_text(json.dumps(work.accuracy_job(count) | {"files": list(files)}))
    command = [sys.executable, "-m", "outpace.commands.end_to_end.accuracy", str(job), str(result)]
    _run("evaluation", command, directory, result)
    found: list[float] = json.loads(result.read_text())
    return found


def seconds_to(target: float, start: float, clock: Sequence[float], accuracy: Mapping[int, float]) -> float | None:
    """Return when the accuracy reached the target, interpolated between evaluated steps. None: it did not.

    `start` is the accuracy before training, `clock` the seconds at the end of each step."""
    before_s, before = 0.0, start
    for step, reached in sorted(accuracy.items()):
        if reached >= target:
            return before_s + (clock[step - 1] - before_s) * max(target - before, 0.0) / max(reached - before, 1e-9)
        before_s, before = clock[step - 1], reached
    return None
