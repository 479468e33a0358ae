"""Declared metrics: name, aggregation rule, unit, meaning and source of each. docs/metrics.md is generated from this.

A name with a part in angle brackets, such as `reward/<function>`, declares a family. An exact declaration takes
precedence over a family, and a family with more fixed characters over one with fewer.

    sum      total of the values                  p50, p95, …   smallest value that covers this percentage of them
    mean     weighted mean                        ratio         sum of the numerators / sum of the denominators
    std      weighted standard deviation          last          newest value
    min, max

User code declares its own metrics with `outpace.metric` at import time and reports values with `log_metric`. A
`MetricLog` collects the values: one per group in a worker, one per call in a grader or environment process, whose reply
carries them, and one for all callbacks.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from outpace.errors import BadInput, clip, one_line, plural
from outpace.runtime.wire import encodable_text

RULES = ("sum", "mean", "std", "min", "max", "last", "ratio")
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")

NAN_METRICS = "faults/nan_metrics"
EPISODE_VALUE = re.compile(r"episode/[^/]+")
"""Built-in names that user code may also report and declare: rollouts put them into `Episode.metrics`."""

_NAME = re.compile(r"[\w.:@+-]+(/[\w.:@+-]+)*")
_PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True)
class Metric:
    """A declared metric. An empty `unit` means a plain number."""

    name: str
    rule: str
    unit: str = ""
    meaning: str = ""
    source: str = "user code"


def section(source: str, *rows: tuple[str, str, str, str]) -> tuple[Metric, ...]:
    """Return metrics of one source from rows of names, rule, unit and meaning; names are separated by commas."""
    return tuple(
        Metric(name, rule, unit, meaning, source) for names, rule, unit, meaning in rows for name in names.split(", ")
    )


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards and groups": section(
        "worker",
        ("reward/mean", "mean", "reward", "over all scored attempts, including those of filtered groups"),
        ("reward/std", "std", "reward", "over the same attempts"),
        (
            "reward/<function>",
            "mean",
            "reward",
            "one reward function, unweighted, over the attempts to which it applies; also `rollout`, `environment`, "
            "`overlong` and `role_` with the name of a role",
        ),
        ("reward/<function>/std", "std", "reward", "standard deviation of the same values"),
        ("groups/finished, groups/filtered, groups/failed", "sum", "groups", "recorded with the step, by outcome"),
        ("groups/skipped", "sum", "prompt visits", "skipped because their tasks were resting"),
        (
            "groups/solve_all",
            "mean",
            "share",
            "of the groups recorded with the step in which every scored attempt solved the task: its reward is at "
            "least `eval.solved_at`",
        ),
        ("groups/solve_none", "mean", "share", "of the groups in which no scored attempt solved the task"),
        ("groups/seconds", "mean", "s", "time of a group from its start to the journal"),
    ),
    "Episodes and completions": section(
        "worker",
        ("completions/mean_length", "ratio", "tokens", "sampled tokens per attempt"),
        ("completions/clipped_ratio", "ratio", "share", "of the attempts that reached a token limit"),
        (
            "completions/mixed_versions",
            "mean",
            "share",
            "of the trajectories in which the weights changed between two sampled tokens",
        ),
        ("episode/seconds/p50", "p50", "s", "time of an attempt without grading, also of attempts that failed"),
        ("episode/seconds/p95", "p95", "s", "the same"),
        ("episode/seconds/max", "max", "s", "the same"),
        ("episode/turns", "mean", "answers", "answers per attempt, with tools or an environment"),
        ("episode/tool_calls, episode/tool_errors, episode/tool_timeouts", "mean", "calls", "per attempt"),
        ("episode/breaks", "mean", "", "conversations per attempt that could not be continued exactly"),
        ("episode/empty", "sum", "attempts", "whose rollout returned no answer to train on; they count as failed"),
        ("episode/retries", "sum", "", "how often a rollout ran again because it had raised (`rollout.retries`)"),
        (
            "episode/<name>",
            "mean",
            "",
            "values that a rollout put into `Episode.metrics`, over the attempts that have them",
        ),
        ("turns/reused", "sum", "answers", "answers of an earlier attempt at a group that were reused after a kill"),
    ),
    "Loss and optimizer": section(
        "learner",
        ("loss/policy", "last", "", "the whole objective of the step: policy loss, KL, entropy bonus and value loss"),
        ("loss/value", "mean", "", "value loss per token, before its coefficient, if there is a critic"),
        ("grad_norm", "last", "", "gradient norm before clipping, mean over the updates of the step"),
        ("learning_rate", "last", "", "of the step"),
        ("entropy", "mean", "nats", "entropy of the policy at the trained tokens"),
        ("kl", "mean", "nats", "estimated KL to the reference per token, if `kl.coefficient` is above 0"),
        (
            "clip_ratio, clip_ratio_positive, clip_ratio_negative",
            "ratio",
            "share",
            "of the kept tokens whose gradient no longer follows their advantage: overall, and for positive and for "
            "negative advantages",
        ),
    ),
    "Lag and off-policyness": section(
        "learner",
        ("lag/mean", "mean", "versions", "lag of trained tokens, without replayed groups"),
        ("lag/p95", "p95", "versions", "the same"),
        ("lag/max", "max", "versions", "the same"),
        ("lag/tokens_<lag>", "sum", "tokens", "trained tokens with this lag"),
        ("offpolicy/ess", "ratio", "share", "effective sample size of the importance weights; 1 is on-policy"),
        ("offpolicy/kl", "mean", "nats", "estimated KL from the sampling policy to the current one (k3), per token"),
        (
            "offpolicy/kl_engine",
            "last",
            "nats",
            "the part of it that is not staleness, measured on tokens sampled by the version that trains on them; the "
            "last known value",
        ),
        ("offpolicy/kl_staleness", "mean", "nats", "the remaining part, at least 0"),
        ("offpolicy/ratio_max", "max", "", "largest ratio of the current policy to the sampler"),
        ("offpolicy/ratio_<range>", "ratio", "share", "of the tokens whose ratio is in this range"),
        (
            "offpolicy/masked, offpolicy/masked_positive, offpolicy/masked_negative",
            "ratio",
            "share",
            "of the tokens rejected by a mask: overall, and by the sign of the advantage",
        ),
    ),
    "Scheduling": section(
        "controller",
        ("governor/max_lag", "last", "versions", "the lag limit in force after the step"),
        ("governor/lowered, governor/raised", "sum", "", "how often it was lowered and raised"),
        ("difficulty/resting", "last", "tasks", "tasks that are skipped for now"),
        ("replay/groups", "sum", "groups", "groups trained on again"),
        ("replay/filled", "sum", "groups", "replayed groups that took the place of a filtered one"),
        ("replay/lag_mean", "mean", "versions", "lag of the tokens of replayed groups; `lag/mean` is without them"),
        ("reroll/visits", "sum", "prompt visits", "re-rolls recorded with the step, with any outcome"),
        ("reroll/waiting", "last", "tasks", "that wait for a re-roll"),
        ("reroll/dropped", "last", "tasks", "dropped because too many waited for a re-roll, since the run began"),
        ("queue/running, queue/finished, queue/outstanding", "last", "groups", "in progress at the end of the step"),
        ("queue/sequences, queue/waiting", "last", "requests", "running and waiting in the engines"),
        ("producer/rounds", "sum", "rounds", "rounds that a producer has given"),
        ("producer/rows", "sum", "tasks", "tasks in these rounds"),
        ("producer/seconds", "sum", "s", "time that the producer took for them"),
    ),
    "Throughput and waste": section(
        "controller",
        ("throughput/sampled_tokens", "sum", "tokens", "tokens of the groups recorded with the step"),
        ("throughput/trained_tokens", "sum", "tokens", "tokens trained in the step"),
        ("throughput/sampled_tok_s", "last", "tokens/s", "sampled by the engines"),
        ("throughput/trained_tok_s", "last", "tokens/s", "trained by the learner"),
        ("waste/tokens", "sum", "tokens", "sampled tokens thrown away: failed, dropped and requeued groups"),
        ("waste/fraction", "ratio", "share", "of the sampled tokens that were thrown away"),
        (
            "waste/filtered_tokens",
            "sum",
            "tokens",
            "tokens of filtered groups. They are counted separately, because only sampling can show that a group has "
            "no learning signal",
        ),
    ),
    "Time": section(
        "controller",
        ("time/step_s", "last", "s", "duration of the step"),
        ("time/train_s", "sum", "s", "time inside the learner"),
        ("time/wall_s", "last", "s", "time since training began, over all starts of the run"),
        ("time/total_s", "last", "s", "the same including every startup"),
        ("idle/learner_s, idle/engine_s", "sum", "s", "idle time of the learner, and of the engines in the mean"),
        ("share/engine, share/eval, share/learner", "last", "share", "of the step that each spent computing"),
        ("efficiency", "last", "share", "T*/T of the run so far"),
        ("checkpoint/held_s", "sum", "s", "time in which the copy for a checkpoint blocked the learner"),
        ("checkpoint/write_s", "sum", "s", "time to write its files in the background"),
    ),
    "Engines and weights": section(
        "engines",
        ("sync/publish_s", "sum", "s", "time in which snapshots blocked the learner"),
        ("sync/pause_s", "sum", "s", "time in which sampling was paused, over all engines"),
        (
            "sync/hold_s, sync/copy_s, sync/resume_s",
            "sum",
            "s",
            "phases of the pauses of servers: until a server stopped sampling, had the new weights, and sampled again",
        ),
        ("sync/prepare_s", "sum", "s", "time to verify and transfer weights while servers sampled"),
        ("sync/load_s", "sum", "s", "time of complete loads, over all engines"),
        ("sync/bytes", "sum", "bytes", "transferred to all engines"),
        ("sync/loads", "sum", "", "number of loads, over all engines"),
        ("fleet/engines, fleet/healthy", "last", "engines", "number of engines; number that are healthy"),
        ("fleet/limit", "last", "requests", "most that may run at once, over all engines"),
        ("fleet/retries", "last", "requests", "failed on a server and continued, since the start"),
    ),
    "Evaluation": section(
        "evaluation",
        ("eval/reward", "last", "reward", "mean over the held-out tasks"),
        ("eval/stderr", "last", "reward", "its standard error over the tasks"),
        ("eval/reward/<function>", "last", "reward", "mean of one reward function, unweighted"),
        ("eval/reward/<function>/p<percent>", "last", "reward", "percentile of its values"),
        ("eval/p<percent>", "last", "reward", "percentile of the rewards, such as `eval/p50`"),
        ("eval/pass@<k>", "last", "share", "of the tasks solved by at least one of k attempts (unbiased estimate)"),
        ("eval/pass@<k>/stderr", "last", "share", "its standard error over the tasks"),
        ("eval/count", "last", "tasks", "scored"),
        ("eval/failed", "last", "attempts", "that failed"),
        ("eval/mean_tokens", "last", "tokens", "sampled tokens per scored attempt"),
        ("eval/binary", "last", "", "1 if every reward is 0 or 1, so that `eval/reward` is an accuracy; else 0"),
        ("eval/version", "last", "version", "the evaluated version"),
        (
            "eval/version_newest",
            "last",
            "version",
            "newest version that sampled; differs from `eval/version` only if engines have no second weight set",
        ),
        ("eval/<set>/<metric>", "last", "", "any of these for a named held-out set"),
    ),
    "Faults": section(
        "controller",
        ("faults/failed_episodes", "sum", "attempts", "attempts that failed"),
        ("faults/skipped_steps", "sum", "steps", "steps that changed nothing: loss or gradient norm was not finite"),
        (NAN_METRICS, "sum", "values", "metric values that were dropped: not finite, or too many in one call"),
        (
            "faults/<kind>",
            "sum",
            "",
            "other faults: `engine_lost`, `worker_lost`, `producer_lost`, `corrupt_weights`, `failed_loads`, "
            "`torn_loads`, `failed_pins`, `given_up_groups`, `checkpoint_skipped`, and `kept_groups` (in `bad_steps/`)",
        ),
    ),
}
"""Built-in metrics by section of docs/metrics.md."""

BUILT_IN = {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}
DECLARED: dict[str, Metric] = {}
"""Metrics that user code declared in this process, or in the one that started the run."""


def metric(name: str, rule: str = "mean", *, meaning: str = "", unit: str = "") -> Metric:
    """Declare a custom metric. Call this when your module is imported. A later declaration replaces an earlier one."""
    check_name(_PLACEHOLDER.sub("x", name) if isinstance(name, str) else name)
    if rule not in RULES and not PERCENTILE.fullmatch(rule):
        raise BadInput(f"metric {name}: rule {rule!r} is invalid; choose {', '.join(RULES)} or a percentile like p95")
    DECLARED[name] = Metric(name, rule, unit, meaning)
    return DECLARED[name]


def check_name(name: str) -> None:
    """Raise `BadInput` if user code may not report a metric under this name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "step":
        shown = one_line(repr(name), 60)
        raise BadInput(f"metric {shown}: not a valid name; use letters and digits, with / between parts: env/score")
    if (found := _built_in(name)) is not None and not EPISODE_VALUE.fullmatch(name):
        raise BadInput(f"metric {name}: outpace reports {found.name} itself; choose another name")


