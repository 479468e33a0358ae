"""Refused combinations of algorithm settings; every message starts with the key to change."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.algorithms.registry import POLICY_LOSSES
from outpace.config.load import dump_toml, make_config, user_settings
from outpace.config.validation import resolve
from outpace.errors import BadInput
from support import names

PPO = {"policy_loss.name": "ppo"}
FILL = {"replay.fraction": 0.5, "replay.mode": "fill"}
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
            'policy_loss.old_policy "none" reinforce ppo',
        ),
        (
            {**PPO, "policy_loss.old_policy": "rollout", "correction.weight": "sequence"},
            "correction.weight",
            'policy_loss.old_policy "none" recomputed interpolated',
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
            {"policy_loss.name": "importance"},
            "policy_loss.name",
            'truncated_is "token" pacing.max_lag 4 1 algorithm.allow_unbounded',
        ),
        (
            {"policy_loss.name": "importance", "correction.masks": ["sequence"]},
            "policy_loss.name",
            "pacing.max_lag 4",
        ),
        (
            {"policy_loss.name": "importance", "pacing.max_lag": 0, "replay.fraction": 0.5},
            "policy_loss.name",
            "pacing.max_lag replay.max_age 8",
        ),
        (
            {**PPO, "correction.cap": 0, "pacing.max_lag": 1, "replay.fraction": 0.5, "replay.max_age": 1},
            "correction.cap",
            'pacing.max_lag replay.max_age "token"',
        ),
        ({**PPO, "correction.cap": 0}, "correction.cap", 'pacing.max_lag 4 "token"'),
        ({**PPO, "correction.cap": 0, "correction.masks": ["sequence"]}, "correction.cap", 'pacing.max_lag 4 "token"'),
        (
            {**PPO, "correction.cap": 0, "correction.weight": "sequence", "correction.masks": ["token", "geometric"]},
            "correction.cap",
            'pacing.max_lag 4 "sequence"',
        ),
    ],
)
def test_unbounded_importance_weights_are_refused_for_stale_tokens(
    values: dict[str, Any], key: str, expected: str
) -> None:
    message = refusal(values)
    assert message.startswith(f"{key}: ")
    assert names(message, expected)
    resolve(make_config({**values, "algorithm.allow_unbounded": True}))


@pytest.mark.parametrize(
    "values",
    [
        {"policy_loss.name": "importance", "pacing.max_lag": 1},
        {"policy_loss.name": "importance", "correction.masks": ["token"]},
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
        ({"advantage.normalizer": "batch_std"}, "batch_std"),
        ({"advantage.name": "gae"}, "gae"),
        ({"advantage.name": "gdpo"}, "whiten_sequences"),
        ({"algorithm.minibatches": 2}, "updates"),
        ({"algorithm.epochs_per_batch": 2}, "updates"),
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
        ({"policy_loss.cap": 3, **PPO}, "policy_loss.cap", "truncated_is cispo"),
        ({"policy_loss.clip_low": 0.1}, "policy_loss.clip_low", "truncated_is cap ppo"),
        ({"policy_loss.dual_clip": 3}, "policy_loss.dual_clip", "ppo"),
        ({"advantage.std_epsilon": 1e-3}, "advantage.std_epsilon", "grpo"),
        ({"advantage.k": 2}, "advantage.k", "pass_at_k"),
        ({"advantage.gamma": 0.9}, "advantage.gamma", 'advantage.credit "turn" "token"'),
        (
            {"advantage.gae_lambda": 0.9, "advantage.credit": "turn"},
            "advantage.gae_lambda",
            "dr_grpo none gae",
        ),
        ({"correction.cap": 3}, "correction.cap", "weight none opsm_delta"),
        ({"correction.floor": 0.1, **PPO, "correction.weight": "none"}, "correction.floor", "weight none"),
        ({"correction.token_low": 0.1}, "correction.token_low", "token masks opsm"),
        (
            {"correction.masks": ["token"], "correction.veto_below": 0.1},
            "correction.veto_below",
            "veto masks token_low token_high",
        ),
        ({"kl.estimator": "k3"}, "kl.estimator", "kl.coefficient 0"),
        ({"kl.place": "loss"}, "kl.place", "kl.coefficient 0"),
        ({"kl.sync_every": 3}, "kl.sync_every", "kl.coefficient 0"),
        ({"critic.lr": 1e-3}, "critic.lr", 'advantage.name "gae"'),
        ({"critic.shared": False}, "critic.shared", 'advantage.name "gae"'),
        ({"filter.uniform": False, "filter.tolerance": 0.1}, "filter.tolerance", "filter.uniform false"),
        ({"difficulty.rest_epochs": 2}, "difficulty.rest_epochs", "difficulty.easy_above difficulty.hard_below"),
        ({"replay.max_age": 4}, "replay.max_age", "replay.fraction 0"),
        ({"replay.times": 4}, "replay.times", "replay.fraction 0"),
        ({"replay.mode": "fill"}, "replay.mode", "replay.fraction 0"),
        ({"reroll.after_steps": 4}, "reroll.after_steps", "reroll.max_times 0"),
        ({"reroll.solved_above": 0.5}, "reroll.solved_above", "reroll.max_times 0"),
        ({"reroll.max_waiting": 4}, "reroll.max_waiting", "reroll.max_times 0"),
        ({"governor.enabled": False, "governor.patience": 4}, "governor.patience", "governor.enabled false"),
        ({"run.deterministic": True, "governor.ess_min": 0.4}, "governor.ess_min", "governor.enabled false"),
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
        ({"policy_loss.name": "pppo"}, "policy_loss.name", "'pppo' ppo?"),
        ({"policy_loss.name": "PPO"}, "policy_loss.name", "'PPO' ppo?"),
        ({"policy_loss.name": "zzz"}, "policy_loss.name", "'zzz' reinforce ppo package.module:name"),
        ({"advantage.name": "Dr-GRPO"}, "advantage.name", "'Dr-GRPO' dr_grpo?"),
        ({"advantage.normalizer": "BatchStd"}, "advantage.normalizer", "'BatchStd' batch_std?"),
        ({"advantage.name": "ppo"}, "advantage.name", "ppo policy loss"),
        ({"policy_loss.name": "grpo"}, "policy_loss.name", "grpo advantage"),
        ({"advantage.name": "my.py"}, "advantage.name", "my.py:name"),
        ({"policy_loss.name": "__main__:f"}, "policy_loss.name", "script.py:f"),
        ({"advantage.name": "a:b:c"}, "advantage.name", "a:b:c module"),
        (
            {"policy_loss.old_policy": "recomputed"},
            "policy_loss.old_policy",
            "truncated_is recomputed rollout",
        ),
        ({"advantage.name": "gdpo", "advantage.credit": "turn"}, "advantage.credit", "gdpo turn episode"),
        ({"advantage.name": "grpo", "advantage.credit": "token"}, "advantage.credit", "grpo token episode turn"),
        ({"correction.masks": ["veto", "veto"]}, "correction.masks", "veto"),
        (
            {"advantage.credit": "token", "advantage.gamma": 0.0},
            "advantage.gamma",
            'dr_grpo "turn" "none"',
        ),
        (
            {"correction.masks": ["geometric"], "correction.geometric_low": 1.0, "correction.geometric_high": 1.0},
            "correction.geometric_low",
            "1.0 correction.geometric_high",
        ),
        ({**PPO, "correction.floor": 2}, "correction.floor", "correction.cap 2.0"),
        (ONE, "rollout.group_size", '1 2 advantage.name "none"'),
        ({**ONE, "advantage.name": "none", "filter.uniform": True}, "filter.uniform", "false"),
        ({"filter.min_group": 9}, "filter.min_group", "9 rollout.group_size 8"),
        ({"filter.min_group": 1}, "filter.min_group", "dr_grpo 2"),
        (
            {"advantage.name": "pass_at_k", "advantage.k": 9},
            "advantage.k",
            "9 rollout.group_size 8",
        ),
        ({"algorithm.minibatches": 5, "pacing.groups_per_step": 4}, "algorithm.minibatches", "4"),
        ({"rewards.overlong_buffer": 33}, "rewards.overlong_buffer", "33 rollout.max_tokens 32"),
        (
            {"difficulty.easy_above": 0.5, "difficulty.hard_below": 0.5},
            "difficulty.easy_above",
            "difficulty.hard_below 0.5",
        ),
        ({"governor.min_lag": 4}, "governor.min_lag", "4 pacing.max_lag 3 governor.enabled"),
        ({"governor.enabled": True, "pacing.max_lag": 0}, "governor.enabled", "pacing.max_lag 0"),
        ({"difficulty.easy_above": 0.9, "run.epochs": 1}, "difficulty.easy_above", "run.epochs 1"),
        ({"difficulty.hard_below": 0.1, "run.epochs": 1}, "difficulty.hard_below", "run.epochs 1"),
        ({**ONE, "advantage.name": "none", "replay.fraction": 0.5}, "replay.fraction", "rollout.group_size 2"),
        ({"governor.enabled": True, "run.deterministic": True}, "governor.enabled", "run.deterministic"),
        (
            {"filter.truncated": "mask", "kl.coefficient": 0.1, "kl.place": "reward"},
            "kl.place",
            'baseline "loss"',
        ),
        (
            {"advantage.name": "gdpo", "kl.coefficient": 0.1, "kl.place": "reward"},
            "kl.place",
            'gdpo "loss"',
        ),
        ({"replay.fraction": 0.1, "pacing.groups_per_step": 8}, "replay.fraction", "0.1 8 0.125"),
        ({**FILL, "filter.uniform": False}, "replay.mode", "filter.uniform"),
        ({**FILL, "algorithm.minibatches": 33}, "algorithm.minibatches", "replay.mode 32 replay.fraction"),
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
    assert message.startswith(f"correction.{name}_{bound}: ")
    assert names(message, f"{value} {name} 1")


def test_a_veto_of_on_policy_sequences_is_refused() -> None:
    message = refusal({"correction.masks": ["veto"], "correction.veto_below": 1.2})
    assert message.startswith("correction.veto_below: ")
    assert names(message, "1.2 veto 1")


@pytest.mark.parametrize(
    "values",
    [
        {**ONE, "advantage.name": "none"},
        {**ONE, "algorithm.preset": "ppo"},
        {**PPO, "policy_loss.old_policy": "rollout", "correction.weight": "none"},
        {**PPO, "correction.floor": 3, "correction.cap": 0, "algorithm.allow_unbounded": True},
        {"advantage.name": "pass_at_k", "advantage.k": 8},
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
        {**FILL, "run.deterministic": True, "algorithm.minibatches": 32},
        {"replay.fraction": 0.5, "algorithm.minibatches": 33},
        {"reroll.max_times": 2, "run.deterministic": True},
        {"algorithm.minibatches": 64},
        {"kl.coefficient": 0.1, "kl.estimator": "unbiased"},
        {"governor.enabled": False, "run.deterministic": True},
    ],
)
def test_algorithm_settings_at_the_limits_of_the_rules_are_accepted(values: dict[str, Any]) -> None:
    resolve(make_config(values))


# --------------------------------------------------------------------------------------------------- user functions

OWN = """
import outpace

