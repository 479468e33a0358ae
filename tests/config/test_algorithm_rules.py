"""Combinations of the mathematics that are refused, each with the key to change at the start of the line."""

from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.algorithms.registry import SURROGATES
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
        (
            {"correction.weight": "token"},
            "correction.weight",
            'twice; use "none", or a surrogate with the anchor proximal, such as reinforce or ppo',
        ),
        (
            {**PPO, "algorithm.anchor": "rollout", "correction.weight": "sequence"},
            "correction.weight",
            'twice; use "none", or the anchor proximal or approximate',
        ),
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
            'use truncated_is, add the mask "token", set pacing.max_lag to 1, or set algorithm.force',
        ),
        (
            {"algorithm.surrogate": "importance", "correction.masks": ["sequence"]},
            "algorithm.surrogate",
            "pacing.max_lag allows tokens 2 versions old",
        ),
        (
            {"algorithm.surrogate": "importance", "pacing.max_lag": 0, "replay.fraction": 0.5},
            "algorithm.surrogate",
            "pacing.max_lag and replay.max_age allow tokens 0 + 8 versions old",
        ),
        (
            {**PPO, "correction.cap": 0, "pacing.max_lag": 1, "replay.fraction": 0.5, "replay.max_age": 1},
            "correction.cap",
            'allow tokens 1 + 1 versions old; set a cap, add the mask "token", lower the two to 1 in all',
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
        {**PPO, "correction.cap": 0, "pacing.max_lag": 0, "replay.fraction": 0.5, "replay.max_age": 1},
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
        (
            {"correction.cap": 3},
            "correction.cap",
            "there is no weight to truncate with the anchor rollout; leave this out",
        ),
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
        ({"algorithm.surrogate": "pppo"}, "algorithm.surrogate", "no surrogate is called 'pppo'; did you mean ppo?"),
        ({"algorithm.surrogate": "PPO"}, "algorithm.surrogate", "did you mean ppo?"),
        ({"algorithm.surrogate": "zzz"}, "algorithm.surrogate", "called 'zzz'; there are reinforce"),
        ({"algorithm.advantage": "Dr-GRPO"}, "algorithm.advantage", "did you mean dr_grpo?"),
        ({"algorithm.normalise": "BatchStd"}, "algorithm.normalise", "did you mean batch_std?"),
        ({"algorithm.advantage": "ppo"}, "algorithm.advantage", "ppo is a surrogate, not an advantage estimator"),
        ({"algorithm.surrogate": "grpo"}, "algorithm.surrogate", "grpo is an advantage estimator, not a surrogate"),
        ({"algorithm.advantage": "my.py"}, "algorithm.advantage", "name the function too: my.py:function"),
        ({"algorithm.surrogate": "__main__:f"}, "algorithm.surrogate", "name the script's file: script.py:f"),
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
            {"algorithm.credit": "token", "algorithm.gamma": 0.0},
            "algorithm.gamma",
            'leave this out, or use "turn" credit, the estimator "none"',
        ),
        (
            {"correction.masks": ["geometric"], "correction.geometric_low": 1.0, "correction.geometric_high": 1.0},
            "correction.geometric_low",
            "1.0 is not below correction.geometric_high",
        ),
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
        ({"governor.min_lag": 2}, "governor.min_lag", "use at most 1, or governor.enabled = false"),
        ({"governor.enabled": True, "pacing.max_lag": 0}, "governor.enabled", "there is no lag to lower"),
        ({"difficulty.easy_above": 0.9, "run.epochs": 1}, "difficulty.easy_above", "no task comes again"),
        ({"difficulty.hard_below": 0.1, "run.epochs": 1}, "difficulty.hard_below", "no task comes again"),
        (
            {**ONE, "algorithm.advantage": "none", "replay.fraction": 0.5},
            "replay.fraction",
            "a group of one attempt has no spread",
        ),
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


@pytest.mark.parametrize("name", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("bound", "value", "advice"), [("low", 1.2, "most"), ("high", 0.9, "least")])
def test_a_mask_that_would_reject_what_is_on_policy_is_refused(
    name: str, bound: str, value: float, advice: str
) -> None:
    message = refusal({"correction.masks": [name], f"correction.{name}_{bound}": value})
    what = "tokens" if name == "token" else "sequences"
    said = f"{value} would reject {what} on policy, whose ratio is 1; use at {advice} 1"
    assert message == f"correction.{name}_{bound}: {said}"