def full_name(name: str) -> str:
    """Return the name of a metric that a rollout put into `Episode.metrics`."""
    return name if "/" in name else f"episode/{name}"


def find(name: str) -> Metric | None:
    """Return the declaration that covers this name. A family of user code does not change built-in metrics."""
    built_in = _built_in(name)
    if built_in is not None and name not in DECLARED and not EPISODE_VALUE.fullmatch(name):
        return built_in
    return _find(name, DECLARED) or built_in


@lru_cache(4096)
def _built_in(name: str) -> Metric | None:
    return _find(name, BUILT_IN)


def _find(name: str, declared: dict[str, Metric]) -> Metric | None:
    return declared.get(name) or next((family for family in _families(declared) if _covers(family.name, name)), None)


def _families(declared: dict[str, Metric]) -> Iterator[Metric]:
    families = (metric for metric in list(declared.values()) if "<" in metric.name)  # a callback may declare meanwhile
    yield from sorted(families, key=lambda metric: -len(_PLACEHOLDER.sub("", metric.name)))


def _covers(family: str, name: str) -> bool:
    return re.fullmatch(".+".join(map(re.escape, _PLACEHOLDER.split(family))), name) is not None


# ------------------------------------------------------------------------------------------- reported by user code

MAX_LOGGED = 50_000
"""Maximum number of values that user code may report in one group or call."""
MAX_EXTRA = 4_000
"""Maximum number of characters in a value of `log_extra`."""

