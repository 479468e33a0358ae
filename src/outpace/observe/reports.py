"""What the parts report, under the metric names of the contract.

What a learner says of a whole step is exact and carries final names; of a chunk only counts are taken, which add up.
"""

from __future__ import annotations

from collections.abc import Iterable

from outpace.observe.efficiency import Efficiency
from outpace.observe.metrics import Meter
from outpace.types import ChunkReport, EngineStats, GroupReport, LoadReport, Manifest, StepReport


def record_tokens(meter: Meter, report: GroupReport) -> None:
    """The sampled tokens of a group, counted once: with the step that it is on record with, or at the end of the run.

    Those of a failed group are waste; those of a filtered one are named apart."""
    meter.add("throughput/sampled_tokens", report.tokens_sampled)
    if report.outcome == "filtered":
        meter.add("waste/filtered_tokens", report.tokens_sampled)
    if report.outcome == "failed":
        meter.add("waste/tokens", report.tokens_sampled)


def record_group(meter: Meter, report: GroupReport) -> None:
    """A group is on record with this step: trained in it, or settled before it."""
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


def totals_of(settled: Iterable[tuple[str, GroupReport | None]]) -> dict[str, float]:
    """The sums that these visits, by outcome, add to the metrics of their step."""
    meter = Meter()
    for outcome, report in settled:
        if report is not None:
            record_tokens(meter, report)
            meter.add(f"groups/{report.outcome}", 1)
            meter.add("faults/failed_episodes", report.failed_episodes)
        elif outcome == "skipped":
            meter.add("groups/skipped", 1)
    return {name: value for name, value in meter.flush().items() if value}


def record_given_up(meter: Meter, report: GroupReport) -> None:
    """The tokens of a group that was dropped or requeued are waste, also where the group had finished."""
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
    """What the engines have in hand now, summed over them."""
    words = list(stats)
    meter.add("fleet/engines", len(words))
    meter.add("fleet/healthy", sum(word.health == "healthy" for word in words))
    meter.add("fleet/limit", sum(word.limit or word.slots for word in words))
    meter.add("fleet/retries", sum(word.retries for word in words))
    meter.add("queue/sequences", sum(word.running for word in words))
    meter.add("queue/waiting", sum(word.waiting for word in words))


def record_queue(meter: Meter, running: int, finished: int) -> None:
    """Groups under way and groups finished and not yet trained: together, what is outstanding."""
    meter.add("queue/running", running)
    meter.add("queue/finished", finished)
    meter.add("queue/outstanding", running + finished)


def record_choices(meter: Meter, max_lag: int, resting: int, replayed: int) -> None:
    """What the controller has decided: the lag in force, how many tasks are left out, how many groups came again."""
    meter.add("governor/max_lag", max_lag)
    meter.add("difficulty/resting", resting)
    meter.add("replay/groups", replayed)


def record_efficiency(meter: Meter, lap: Efficiency, whole: Efficiency) -> None:
    """Waits and throughput of this step; T*/T of the run so far, since a single step can borrow from the next."""
    for name, value in lap.metrics().items():
        if name != "efficiency":
            meter.add(name, value)
    if whole.efficiency is not None:
        meter.add("efficiency", whole.efficiency)
    meter.add("time/wall_s", whole.seconds)