@outpace.policy_loss(old_policies=("rollout",))
def loss(tokens: outpace.Tokens, *, cap: float = 7.0):
    return -tokens.advantages_N * tokens.ratio_N.clamp(max=cap)

@outpace.policy_loss()
def greedy(tokens: outpace.Tokens, *, sharpness: float = 7.0):
    return tokens.logp_N

@outpace.policy_loss()
def wrong(tokens: outpace.Tokens, *, cap: int = 1.5):
    return tokens.logp_N

@outpace.policy_loss()
def taken(tokens: outpace.Tokens, *, aggregation: str = "mean"):
    return tokens.logp_N

@outpace.advantage(normalizer="batch_std", needs_peers=False)
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
    given = {"policy_loss.name": f"{own}:loss", "advantage.name": f"{own}:reward"}
    config = resolve(make_config(given))
    assert config.policy_loss.model_extra == {"cap": 7.0}
    assert (config.policy_loss.old_policy, config.advantage.normalizer) == ("rollout", "batch_std")


@pytest.mark.parametrize("value", [3, 0.5, "0.5"])
def test_a_user_function_gets_settings_from_its_keyword_arguments(own: str, value: Any) -> None:
    config = resolve(make_config({"policy_loss": {"name": f"{own}:greedy", "sharpness": value}}))
    assert config.policy_loss.model_extra == {"sharpness": float(value)}
    assert resolve(make_config(tomllib.loads(dump_toml(config)))) == config


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("sharpness", "high", "number 'high' greedy"),
        ("sharpness", None, "none greedy"),
        ("cap", 2.0, "truncated_is greedy sharpness"),
        ("shrp", 1, "sharpness?"),
    ],
)
def test_a_setting_that_a_user_function_does_not_take_is_refused(own: str, key: str, value: Any, expected: str) -> None:
    message = refusal({"policy_loss": {"name": f"{own}:greedy", key: value}})
    assert message.startswith(f"policy_loss.{key}: ")
    assert names(message, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrong", "wrong cap 1.5"),
        ("taken", "taken aggregation [policy_loss]"),
        ("bare", "own.py:bare @outpace.policy_loss"),
        ("reward", "own.py:reward advantage"),
        ("batch", "own.py:batch normalizer"),
        ("los", "own.py:los loss?"),
    ],
)
def test_a_user_function_that_cannot_be_configured_is_refused(own: str, name: str, expected: str) -> None:
    message = refusal({"policy_loss.name": f"{own}:{name}"})
    assert message.startswith("policy_loss.name: ")
    assert names(message, expected)