Logged = tuple[str, float, float]
"""A value that user code reported: name, value, weight."""
PlainValue = str | bool | int | float | None


class MetricLog:
    """Collects what user code reports while a group, a call or a callback runs. Any thread may add to it."""

    def __init__(self, completions: int = 0) -> None:
        self.completions = completions  # number of completions being graded
        self.extra: dict[str, list[PlainValue]] = {}  # columns of `log_extra`, with one value per completion
        self.dropped = 0
        self._values: deque[Logged] = deque()

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        if len(self._values) < MAX_LOGGED:
            self._values.append((name, value, weight))
        else:
            self.dropped += 1

    def take(self) -> list[Logged]:
        return [self._values.popleft() for _ in range(len(self._values))]

    def log_metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Report a value from user code. Raises `ValueError` for an invalid name, value or weight."""
        try:
            check_name(name)
        except BadInput as error:  # which would end the run if a rollout raised it
            raise ValueError(f"log_metric: {error}") from None
        try:
            number, share = float(value), float(weight)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
            raise ValueError(f"log_metric: {name} is {one_line(repr(value), 60)}, not a number") from None
        if share < 0:
            raise ValueError(f"log_metric: {name} has the weight {share:g}; it must not be negative")
        self.add(name, number, share)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Add a column to the recorded rollouts, with one value per completion."""
        plain = [plain_value(value) for value in values]
        if not isinstance(column, str) or len(plain) != self.completions:
            raise ValueError(
                f"log_extra: {column!r} has {plural(len(plain), 'value')} for {self.completions} completions"
            )
        self.extra[encodable_text(column)] = plain


