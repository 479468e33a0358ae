"""A custom policy loss, a custom advantage estimator, and a short training run with both.

    python examples/own_algorithm.py

Each is one function with one decorator. The config refers to them by file and name; nothing else needs registering.
Keyword-only arguments, such as `floor`, become settings of the section that names the function.
Every component of the run imports this file, so the script part is behind a `__main__` guard and torch is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import outpace

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@outpace.policy_loss(old_policies=("rollout",))
def banded_is(tokens: outpace.Tokens, *, cap: float = 2.0, floor: float = 0.5) -> Tensor:
    """-sg(w) A log pi, with w = current / sampler clamped to [floor, cap]: no token's weight vanishes."""
    weights_N = tokens.ratio_N.detach().clamp(floor, cap)
    return -weights_N * tokens.advantages_N * tokens.logp_N


@outpace.advantage(credits=("episode", "turn", "token"), additive=True)
def above_median(group: outpace.GroupReturns) -> NDArray[np.float64]:
    """R - median(R): if most attempts fail, only successes get an advantage; if most succeed, only failures do."""
    return group.returns_G - np.median(group.returns_G)


def main() -> None:
    trainer = outpace.Trainer(
        model="starter",
        tasks="countdown",
        config={
            "policy_loss.name": f"{__file__}:banded_is",
            "advantage.name": f"{__file__}:above_median",
            "policy_loss.floor": 0.8,
            "pacing.groups_per_step": 32,
            "eval.count": 128,
            "run.steps": 10,
        },
    )
    summary = trainer.train()
    print(f"held-out reward: {summary.eval_first:.3f} before, {summary.eval_last:.3f} after")


if __name__ == "__main__":
    main()
