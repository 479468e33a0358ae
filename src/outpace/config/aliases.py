"""Names that people bring from elsewhere, and what they are called here. None of them is accepted: each is answered
with the right one, because the values do not always mean the same."""

from __future__ import annotations

RENAMED = {
    "algorithm.importance_cap": "algorithm.cap",
    "algorithm.baseline": "algorithm.advantage",
    "algorithm.filter_uniform": "filter.uniform",
    "algorithm.uniform_tolerance": "filter.tolerance",
}
"""Settings of outpace 0.1."""

ALIASES = {
    "algorithm.beta": "kl.coefficient",
    "algorithm.epsilon": "algorithm.clip_low",
    "algorithm.kl": "kl.coefficient",
    "algorithm.loss_type": "algorithm.surrogate",
    "kl.beta": "kl.coefficient",
    "learner.learning_rate": "learner.lr",
    "rollout.n": "rollout.group_size",
    "rollout.num_generations": "rollout.group_size",
}
"""What other libraries call them."""
