"""Refused combinations of algorithm settings; every message starts with the key to change."""

from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.algorithms.registry import POLICY_LOSSES
from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.errors import BadInput
from support import names

PPO = {"algorithm.surrogate": "ppo"}
ONE = {"rollout.group_size": 1}


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        resolve(make_config(values))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        (
            {"correction.weight": "token"},
            "correction.weight",
            'algorithm.anchor "none" proximal reinforce ppo',
        ),
        (
            {**PPO, "algorithm.anchor": "rollout", "correction.weight": "sequence"},
            "correction.weight",
            'algorithm.anchor "none" proximal approximate',
        ),
        (
            {"kl.coefficient": 0.1, "kl.place": "reward", "kl.estimator": "unbiased"},
            "kl.estimator",
            '"k1"',
        ),
    ],
)
def test_settings_that_would_apply_a_ratio_twice_are_refused(values: dict[str, Any], key: str, expected: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert names(message, expected)


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        (
            {"algorithm.surrogate": "importance"},
            "algorithm.surrogate",
            'truncated_is "token" pacing.max_lag 2 1 algorithm.force',
        ),
        (
            {"algorithm.surrogate": "importance", "correction.masks": ["sequence"]},
            "algorithm.surrogate",
            "pacing.max_lag 2",
        ),
        (
            {"algorithm.surrogate": "importance", "pacing.max_lag": 0, "replay.fraction": 0.5},
            "algorithm.surrogate",
            "pacing.max_lag replay.max_age 8",
        ),
        (
            {**PPO, "correction.cap": 0, "pacing.max_lag": 1, "replay.fraction": 0.5, "replay.max_age": 1},
            "correction.cap",
            'pacing.max_lag replay.max_age "token"',
        ),
        ({**PPO, "correction.cap": 0}, "correction.cap", 'pacing.max_lag 2 "token"'),
        ({**PPO, "correction.cap": 0, "correction.masks": ["sequence"]}, "correction.cap", 'pacing.max_lag 2 "token"'),
        (
            {**PPO, "correction.cap": 0, "correction.weight": "sequence", "correction.masks": ["token", "geometric"]},
            "correction.cap",
            'pacing.max_lag 2 "sequence"',
        ),
    ],
)
def test_unbounded_importance_weights_are_refused_for_stale_tokens(
    values: dict[str, Any], key: str, expected: str
) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert names(message, expected)
    resolve(make_config({**values, "algorithm.force": True}))


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm.surrogate": "importance", "pacing.max_lag": 1},
        {"algorithm.surrogate": "importance", "correction.masks": ["token"]},
        {**PPO, "correction.cap": 0, "pacing.max_lag": 1},
        {**PPO, "correction.cap": 0, "pacing.max_lag": 0, "replay.fraction": 0.5, "replay.max_age": 1},
        {**PPO, "correction.cap": 0, "correction.masks": ["token"]},
        {**PPO, "correction.cap": 0, "correction.weight": "sequence", "correction.masks": ["sequence"]},
    ],
)
def test_uncapped_importance_weights_are_accepted_at_low_lag_or_with_a_mask(values: dict[str, Any]) -> None:
    resolve(make_config(values))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"algorithm.normalise": "batch_std"}, "batch_std"),
        ({"algorithm.advantage": "gae"}, "gae"),
        ({"algorithm.advantage": "gdpo"}, "whiten_sequences"),
        ({"algorithm.updates": 2}, "updates"),
        ({"algorithm.passes": 2}, "updates"),
        ({"correction.masks": ["token", "m2po"]}, "m2po"),
        ({"kl.coefficient": 0.1, "kl.place": "reward"}, 'kl.place "reward"'),
    ],
)
def test_settings_that_need_the_whole_batch_disable_streaming(values: dict[str, Any], reason: str) -> None:
    assert resolve(make_config(values)).learner.stream is False
    message = refusal({**values, "learner.stream": True})
    assert message.startswith("learner.stream: ")
    assert names(message, f"{reason} false")


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"algorithm.cap": 3, **PPO}, "algorithm.cap", "truncated_is cispo"),
        ({"algorithm.clip_low": 0.1}, "algorithm.clip_low", "truncated_is dr_grpo ppo"),
        ({"algorithm.dual_clip": 3}, "algorithm.dual_clip", "ppo"),
        ({"algorithm.std_epsilon": 1e-3}, "algorithm.std_epsilon", "grpo"),
        ({"algorithm.pass_k": 2}, "algorithm.pass_k", "pass_at_k"),
        ({"algorithm.gamma": 0.9}, "algorithm.gamma", 'algorithm.credit "turn" "token"'),
        (
            {"algorithm.gae_lambda": 0.9, "algorithm.credit": "turn"},
            "algorithm.gae_lambda",
            'algorithm.advantage "gae"',
        ),
        ({"correction.cap": 3}, "correction.cap", "rollout"),
        ({"correction.floor": 0.1, **PPO, "correction.weight": "none"}, "correction.floor", "correction.weight"),
        ({"correction.token_low": 0.1}, "correction.token_low", "token correction.masks"),
        (
            {"correction.masks": ["token"], "correction.veto_below": 0.1},
            "correction.veto_below",
            "veto correction.masks",
        ),
        ({"kl.estimator": "k3"}, "kl.estimator", "kl.coefficient 0"),
        ({"kl.place": "loss"}, "kl.place", "kl.coefficient 0"),
        ({"kl.sync_every": 3}, "kl.sync_every", "kl.coefficient 0"),
        ({"critic.lr": 1e-3}, "critic.lr", 'algorithm.advantage "gae"'),
        ({"critic.shared": False}, "critic.shared", 'algorithm.advantage "gae"'),
        ({"filter.uniform": False, "filter.tolerance": 0.1}, "filter.tolerance", "filter.uniform true"),
        ({"difficulty.rest_epochs": 2}, "difficulty.rest_epochs", "difficulty.easy_above difficulty.hard_below"),
        ({"replay.max_age": 4}, "replay.max_age", "replay.fraction 0"),
        ({"replay.times": 4}, "replay.times", "replay.fraction 0"),
        ({"governor.enabled": False, "governor.patience": 4}, "governor.patience", "governor.enabled true"),
        ({"run.deterministic": True, "governor.ess_min": 0.4}, "governor.ess_min", "governor.enabled true"),
        ({"rewards.overlong_penalty": 2}, "rewards.overlong_penalty", "rewards.overlong_buffer 0"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(values: dict[str, Any], key: str, expected: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert names(message, expected)


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"algorithm.surrogate": "pppo"}, "algorithm.surrogate", "'pppo' ppo?"),
        ({"algorithm.surrogate": "PPO"}, "algorithm.surrogate", "'PPO' ppo?"),
        ({"algorithm.surrogate": "zzz"}, "algorithm.surrogate", "'zzz' reinforce ppo package.module:function"),
        ({"algorithm.advantage": "Dr-GRPO"}, "algorithm.advantage", "'Dr-GRPO' dr_grpo?"),
        ({"algorithm.normalise": "BatchStd"}, "algorithm.normalise", "'BatchStd' batch_std?"),
        ({"algorithm.advantage": "ppo"}, "algorithm.advantage", "ppo policy loss"),
        ({"algorithm.surrogate": "grpo"}, "algorithm.surrogate", "grpo advantage"),
        ({"algorithm.advantage": "my.py"}, "algorithm.advantage", "my.py:function"),
        ({"algorithm.surrogate": "__main__:f"}, "algorithm.surrogate", "script.py:f"),
        ({"algorithm.advantage": "a:b:c"}, "algorithm.advantage", "a:b:c module"),
        (
            {"algorithm.anchor": "proximal"},
            "algorithm.anchor",
            "truncated_is proximal rollout",
        ),
        ({"algorithm.advantage": "gdpo", "algorithm.credit": "turn"}, "algorithm.credit", "gdpo turn episode"),
        ({"algorithm.advantage": "grpo", "algorithm.credit": "token"}, "algorithm.credit", "grpo token episode turn"),
        ({"correction.masks": ["veto", "veto"]}, "correction.masks", "veto"),
        (
            {"algorithm.credit": "token", "algorithm.gamma": 0.0},
            "algorithm.gamma",
            'dr_grpo "turn" "none"',
        ),
        (
            {"correction.masks": ["geometric"], "correction.geometric_low": 1.0, "correction.geometric_high": 1.0},
            "correction.geometric_low",
            "1.0 correction.geometric_high",
        ),
        ({**PPO, "correction.floor": 2}, "correction.floor", "correction.cap 2.0"),
        (ONE, "rollout.group_size", '1 2 algorithm.advantage "none"'),
        ({**ONE, "algorithm.advantage": "none", "filter.uniform": True}, "filter.uniform", "false"),
        ({"filter.min_group": 9}, "filter.min_group", "9 rollout.group_size 8"),
        ({"filter.min_group": 1}, "filter.min_group", "dr_grpo 2"),
        (
            {"algorithm.advantage": "pass_at_k", "algorithm.pass_k": 9},
            "algorithm.pass_k",
            "9 rollout.group_size 8",
        ),
        ({"algorithm.updates": 5, "pacing.groups_per_step": 4}, "algorithm.updates", "4"),
        ({"rewards.overlong_buffer": 33}, "rewards.overlong_buffer", "33 rollout.max_tokens 32"),
        (
            {"difficulty.easy_above": 0.5, "difficulty.hard_below": 0.5},
            "difficulty.easy_above",
            "difficulty.hard_below 0.5",
        ),
        ({"governor.min_lag": 2}, "governor.min_lag", "2 pacing.max_lag 1 governor.enabled"),
        ({"governor.enabled": True, "pacing.max_lag": 0}, "governor.enabled", "pacing.max_lag 0"),
        ({"difficulty.easy_above": 0.9, "run.epochs": 1}, "difficulty.easy_above", "run.epochs 1"),
        ({"difficulty.hard_below": 0.1, "run.epochs": 1}, "difficulty.hard_below", "run.epochs 1"),
        ({**ONE, "algorithm.advantage": "none", "replay.fraction": 0.5}, "replay.fraction", "rollout.group_size 2"),
        ({"governor.enabled": True, "run.deterministic": True}, "governor.enabled", "run.deterministic"),
        (
            {"filter.truncated": "mask", "kl.coefficient": 0.1, "kl.place": "reward"},
            "kl.place",
            'baseline "loss"',
        ),
        (
            {"algorithm.advantage": "gdpo", "kl.coefficient": 0.1, "kl.place": "reward"},
            "kl.place",
            'gdpo "loss"',
        ),
        ({"replay.fraction": 0.1, "pacing.groups_per_step": 8}, "replay.fraction", "0.1 8 0.125"),
    ],
)
def test_invalid_or_conflicting_algorithm_settings_are_refused(values: dict[str, Any], key: str, expected: str) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert names(message, expected)


