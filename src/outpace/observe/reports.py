"""MERGED"""

from __future__ import annotations

from collections.abc import Iterable

from outpace.observe.efficiency import Efficiency
from outpace.observe.metrics import Meter
from outpace.types import ChunkReport, EngineStats, GroupReport, LoadReport, Manifest, StepReport


def record_tokens(meter: Meter, report: GroupReport) -> None:
    """Record the sampled tokens of a group. Call it once per group: in the step that records it, or at the end of the
    run.

    Tokens of a failed group are waste; tokens of a filtered group are counted separately."""
    meter.add("throughput/sampled_tokens", report.tokens_sampled)
    if report.outcome == "filtered":
        meter.add("waste/filtered_tokens", report.tokens_sampled)
    if report.outcome == "failed":
        meter.add("waste/tokens", report.tokens_sampled)


def record_group(meter: Meter, report: GroupReport) -> None:
    """Record a group in the step that trained it, or in the next step if it was finalized without training."""
    record_tokens(meter, report)
    meter.add("groups/seconds", report.seconds)
    meter.add(f"groups/{report.outcome}", 1)
    meter.add("faults/failed_episodes", report.failed_episodes)
    for reward in report.rewards:
        meter.add("reward/mean", reward)
        meter.add("reward/std", reward)
    for function, reward in report.reward_parts.items():
        meter.add(f"reward/{function}", reward, len(report.rewards))
    if report.episodes:
        meter.add("completion/mean_tokens", report.tokens_sampled / report.episodes, report.episodes)
        meter.add("completion/truncated", report.truncated / report.episodes, report.episodes)
    for name, value in report.metrics.items():
        meter.add(name if "/" in name else f"episode/{name}", value, max(report.episodes, 1))


def totals_of(visits: Iterable[tuple[str, GroupReport | None]]) -> dict[str, float]:
    """Return what these prompt visits (outcome and report) add to the sums of their step."""
    meter = Meter()
    for outcome, report in visits:
        if report is not None:
            record_tokens(meter, report)
            meter.add(f"groups/{report.outcome}", 1)
            meter.add("faults/failed_episodes", report.failed_episodes)
        elif outcome == "skipped":
            meter.add("groups/skipped", 1)
    return {name: value for name, value in meter.flush().items() if value}


def record_given_up(meter: Meter, report: GroupReport) -> None:
    """Record the tokens of a group that was dropped or requeued as waste, even if the group had finished."""
    meter.add("throughput/sampled_tokens", report.tokens_sampled)
    meter.add("waste/tokens", report.tokens_sampled)


def record_chunk(meter: Meter, report: ChunkReport) -> None:
    meter.add("throughput/trained_tokens", report.tokens)
    meter.add_counts("lag", report.lag_counts)
    for lag, tokens in report.replay_lag_counts.items():
        meter.add("replay/lag_mean", lag, tokens)


def record_step(meter: Meter, report: StepReport) -> None:
    meter.add("loss/policy", report.loss)
    meter.add("loss/grad_norm", report.grad_norm)
    meter.add("loss/lr", report.lr)
    meter.add("time/train_s", report.seconds)
    meter.add("faults/skipped_steps", float(report.skipped))
    for name, value in report.metrics.items():
        meter.put(name, value)


def record_publish(meter: Meter, manifest: Manifest) -> None:
    meter.add("sync/publish_s", manifest.seconds)


def record_load(meter: Meter, report: LoadReport) -> None:
    meter.add("sync/pause_s", report.pause_s)
    meter.add("sync/load_s", report.seconds)
    meter.add("sync/bytes", report.bytes)
    meter.add("sync/loads", 1)


def record_engines(meter: Meter, stats: Iterable[EngineStats]) -> None:
    """Record the current state of the engines, summed over all of them."""
    engines = list(stats)
    meter.add("fleet/engines", len(engines))
    meter.add("fleet/healthy", sum(engine.health == "healthy" for engine in engines))
    meter.add("fleet/limit", sum(engine.limit or engine.slots for engine in engines))
    meter.add("fleet/retries", sum(engine.retries for engine in engines))
    meter.add("queue/sequences", sum(engine.running for engine in engines))
    meter.add("queue/waiting", sum(engine.waiting for engine in engines))


def record_queue(meter: Meter, running: int, finished: int) -> None:
    """Record running groups and groups that are finished but not trained yet. Their sum is outstanding."""
    meter.add("queue/running", running)
    meter.add("queue/finished", finished)
    meter.add("queue/outstanding", running + finished)


def record_choices(meter: Meter, max_lag: int, resting: int, replayed: int) -> None:
    """Record the scheduler's current `max_lag`, the tasks excluded by difficulty and the replayed groups."""
    meter.add("governor/max_lag", max_lag)
    meter.add("difficulty/resting", resting)
    meter.add("replay/groups", replayed)


def record_efficiency(meter: Meter, lap: Efficiency, whole: Efficiency) -> None:
    """Record waits and throughput of the step, and T*/T of the run so far: within a single step it is not meaningful,
    because work overlaps with the next one."""
    for name, value in lap.metrics().items():
        if name != "efficiency":
            meter.add(name, value)
    if whole.efficiency is not None:
        meter.add("efficiency", whole.efficiency)
    meter.add("time/wall_s", whole.seconds)
