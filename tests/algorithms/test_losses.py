from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from algorithms import dense, reference
from algorithms.reference import FROM_ROLLOUT, POLICY_LOSS_CASES, Pass, Token, lay_out, passes
from outpace.algorithms import POLICY_LOSSES
from outpace.algorithms.losses import Tokens, aggregation_weights
from outpace.config.algorithm import function_parameters
from support import examples

every_policy_loss = pytest.mark.parametrize(("name", "knobs"), POLICY_LOSS_CASES)


def loss_of(name: str, tokens: Tokens, knobs: dict[str, Any]) -> Tensor:
    loss: Tensor = POLICY_LOSSES.built_in[name].function(tokens, **knobs)
    return loss


def loss_and_gradient(name: str, sequences: Pass, knobs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tokens = lay_out(sequences)
    loss_N = loss_of(name, tokens, knobs)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), tokens.logp_N)
    return loss_N.detach(), gradient_N


def with_old_policy(name: str, sequences: Pass) -> Pass:
    return reference.on_rollout(sequences) if name in FROM_ROLLOUT else sequences


def test_every_built_in_policy_loss_is_tested_here_and_its_parameters_are_config_keys() -> None:
    assert {name for name, _ in POLICY_LOSS_CASES} == set(POLICY_LOSSES.built_in)
    for registration in POLICY_LOSSES.built_in.values():
        assert set(registration.parameters) <= set(function_parameters("policy_loss"))


def test_policy_losses_declare_their_old_policy_bounds_and_aggregation() -> None:
    found = POLICY_LOSSES.built_in
    assert {name for name in found if POLICY_LOSSES.find(name).old_policies == ("rollout",)} == set(FROM_ROLLOUT)
    assert [name for name in found if POLICY_LOSSES.find(name).unbounded] == ["importance"]
    by_sequence = {name for name in found if POLICY_LOSSES.find(name).aggregation == "seq_mean_token_mean"}
    assert by_sequence == {"gspo", "gmpo", "sapo"}


@every_policy_loss
@examples(50)
@given(sequences=passes)
def test_losses_match_the_token_by_token_reference(name: str, knobs: dict[str, Any], sequences: Pass) -> None:
    sequences = with_old_policy(name, sequences)
    expected_N = reference.by_sequence(getattr(reference, name), sequences, **knobs)
    loss_N, _ = loss_and_gradient(name, sequences, knobs)
    np.testing.assert_allclose(loss_N, expected_N, rtol=1e-9, atol=1e-12)


