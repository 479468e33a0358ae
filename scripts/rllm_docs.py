"""Generate the table of settings in docs/from_rllm.md from `outpace.config.rllm_settings`.

python scripts/rllm_docs.py           write the page
python scripts/rllm_docs.py --check   exit with 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from_rllm.md"
HEADING = "## Settings\n"

CONVERSIONS = {
    "rllm.algorithm.adv_estimator": "`advantage.name`",
    "rllm.algorithm.norm_adv_by_std_in_grpo": "`advantage.name`: `grpo` or `dr_grpo`, if the estimator is `grpo`",
    "rllm.algorithm.eps_clip": "`policy_loss.clip_low` and `policy_loss.clip_high`",
    "rllm.algorithm.loss_fn": "`policy_loss.name`",
    "rllm.algorithm.loss_agg_mode": "`policy_loss.aggregation`",
    "rllm.algorithm.rollout_correction.bypass_mode": "`policy_loss.old_policy`: `rollout` or `recomputed`",
    "rllm.algorithm.rollout_correction.tis_mode": "`correction.weight`",
    "rllm.algorithm.warmup_steps": "`learner.lr_warmup_steps`",
    "rllm.trainer.total_epochs": "`run.epochs`",
    "rllm.trainer.total_batches": "`run.steps`",
    "rllm.trainer.test_freq": "`eval.every`",
    "rllm.trainer.save_freq": "`checkpoint.every`",
    "rllm.trainer.logger": "`run.report_to`, without `console` and `file`",
    "rllm.trainer.resume_mode": "`run.overwrite`, if it is `disable`",
    "rllm.workflow.retry_limit": "`rollout.retries`, which is one less",
    "rllm.workflow.raise_on_error": "`pacing.max_failed` = 1",
    "rllm.mask_truncated_samples": "`filter.truncated`",
    "actor_rollout_ref.actor.use_kl_loss": "`kl.coefficient` = 0 if it is false",
}


def generate() -> str:
    return PAGE.read_text().partition(HEADING)[0] + HEADING + "\n" + "\n".join(_settings()) + "\n"


INTRODUCTION = """\
`config` is a dict, nested or dotted, an OmegaConf config, or a list such as `["rllm.rollout.n=8"]`. A name that is not in these tables is an error,
and one error lists all of them. The tables are generated from the code.
"""  # noqa: E501

PACING = """\
with a threshold s, K steps between updates and B groups per step: `pacing.max_lag` = K - 1 + ⌈s K⌉, `pacing.depth` = (1 + s) K - 1, \
`weights.every` = K, `weights.update` = `inflight` with partial rollouts and `drain` otherwise, `pacing.groups_per_step` = B, \
`pacing.chunk_groups`. If it is not enabled: `pacing.max_lag` = 0"""  # noqa: E501


def _settings() -> Iterator[str]:
    from outpace.config.rllm_settings import ASYNC, CONVERTED, DEFAULTS, MASKED, MIRRORED, NO_EFFECT, ONLY, SAME

    mirrors = _by_value(MIRRORED)
    assert set(CONVERSIONS) == set(CONVERTED), "describe every conversion"
    yield f"{INTRODUCTION}\n| rLLM | outpace |\n|---|---|"
    for setting, names in _by_value(SAME).items():
        yield f"| {_code(names)} | `{setting}` |"
    for name, meaning in CONVERSIONS.items():
        yield f"| {_code([name, *mirrors.get(name, [])])} | {meaning} |"
    yield f"| {_code(ASYNC)} | {PACING} |"
    masks = _code(f"rllm.compact_filtering.{name}" for name in ("enable", *(f"mask_{reason}" for reason in MASKED)))
    yield f"| {masks} | episodes that ended for this reason fail, and name it |"
    yield "| `rllm.workflow.workflow_args.NAME` | an argument of the workflow |"
    yield f"| {_code(['rllm.trainer.val_only', *mirrors['rllm.trainer.val_only']])} | `train()` only evaluates |\n"
    yield "| must be | rLLM |\n|---|---|"
    for values, names in _by_value(ONLY).items():
        yield f"| `{values[0]}` | {_code(names)} |"
    yield "\n| has no effect, because | rLLM |\n|---|---|"
    for reason, names in _by_value(NO_EFFECT).items():
        yield f"| {reason} | {_code(names)} |"
    defaults = ", ".join(f"`{name}` = {str(value).lower()}" for name, value in DEFAULTS.items())
    yield f"\nWhat is not set has rLLM's default: {defaults}."
    yield "Model, learning rate and token limits have the defaults of outpace."


def _by_value(table: Mapping[str, T]) -> dict[T, list[str]]:
    found: dict[T, list[str]] = {}
    for name, value in table.items():
        found.setdefault(value, []).append(name)
    return found


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date; write nothing")
    options = parser.parse_args()
    page = generate()
    if not options.check:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        sys.exit("docs/from_rllm.md is out of date; run `python scripts/rllm_docs.py`")


if __name__ == "__main__":
    main()