def test_a_veto_of_what_is_on_policy_is_refused() -> None:
    message = refusal({"correction.masks": ["veto"], "correction.veto_below": 1.2})
    assert message.startswith("correction.veto_below: 1.2 would reject sequences on policy")


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

@outpace.advantage
def unadorned(peers: outpace.Peers):
    return peers.returns_G

@outpace.surrogate
def plain(tokens: outpace.Tokens, *, cap: float = 7.0):
    return tokens.logp_N

@outpace.normaliser
def batch(signal: outpace.BatchSignal):
    return signal.advantages

@outpace.advantage(parts=True, credits=("episode", "turn"))
def single(peers: outpace.Peers):
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
        ("reward", "own.py:reward is an advantage estimator, not a surrogate"),
        ("batch", "own.py:batch is a normaliser, not a surrogate"),
        ("los", "did you mean loss?"),
    ],
)
def test_a_function_of_ones_own_that_cannot_be_configured_is_refused(own: str, name: str, said: str) -> None:
    message = refusal({"algorithm.surrogate": f"{own}:{name}"})
    assert message.startswith("algorithm.surrogate: ")
    assert said in message


def test_a_registered_function_with_a_keyword_that_is_no_setting_is_refused() -> None:
    @outpace.surrogate
    def scripted(tokens: outpace.Tokens, *, sharpness: float = 7.0) -> torch.Tensor:
        return tokens.logp_N * sharpness

    try:
        assert refusal({"algorithm.surrogate": "scripted"}).startswith("algorithm.surrogate: scripted takes sharpness")
    finally:
        del SURROGATES.own["scripted"]


def test_a_name_with_line_breaks_is_refused_in_one_line() -> None:
    assert refusal({"algorithm.surrogate": "no\nsuch:thing"}).startswith("algorithm.surrogate: ")


def test_a_decorator_needs_no_parentheses(own: str) -> None:
    given = {"surrogate": f"{own}:plain", "advantage": f"{own}:unadorned", "normalise": f"{own}:batch"}
    chosen = resolve(make_config({"algorithm": given})).algorithm
    assert (chosen.cap, chosen.anchor, chosen.credit) == (7.0, "proximal", "episode")
    assert {key: getattr(chosen, key) for key in given} == given


@pytest.mark.parametrize(
    ("decorator", "said"),
    [
        ("surrogate(anchors=())", "has no anchors; give at least one of proximal, rollout, approximate"),
        ("surrogate(anchors=('sampler',))", "has anchors of 'sampler'; there are proximal, rollout, approximate"),
        ("surrogate(anchors='rollout')", "has anchors = 'rollout'; give a tuple of"),
        ("surrogate(anchors=([],))", "has anchors of []"),
        ("surrogate(aggregation='mean')", "has aggregation of 'mean'; there are token_mean"),
        ("surrogate(masks=('vetoo',))", "has masks of 'vetoo'; there are token"),
        ("advantage(credits=())", "has no credits; give at least one of episode, turn, token"),
        ("advantage(credits=('step',))", "has credits of 'step'"),
        ("advantage(credits='turn')", "has credits = 'turn'; give a tuple of"),
        ("advantage(credits=('episode', 'token'))", 'has "token" among its credits, which needs'),
    ],
)
def test_arguments_of_a_decorator_that_do_not_exist_are_refused(tmp_path: Path, decorator: str, said: str) -> None:
    file = tmp_path / "odd.py"
    file.write_text(f"import outpace\n@outpace.{decorator}\ndef mine(x):\n    return x\n")
    setting = f"algorithm.{decorator.partition('(')[0]}"
    assert refusal({setting: f"{file}:mine"}).startswith(f"{setting}: mine {said}")


def test_no_estimator_of_ones_own_has_a_critic(tmp_path: Path) -> None:
    file = tmp_path / "critic.py"
    file.write_text("import outpace\n@outpace.advantage(critic=True)\ndef mine(x):\n    return x\n")
    assert "unexpected keyword argument 'critic'" in refusal({"algorithm.advantage": f"{file}:mine"})


def test_single_rewards_have_no_credit_by_turn(own: str) -> None:
    given = {"algorithm.advantage": f"{own}:single"}
    assert refusal({**given, "algorithm.credit": "turn"}).endswith('which are of whole episodes; use "episode"')
    resolve(make_config(given))


def test_a_file_of_functions_is_named_from_the_root_once_resolved(
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
