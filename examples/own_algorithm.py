"""A surrogate and an advantage estimator of one's own, and a short training run with them.

    python examples/own_algorithm.py

Each is one function under one decorator. Nothing is registered elsewhere: a config names them by the file they are in.
This file is imported by every part of the run, so what it does as a script is behind a guard, and torch is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import outpace

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@outpace.surrogate(anchors=("rollout",))
def banded_is(tokens: outpace.Tokens, *, cap: float = 2.0, clip_low: float = 0.5) -> Tensor:
    """-sg(w) A log pi with w = current / sampler held between 1 - clip_low and cap: no token is nearly forgotten."""
    weights_N = tokens.ratio_N.detach().clamp(1 - clip_low, cap)
    return -weights_N * tokens.advantages_N * tokens.logp_N


@outpace.advantage(credits=("episode", "turn", "token"), additive=True)
def above_median(peers: outpace.Peers) -> NDArray[np.float64]:
    """R - median(R): where most attempts fail only the solved ones count, where most are solved only the failed."""
    return peers.returns_G - np.median(peers.returns_G)


def main() -> None:
    trainer = outpace.Trainer(
        model="starter",
        tasks="countdown",
        config={
            "algorithm.surrogate": f"{__file__}:banded_is",
            "algorithm.advantage": f"{__file__}:above_median",
            "algorithm.clip_low": 0.2,
            "pacing.groups_per_step": 32,
            "eval.count": 128,
            "run.steps": 10,
        },
    )
    summary = trainer.train()
    print(f"held-out reward: {summary.eval_first:.3f} before, {summary.eval_last:.3f} after")


if __name__ == "__main__":
    main()
