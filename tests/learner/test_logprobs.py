from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outpace.learner import output_head
from outpace.learner.output_head import logprobs_from_logits, token_logprobs


def plain(hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, head, bias) / (temperature or 1.0)
    return torch.log_softmax(logits, -1)[torch.arange(len(targets)), targets]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("slice_logits", [1, 64, 1 << 24])
def test_sliced_logprobs_and_gradients_equal_the_plain_formula(
    temperature: float, with_bias: bool, slice_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(output_head.LOGITS_PER_SLICE, "cpu", slice_logits)
    torch.manual_seed(0)
    targets = torch.randint(0, 19, (23,))
    weights = torch.randn(23, dtype=torch.float64)
    results = []
    for function in (plain, lambda *a: token_logprobs(*a)[0]):
        torch.manual_seed(1)
        leaves = [torch.randn(23, 8), torch.randn(19, 8), *([torch.randn(19)] if with_bias else [])]
        for leaf in leaves:
            leaf.requires_grad_()
        logp = function(leaves[0], leaves[1], leaves[2] if with_bias else None, targets, temperature)
        (logp.double() * weights).sum().backward()
        results.append([logp.detach(), *(leaf.grad for leaf in leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_entropy_is_computed_at_the_sampling_temperature_and_has_no_gradient() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 8, requires_grad=True), torch.randn(19, 8)
    targets = torch.zeros(5, dtype=torch.long)
    _, entropy = token_logprobs(hidden, head, None, targets, 0.5)
    expected = torch.distributions.Categorical(logits=(hidden @ head.t()) / 0.5).entropy()
    torch.testing.assert_close(entropy, expected.detach())
    assert not entropy.requires_grad
    torch.testing.assert_close(logprobs_from_logits(hidden @ head.t(), targets, 0.5)[1], expected.detach())


def test_bfloat16_hidden_states_still_give_float32_logprobs() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 8).bfloat16().requires_grad_()
    head = torch.randn(19, 8, requires_grad=True)
    targets = torch.arange(6)
    logp, _ = token_logprobs(hidden, head, None, targets, 1.0)
    logp.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.dtype == torch.float32
    assert hidden.grad is not None
    assert head.grad is not None
    assert (hidden.grad.dtype, head.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(logp, plain(hidden.float(), head, None, targets, 1.0), rtol=0.05, atol=0.05)


def test_no_target_tokens_give_no_logprobs() -> None:
    logp, entropy = token_logprobs(torch.zeros(0, 8), torch.zeros(19, 8), None, torch.zeros(0, dtype=torch.long), 1.0)
    assert (logp.shape, entropy.shape) == ((0,), (0,))