def plain_value(value: Any) -> PlainValue:
    """Convert to a value that JSON can represent: text unless it is a bool, a finite number or None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral) and abs(int(value)) < 2**63:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral) and math.isfinite(value):
        return float(value)
    return clip(encodable_text(str(value)), MAX_EXTRA)


_current: ContextVar[MetricLog | None] = ContextVar("metric_log", default=None)


@contextmanager
def collecting(log: MetricLog | None = None) -> Iterator[MetricLog]:
    """Collect the values reported in this context, including the tasks and user-code threads started in it."""
    token = _current.set(log := log or MetricLog())
    try:
        yield log
    finally:
        _current.reset(token)


def current_log() -> MetricLog | None:
    return _current.get()


def forward_log(logged: Iterable[Logged], extra: Mapping[str, list[Any]] | None = None, dropped: int = 0) -> bool:
    """Report values from another process, and count those that it dropped. Returns whether all were valid."""
    if (log := _current.get()) is not None:
        log.dropped += dropped
    try:
        for name, value, weight in logged:
            log_metric(name, value, weight)
        for column, values in (extra or {}).items():
            log_extra(column, values)
    except ValueError:
        return False
    return True


def log_metric(name: str, value: float, weight: float = 1.0) -> None:
    """Report a value of a metric from a reward, a rollout, an environment, a tool or a callback. Elsewhere it does
    nothing. For the rule `ratio`, `value` is the numerator and `weight` the denominator."""
    if (log := _current.get()) is not None:
        log.log_metric(name, value, weight)


def log_extra(column: str, values: Iterable[Any]) -> None:
    """Add a column to the recorded rollouts from a reward function, with one value per completion."""
    if (log := _current.get()) is not None:
        log.log_extra(column, values)