@pytest.mark.parametrize("name", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("bound", "value"), [("low", 1.2), ("high", 0.9)])
def test_a_mask_that_would_reject_on_policy_data_is_refused(name: str, bound: str, value: float) -> None:
    message = refusal({"correction.masks": [name], f"correction.{name}_{bound}": value})
    what = "tokens" if name == "token" else "sequences"
    assert message.startswith(f"correction.{name}_{bound}: ")
    assert names(message, f"{value} {what} 1")


def test_a_veto_of_on_policy_sequences_is_refused() -> None:
    message = refusal({"correction.masks": ["veto"], "correction.veto_below": 1.2})
    assert message.startswith("correction.veto_below: ")
    assert names(message, "1.2 sequences 1")


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
        {"governor.min_lag": 1},
        {"governor.min_lag": 0, "pacing.max_lag": 1},
        {"pacing.max_lag": 0},
        {"difficulty.easy_above": 0.9, "run.epochs": 2},
        {"difficulty.easy_above": 0.9, "run.steps": 3},
        {"rollout.group_size": 2, "replay.fraction": 0.5},
        {"correction.masks": ["token", "veto"], "correction.token_low": 1.0, "correction.veto_below": 1.0},
        {"learner.stream": True},
        {"replay.fraction": 0.5, "run.deterministic": True},
        {"algorithm.updates": 64},
        {"kl.coefficient": 0.1, "kl.estimator": "unbiased"},
        {"governor.enabled": False, "run.deterministic": True},
    ],
)
def test_algorithm_settings_at_the_limits_of_the_rules_are_accepted(values: dict[str, Any]) -> None:
    resolve(make_config(values))


