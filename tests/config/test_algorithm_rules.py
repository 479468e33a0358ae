"""Combinations of the mathematics that are refused, each with the key to change at the start of the line."""

from pathlib import Path
from typing import Any

import pytest

from outpace.config.loading import make_config
from outpace.config.rules import resolve
from outpace.errors import BadInput

PPO = {"algorithm.surrogate": "ppo"}
ONE = {"rollout.group_size": 1}


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        resolve(make_config(values))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"correction.weight": "token"}, "correction.weight", 'count it twice; use "none" or another anchor'),
        ({**PPO, "algorithm.anchor": "rollout", "correction.weight": "sequence"}, "correction.weight", "twice"),
        (
            {"kl.coefficient": 0.1, "kl.place": "reward", "kl.estimator": "unbiased"},
            "kl.estimator",
            'use "k1" in the reward',
        ),
    ],
)
def test_what_would_count_a_ratio_twice_is_refused(values: dict[str, Any], key: str, said: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert said in message


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        (
            {"algorithm.surrogate": "importance"},
            "algorithm.surrogate",
            "set pacing.max_lag to 1, or set algorithm.force",
        ),
        (
            {"algorithm.surrogate": "importance", "correction.masks": ["sequence"]},
            "algorithm.surrogate",
            "pacing.max_lag allows tokens 2 versions old",
        ),
        (
            {"algorithm.surrogate": "importance", "pacing.max_lag": 0, "replay.fraction": 0.5},
            "algorithm.surrogate",
            "replay.max_age allows tokens 8 versions old",
        ),
        ({**PPO, "correction.cap": 0}, "correction.cap", 'set a cap, add the mask "token"'),
        ({**PPO, "correction.cap": 0, "correction.masks": ["sequence"]}, "correction.cap", "without an upper bound"),
        (
            {**PPO, "correction.cap": 0, "correction.weight": "sequence", "correction.masks": ["token", "geometric"]},
            "correction.cap",
            'add the mask "sequence"',
        ),
    ],
)
def test_weights_without_a_bound_are_refused_on_old_tokens(values: dict[str, Any], key: str, said: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert said in message
    resolve(make_config({**values, "algorithm.force": True}))


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm.surrogate": "importance", "pacing.max_lag": 1},
        {"algorithm.surrogate": "importance", "correction.masks": ["token"]},
        {**PPO, "correction.cap": 0, "pacing.max_lag": 1},
        {**PPO, "correction.cap": 0, "correction.masks": ["token"]},
        {**PPO, "correction.cap": 0, "correction.weight": "sequence", "correction.masks": ["sequence"]},
    ],
)
def test_weights_without_a_cap_are_accepted_near_the_sampler_or_under_a_mask(values: dict[str, Any]) -> None:
    resolve(make_config(values))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"algorithm.normalise": "batch_std"}, "the normaliser batch_std takes statistics"),
        ({"algorithm.advantage": "gae"}, "the estimator gae takes values"),
        ({"algorithm.advantage": "gdpo"}, "the normaliser whiten_sequences takes statistics"),
        ({"algorithm.updates": 2}, "several updates"),
        ({"algorithm.passes": 2}, "several updates"),
        ({"correction.masks": ["token", "m2po"]}, "the mask m2po looks at"),
        ({"kl.coefficient": 0.1, "kl.place": "reward"}, 'kl.place = "reward"'),
    ],
)
def test_what_needs_the_closed_batch_does_not_stream(values: dict[str, Any], reason: str) -> None:
    assert resolve(make_config(values)).learner.stream is False
    message = refusal({**values, "learner.stream": True})
    assert message.startswith(f"learner.stream: {reason}")
    assert message.endswith("leave this out or set it to false")


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"algorithm.cap": 3, **PPO}, "algorithm.cap", "choose one that does (truncated_is, cispo), or leave this out"),
        ({"algorithm.clip_low": 0.1}, "algorithm.clip_low", "surrogate truncated_is, advantage dr_grpo"),
        ({"algorithm.dual_clip": 3}, "algorithm.dual_clip", "(ppo)"),
        ({"algorithm.std_epsilon": 1e-3}, "algorithm.std_epsilon", "grpo"),
        ({"algorithm.pass_k": 2}, "algorithm.pass_k", "(pass_at_k)"),
        ({"algorithm.gamma": 0.9}, "algorithm.gamma", 'use algorithm.credit = "turn" or "token", or leave this out'),
        ({"algorithm.gae_lambda": 0.9, "algorithm.credit": "turn"}, "algorithm.gae_lambda", '"gae", or leave this out'),
        ({"correction.cap": 3}, "correction.cap", "no weight to truncate"),
        ({"correction.floor": 0.1, **PPO, "correction.weight": "none"}, "correction.floor", "no weight to truncate"),
        ({"correction.token_low": 0.1}, "correction.token_low", "the mask token is not in correction.masks; add it"),
        ({"correction.masks": ["token"], "correction.veto_below": 0.1}, "correction.veto_below", "the mask veto"),
        ({"kl.estimator": "k3"}, "kl.estimator", "kl.coefficient is 0"),
        ({"kl.place": "loss"}, "kl.place", "kl.coefficient is 0"),
        ({"kl.sync_every": 3}, "kl.sync_every", "kl.coefficient is 0"),
        ({"critic.lr": 1e-3}, "critic.lr", 'use algorithm.advantage = "gae", or leave this out'),
        ({"critic.shared": False}, "critic.shared", "no values are learned"),
        ({"filter.uniform": False, "filter.tolerance": 0.1}, "filter.tolerance", "filter.uniform is off"),
        ({"difficulty.rest_epochs": 2}, "difficulty.rest_epochs", "set difficulty.easy_above or difficulty.hard_below"),
        ({"replay.max_age": 4}, "replay.max_age", "replay.fraction is 0"),
        ({"replay.times": 4}, "replay.times", "replay.fraction is 0"),
        ({"governor.enabled": False, "governor.patience": 4}, "governor.patience", "governor.enabled is off"),
        ({"run.deterministic": True, "governor.ess_min": 0.4}, "governor.ess_min", "governor.enabled is off"),
        ({"rewards.overlong_penalty": 2}, "rewards.overlong_penalty", "rewards.overlong_buffer is 0"),
    ],
)
def test_a_key_that_nothing_would_read_is_refused(values: dict[str, Any], key: str, said: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert said in message


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"algorithm.surrogate": "pppo"}, "algorithm.surrogate", "no surrogate is called 'pppo'; there are reinforce"),
        ({"algorithm.advantage": "a:b:c"}, "algorithm.advantage", "there is no module"),
        (
            {"algorithm.anchor": "proximal"},
            "algorithm.anchor",
            "truncated_is cannot take its ratio to proximal; use rollout",
        ),
        ({"algorithm.advantage": "gdpo", "algorithm.credit": "turn"}, "algorithm.credit", "by turn; use episode"),
        ({"algorithm.advantage": "grpo", "algorithm.credit": "token"}, "algorithm.credit", "use episode or turn"),
        ({"correction.masks": ["veto", "veto"]}, "correction.masks", "veto is there twice"),
        (
            {"correction.masks": ["token"], "correction.token_low": 9.0},
            "correction.token_low",
            "token_high, which is 5.0",
        ),
        ({"correction.masks": ["sequence"], "correction.sequence_high": 0.5}, "correction.sequence_low", "lower it"),
        ({"correction.masks": ["geometric"], "correction.geometric_low": 1.5}, "correction.geometric_low", "lower it"),
        ({**PPO, "correction.floor": 2}, "correction.floor", "not below correction.cap, which is 2.0"),
        (ONE, "rollout.group_size", 'use 2 or more, or algorithm.advantage = "none"'),
        ({**ONE, "algorithm.advantage": "none", "filter.uniform": True}, "filter.uniform", "set it to false"),
        ({"filter.min_group": 9}, "filter.min_group", "use at most rollout.group_size, 8"),
        ({"filter.min_group": 1}, "filter.min_group", "dr_grpo has nothing to compare a lone attempt with"),
        (
            {"algorithm.advantage": "pass_at_k", "algorithm.pass_k": 9},
            "algorithm.pass_k",
            "at most rollout.group_size, 8",
        ),
        ({"algorithm.updates": 5, "pacing.groups_per_step": 4}, "algorithm.updates", "use at most 4"),
        ({"rewards.overlong_buffer": 33}, "rewards.overlong_buffer", "do not fit into rollout.max_tokens, 32"),
        ({"difficulty.easy_above": 0.5, "difficulty.hard_below": 0.5}, "difficulty.easy_above", "set it above"),
        ({"governor.min_lag": 3}, "governor.min_lag", "use at most 2"),
        ({"governor.enabled": True, "run.deterministic": True}, "governor.enabled", "holds the lag constant"),
        (
            {"filter.truncated": "mask", "kl.coefficient": 0.1, "kl.place": "reward"},
            "kl.place",
            "count for the baseline",
        ),
        (
            {"algorithm.advantage": "gdpo", "kl.coefficient": 0.1, "kl.place": "reward"},
            "kl.place",
            'gdpo looks at single rewards, of which the KL is none; use "loss"',
        ),
        (
            {"replay.fraction": 0.1, "pacing.groups_per_step": 8},
            "replay.fraction",
            "less than one; use at least 0.125",
        ),
    ],
)
def test_settings_of_the_mathematics_that_do_not_fit_are_refused(values: dict[str, Any], key: str, said: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert said in message


@pytest.mark.parametrize(
    "values",
    [
        {**ONE, "algorithm.advantage": "none"},
        {**ONE, "algorithm.preset": "ppo"},
        {**PPO, "algorithm.anchor": "rollout", "correction.weight": "none"},
        {**PPO, "correction.floor": 3, "correction.cap": 0, "algorithm.force": True},
        {"algorithm.advantage": "pass_at_k", "algorithm.pass_k": 8},
        {"filter.min_group": 8},
        {"rewards.overlong_buffer": 32},
        {"governor.min_lag": 2},
        {"learner.stream": True},
        {"replay.fraction": 0.5, "run.deterministic": True},
        {"algorithm.updates": 64},
        {"kl.coefficient": 0.1, "kl.estimator": "unbiased"},
        {"governor.enabled": False, "run.deterministic": True},
    ],
)
def test_settings_at_the_edge_of_these_rules_are_accepted(values: dict[str, Any]) -> None:
    resolve(make_config(values))


# ---------------------------------------------------------------------------------------------------- own functions

OWN = """
import outpace

@outpace.surrogate(anchors=("rollout",))
def loss(tokens: outpace.Tokens, *, cap: float = 7.0):
    return -tokens.advantages_N * tokens.ratio_N.clamp(max=cap)

@outpace.surrogate()
def greedy(tokens: outpace.Tokens, *, sharpness: float = 7.0):
    return tokens.logp_N

@outpace.surrogate()
def wrong(tokens: outpace.Tokens, *, cap: float = -1.0):
    return tokens.logp_N

@outpace.advantage(normalise="batch_std", needs_peers=False)
def reward(peers: outpace.Peers):
    return peers.returns_G

def bare(tokens):
    return tokens.logp_N
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_function_of_ones_own_brings_its_defaults_like_a_built_in_one(own: str) -> None:
    given = {"algorithm.surrogate": f"{own}:loss", "algorithm.advantage": f"{own}:reward"}
    algorithm = resolve(make_config(given)).algorithm
    assert (algorithm.cap, algorithm.anchor, algorithm.normalise) == (7.0, "rollout", "batch_std")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("greedy", "greedy takes sharpness, which is no setting of algorithm; name it after one of"),
        ("wrong", "wrong has the default cap = -1.0, which algorithm.cap does not allow"),
        ("bare", "put @outpace.surrogate above it"),
        ("reward", "put @outpace.surrogate above it"),
        ("los", "did you mean loss?"),
    ],
)
def test_a_function_of_ones_own_that_cannot_be_configured_is_refused(own: str, name: str, said: str) -> None:
    message = refusal({"algorithm.surrogate": f"{own}:{name}"})
    assert message.startswith("algorithm.surrogate: ")
    assert said in message


def test_a_name_with_line_breaks_is_refused_in_one_line() -> None:
    assert refusal({"algorithm.surrogate": "no\nsuch:thing"}).startswith("algorithm.surrogate: ")