def test_a_function_registered_by_a_script_gets_settings_from_its_keyword_arguments() -> None:
    @outpace.policy_loss
    def scripted(tokens: outpace.Tokens, *, sharpness: float = 7.0) -> torch.Tensor:
        return tokens.logp_N * sharpness

    try:
        config = resolve(make_config({"policy_loss.name": "scripted"}))
        assert config.policy_loss.model_extra == {"sharpness": 7.0}
    finally:
        del POLICY_LOSSES.registered["scripted"]


def test_a_name_with_line_breaks_is_refused_in_one_line() -> None:
    assert refusal({"policy_loss.name": "no\nsuch:thing"}).startswith("policy_loss.name: ")


def test_a_decorator_needs_no_parentheses(own: str) -> None:
    given = {"policy_loss": {"name": f"{own}:plain"}}
    given["advantage"] = {"name": f"{own}:unadorned", "normalizer": f"{own}:batch"}
    config = resolve(make_config(given))
    assert (config.policy_loss.model_extra, config.policy_loss.old_policy) == ({"cap": 7.0}, "recomputed")
    assert config.advantage.credit == "episode"
    assert {**user_settings(config), **given} == user_settings(config)


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        ("policy_loss(old_policies=())", "old_policies recomputed rollout interpolated"),
        ("policy_loss(old_policies=('sampler',))", "old_policies 'sampler' recomputed rollout interpolated"),
        ("policy_loss(old_policies='rollout')", "old_policies 'rollout' tuple"),
        ("policy_loss(old_policies=([],))", "old_policies [] recomputed"),
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
    setting = "policy_loss.name" if decorator.startswith("policy_loss") else "advantage.name"
    message = refusal({setting: f"{file}:mine"})
    assert message.startswith(f"{setting}: ")
    assert names(message, f"mine {expected}")