# --------------------------------------------------------------------------------------------------- user functions

OWN = """
import outpace

@outpace.policy_loss(anchors=("rollout",))
def loss(tokens: outpace.Tokens, *, cap: float = 7.0):
    return -tokens.advantages_N * tokens.ratio_N.clamp(max=cap)

@outpace.policy_loss()
def greedy(tokens: outpace.Tokens, *, sharpness: float = 7.0):
    return tokens.logp_N

@outpace.policy_loss()
def wrong(tokens: outpace.Tokens, *, cap: float = -1.0):
    return tokens.logp_N

@outpace.advantage(normalise="batch_std", needs_peers=False)
def reward(peers: outpace.GroupReturns):
    return peers.returns_G

@outpace.advantage
def unadorned(peers: outpace.GroupReturns):
    return peers.returns_G

@outpace.policy_loss
def plain(tokens: outpace.Tokens, *, cap: float = 7.0):
    return tokens.logp_N

@outpace.normalizer
def batch(signal: outpace.BatchAdvantages):
    return signal.advantages

@outpace.advantage(parts=True, credits=("episode", "turn"))
def single(peers: outpace.GroupReturns):
    return peers.returns_G

def bare(tokens):
    return tokens.logp_N
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_user_function_brings_its_defaults_like_a_built_in_one(own: str) -> None:
    given = {"algorithm.surrogate": f"{own}:loss", "algorithm.advantage": f"{own}:reward"}
    algorithm = resolve(make_config(given)).algorithm
    assert (algorithm.cap, algorithm.anchor, algorithm.normalise) == (7.0, "rollout", "batch_std")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("greedy", "greedy sharpness cap clip_low"),
        ("wrong", "wrong algorithm.cap -1.0"),
        ("bare", "own.py:bare @outpace.policy_loss"),
        ("reward", "own.py:reward advantage"),
        ("batch", "own.py:batch normalizer"),
        ("los", "own.py:los loss?"),
    ],
)
def test_a_user_function_that_cannot_be_configured_is_refused(own: str, name: str, expected: str) -> None:
    message = refusal({"algorithm.surrogate": f"{own}:{name}"})
    assert message.startswith("algorithm.surrogate: ")
    assert names(message, expected)


def test_a_registered_function_with_a_keyword_that_is_not_a_setting_is_refused() -> None:
    @outpace.policy_loss
    def scripted(tokens: outpace.Tokens, *, sharpness: float = 7.0) -> torch.Tensor:
        return tokens.logp_N * sharpness

    try:
        message = refusal({"algorithm.surrogate": "scripted"})
        assert message.startswith("algorithm.surrogate: ")
        assert names(message, "scripted sharpness")
    finally:
        del POLICY_LOSSES.own["scripted"]


def test_a_name_with_line_breaks_is_refused_in_one_line() -> None:
    assert refusal({"algorithm.surrogate": "no\nsuch:thing"}).startswith("algorithm.surrogate: ")


def test_a_decorator_needs_no_parentheses(own: str) -> None:
    given = {"surrogate": f"{own}:plain", "advantage": f"{own}:unadorned", "normalise": f"{own}:batch"}
    chosen = resolve(make_config({"algorithm": given})).algorithm
    assert (chosen.cap, chosen.anchor, chosen.credit) == (7.0, "proximal", "episode")
    assert {key: getattr(chosen, key) for key in given} == given


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        ("policy_loss(anchors=())", "anchors proximal rollout approximate"),
        ("policy_loss(anchors=('sampler',))", "anchors 'sampler' proximal rollout approximate"),
        ("policy_loss(anchors='rollout')", "anchors 'rollout' tuple"),
        ("policy_loss(anchors=([],))", "anchors [] proximal"),
        ("policy_loss(aggregation='mean')", "aggregation 'mean' token_mean"),
        ("policy_loss(masks=('vetoo',))", "masks 'vetoo' token"),
        ("advantage(credits=())", "credits episode turn token"),
        ("advantage(credits=('step',))", "credits 'step' episode"),
        ("advantage(credits='turn')", "credits 'turn' tuple"),
        ("advantage(credits=('episode', 'token'))", 'credits "token" additive=True'),
    ],
)
def test_invalid_decorator_arguments_are_refused(tmp_path: Path, decorator: str, expected: str) -> None:
    file = tmp_path / "odd.py"
    file.write_text(f"import outpace\n@outpace.{decorator}\ndef mine(x):\n    return x\n")
    setting = "algorithm.surrogate" if decorator.startswith("policy_loss") else "algorithm.advantage"
    message = refusal({setting: f"{file}:mine"})
    assert message.startswith(f"{setting}: ")
    assert names(message, f"mine {expected}")


def test_a_user_advantage_function_cannot_have_a_critic(tmp_path: Path) -> None:
    file = tmp_path / "critic.py"
    file.write_text("import outpace\n@outpace.advantage(critic=True)\ndef mine(x):\n    return x\n")
    assert "unexpected keyword argument 'critic'" in refusal({"algorithm.advantage": f"{file}:mine"})


def test_an_advantage_of_single_rewards_does_not_support_turn_credit(own: str) -> None:
    given = {"algorithm.advantage": f"{own}:single"}
    message = refusal({**given, "algorithm.credit": "turn"})
    assert message.startswith("algorithm.credit: ")
    assert names(message, 'single "episode"')
    resolve(make_config(given))


def test_resolving_makes_paths_of_function_files_absolute(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "algorithm": {"surrogate": "own.py:plain", "advantage": "./own.py:unadorned", "normalise": "own.py:batch"},
        "rollout": {"function": "sub/../own.py:bare"},
        "rewards": {"functions": ["own.py:bare", "number", "package.module:function"]},
    }
    config = resolve(make_config(given))
    assert config.algorithm.surrogate == f"{own}:plain"
    assert config.algorithm.advantage == f"{own}:unadorned"
    assert config.algorithm.normalise == f"{own}:batch"
    assert config.rollout.function == f"{tmp_path}/sub/../own.py:bare"
    assert config.rewards.functions == [f"{own}:bare", "number", "package.module:function"]
    assert resolve(config) == config