@every_policy_loss
@examples(50)
@given(sequences=passes)
def test_gradients_match_autograd_of_the_plain_formula(name: str, knobs: dict[str, Any], sequences: Pass) -> None:
    sequences = with_old_policy(name, sequences)
    padded = dense.pad(sequences)
    total = (dense.POLICY_LOSSES[name](padded, **knobs) * padded.real_S_T).sum()
    _, gradient_N = loss_and_gradient(name, sequences, knobs)
    np.testing.assert_allclose(gradient_N, dense.gradient(total, padded), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
@examples(50)
@given(sequences=passes)
def test_with_one_advantage_per_sequence_the_token_loss_equals_the_sequence_loss(name: str, sequences: Pass) -> None:
    knobs = {"clip_low": 0.25, "clip_high": 0.35}
    sequences = reference.with_one_advantage([sequence for sequence in sequences if sequence])
    tokens, padded = lay_out(sequences), dense.pad(sequences)
    total = (loss_of(name, tokens, knobs) * aggregation_weights("seq_mean_token_mean", tokens)).sum()
    plain = getattr(dense, f"{name}_of_sequences")(padded, **knobs).sum()
    assert total.item() == pytest.approx(plain.item(), rel=1e-9, abs=1e-12)
    (gradient_N,) = torch.autograd.grad(total, tokens.logp_N)
    np.testing.assert_allclose(gradient_N, dense.gradient(plain, padded), rtol=1e-9, atol=1e-12)


SMOOTH = [case for case in POLICY_LOSS_CASES if case[0] in ("importance", "ppo", "sapo", "dppo")]
"""Policy losses without stop-gradient terms: the gradient is the derivative of the value."""


@pytest.mark.parametrize(("name", "knobs"), SMOOTH)
def test_gradients_match_finite_differences(name: str, knobs: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    rows = [[-1 - abs(a), -1 - abs(b), -1 - abs(b), c] for a, b, c in rng.normal(size=(40, 3))]
    sequences = [[Token(*row) for row in rows[:30]], [Token(*row) for row in rows[30:]]]
    _, gradient_N = loss_and_gradient(name, sequences, knobs)

    def shifted(by: float) -> Any:
        moved = [[token._replace(logp=token.logp + by) for token in sequence] for sequence in sequences]
        return reference.by_sequence(getattr(reference, name), moved, **knobs)

    np.testing.assert_allclose(gradient_N, (shifted(1e-6) - shifted(-1e-6)) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_the_gradient_of_a_sequence_level_loss_matches_finite_differences(name: str) -> None:
    knobs = {"clip_low": 0.2, "clip_high": 0.3}
    rng = np.random.default_rng(1)
    sequence = [Token(-1 + x, -1, -2, -1.5) for x in rng.normal(scale=0.3, size=6)]
    _, gradient_N = loss_and_gradient(name, [sequence], knobs)
    for place, token in enumerate(sequence):
        above, below = (
            getattr(reference, name)(
                [*sequence[:place], token._replace(logp=token.logp + by), *sequence[place + 1 :]], **knobs
            )
            for by in (1e-6, -1e-6)
        )
        slope = (sum(above) - sum(below)) / 2e-6  # T equal token losses sum to T times the sequence loss
        assert gradient_N[place].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


EXTREMES = [
    Token(-1e4, 0.0, 0.0, 1.0),
    Token(0.0, -1e4, -1e4, 1.0),
    Token(-1e30, -1.0, -1.0, -2.0),
    Token(-1.0, -1e30, -1e30, -2.0),
    Token(-1e30, -1e30, -1e30, 1.0),
    Token(0.0, 0.0, 0.0, -1.0),
    Token(-80.0, -80.0, -80.0, 0.0),
    Token(-1.0, -math.inf, -math.inf, -1.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_policy_loss
def test_extreme_log_ratios_give_finite_losses_and_gradients(
    name: str, knobs: dict[str, Any], dtype: torch.dtype
) -> None:
    for sequences in ([EXTREMES], [[token] for token in EXTREMES], [[token] * 3 for token in EXTREMES]):
        tokens = lay_out(sequences, dtype)
        loss_N = loss_of(name, tokens, knobs)
        (gradient_N,) = torch.autograd.grad(loss_N.sum(), tokens.logp_N)
        assert loss_N.dtype == dtype
        assert loss_N.isfinite().all()
        assert gradient_N.isfinite().all()


@every_policy_loss
def test_a_pass_without_tokens_has_no_losses(name: str, knobs: dict[str, Any]) -> None:
    for sequences in ([], [[]], [[], []]):
        assert loss_of(name, lay_out(sequences), knobs).shape == (0,)


@every_policy_loss
@examples(30)
@given(sequences=passes)
def test_losses_do_not_depend_on_the_order_or_splitting_of_sequences(
    name: str, knobs: dict[str, Any], sequences: Pass
) -> None:
    cut = len(sequences) // 2
    whole = loss_and_gradient(name, sequences, knobs)
    turned = loss_and_gradient(name, sequences[::-1], knobs)
    first, second = (loss_and_gradient(name, part, knobs) for part in (sequences[:cut], sequences[cut:]))
    lengths = [len(sequence) for sequence in sequences]
    for of_whole, of_turned, of_first, of_second in zip(whole, turned, first, second, strict=True):
        back = torch.cat(list(of_turned.split(lengths[::-1]))[::-1]) if lengths else of_turned
        torch.testing.assert_close(back, of_whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([of_first, of_second]), of_whole, rtol=1e-12, atol=1e-12)


@examples(100)
@given(passes)
def test_truncated_is_equals_the_weighted_log_likelihood_bitwise(sequences: Pass) -> None:
    tokens = lay_out(reference.on_rollout(sequences), torch.float32)
    weights_N = (tokens.logp_N.detach() - tokens.sampler_logp_N).clamp(-20, 20).exp().clamp(max=2.0)
    assert torch.equal(loss_of("truncated_is", tokens, {}), -weights_N * tokens.advantages_N * tokens.logp_N)


@pytest.mark.parametrize(("dual_clip", "loss", "slope"), [(None, 4.0, 4.0), (5.0, 4.0, 4.0), (3.0, 3.0, 0.0)])
def test_dual_clip_bounds_the_loss_of_a_token_with_negative_advantage(
    dual_clip: float | None, loss: float, slope: float
) -> None:
    loss_N, gradient_N = loss_and_gradient("ppo", [[Token(-1, -1 - math.log(4), -1, -1.0)]], {"dual_clip": dual_clip})
    assert (loss_N.item(), gradient_N.item()) == pytest.approx((loss, slope))


def test_dual_clip_does_not_change_tokens_with_positive_advantage() -> None:
    loss_N, _ = loss_and_gradient("ppo", [[Token(-1, -1 - math.log(1.1), -1, 2.0)]], {"dual_clip": 1.05})
    assert loss_N.item() == pytest.approx(-2.2)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize(
    ("current", "sampler", "advantage", "trained"),
    [
        (0.9, 0.5, 1.0, False),  # far above the sampler, pushed up
        (0.9, 0.5, -1.0, True),  # far above the sampler, pushed back
        (0.1, 0.5, -1.0, False),  # far below the sampler, pushed down
        (0.1, 0.5, 1.0, True),  # far below the sampler, pushed back
        (1.0, 0.5, 1.0, False),  # probability 1 now
        (0.5, 1.0, -1.0, False),  # probability 1 when sampled
        (1.0, 1.0, 1.0, True),
        (0.55, 0.5, 1.0, True),
        (0.45, 0.5, -1.0, True),
    ],
)
def test_dppo_masks_a_token_only_if_its_advantage_pushes_it_further_away(
    divergence: str, current: float, sampler: float, advantage: float, trained: bool
) -> None:
    token = Token(math.log(current), math.log(sampler), math.log(sampler), advantage)
    loss_N, gradient_N = loss_and_gradient("dppo", [[token]], {"divergence": divergence})
    expected = -current / sampler * advantage if trained else 0.0
    assert (loss_N.item(), gradient_N.item()) == pytest.approx((expected, expected))


def test_dppo_bounds_the_probability_change_so_a_rare_token_keeps_a_large_ratio() -> None:
    token = Token(math.log(0.1), math.log(0.001), math.log(0.001), 1.0)
    loss_N, _ = loss_and_gradient("dppo", [[token]], {})
    assert loss_N.item() == pytest.approx(-100.0)


def test_the_dppo_ratio_penalty_also_applies_to_masked_tokens() -> None:
    token = Token(math.log(0.9), math.log(0.5), math.log(0.5), 1.0)
    loss_N, gradient_N = loss_and_gradient("dppo", [[token]], {"ratio_penalty": 0.5})
    log_w = math.log(1.8)
    assert (loss_N.item(), gradient_N.item()) == pytest.approx((0.5 * log_w**2, log_w))