def test_a_user_advantage_function_cannot_have_a_critic(tmp_path: Path) -> None:
    file = tmp_path / "critic.py"
    file.write_text("import outpace\n@outpace.advantage(critic=True)\ndef mine(x):\n    return x\n")
    assert "unexpected keyword argument 'critic'" in refusal({"advantage.name": f"{file}:mine"})


def test_an_advantage_of_single_rewards_does_not_support_turn_credit(own: str) -> None:
    given = {"advantage.name": f"{own}:single"}
    message = refusal({**given, "advantage.credit": "turn"})
    assert message.startswith("advantage.credit: ")
    assert names(message, 'single "episode"')
    resolve(make_config(given))


def test_resolving_makes_paths_of_function_files_absolute(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "policy_loss": {"name": "own.py:plain"},
        "advantage": {"name": "./own.py:unadorned", "normalizer": "own.py:batch"},
        "rollout": {"function": "sub/../own.py:bare"},
        "rewards": {"functions": ["own.py:bare", "number", "package.module:function"]},
    }
    config = resolve(make_config(given))
    assert config.policy_loss.name == f"{own}:plain"
    assert config.advantage.name == f"{own}:unadorned"
    assert config.advantage.normalizer == f"{own}:batch"
    assert config.rollout.function == f"{tmp_path}/sub/../own.py:bare"
    assert config.rewards.functions == [f"{own}:bare", "number", "package.module:function"]
    assert resolve(config) == config
