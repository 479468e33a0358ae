from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outpace.errors import CorruptData, OutpaceError
from outpace.learner import state
from outpace.learner.attention import ATTENTION_NAME
from outpace.learner.core import LearnerCore
from outpace.types import Row, StepReport
from support import resolved

MakeLlama = Callable[..., LlamaForCausalLM]
MakeRows = Callable[..., list[Row]]


def core_of(model: LlamaForCausalLM, settings: dict[str, Any] | None = None, **learner: Any) -> LearnerCore:
    """Return a core with these dotted settings; keywords are settings of `[learner]`."""
    dotted = {"learner.lr": 1e-2} | {f"learner.{key}": value for key, value in learner.items()} | (settings or {})
    return LearnerCore(model, resolved(dotted))


def weights_of(core: LearnerCore) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in core.parameters.items()}


def assert_equal_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def train(core: LearnerCore, rows: list[list[Row]]) -> list[StepReport]:
    reports = []
    for batch in rows:
        core.accumulate(batch[: len(batch) // 2])
        core.accumulate(batch[len(batch) // 2 :])
        reports.append(core.step())
    return reports


def spoiled(row: Row) -> Row:
    return Row(row.tokens, row.mask, row.logprobs, row.versions, row.advantages * np.float32("nan"))


def test_the_update_is_adamw_on_the_clipped_gradient_of_the_token_mean(
    make_llama: MakeLlama, make_rows: MakeRows
) -> None:
    """Compared with an independent loop: one document at a time, plain log-softmax, one mean over all tokens."""
    rows = make_rows(6)
    core = core_of(make_llama(), {"policy_loss.cap": 1.5, "correction.masks": []}, max_grad_norm=0.3, weight_decay=0.1)
    core.accumulate(rows)
    report = core.step()

    model = make_llama().eval()
    losses = []
    for row in rows:
        logits = model(torch.from_numpy(row.tokens).long()[None], use_cache=False).logits[0, :-1]
        logp = torch.log_softmax(logits, -1)[torch.arange(len(row.tokens) - 1), row.tokens[1:]]
        weight = (logp.detach() - torch.from_numpy(row.logprobs[1:])).exp().clamp(max=1.5)
        losses.append((-weight * torch.from_numpy(row.advantages[1:]) * logp)[row.mask[1:]])
    loss = torch.cat(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    ).step()

    assert report.loss == pytest.approx(loss.item(), rel=1e-4)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-3)
    assert report.grad_norm > 0.3, "gradient clipping must be active in this test"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(core.parameters[name].detach(), parameter.detach(), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("tokens_per_pass", [1, 50, 10_000])
@pytest.mark.parametrize("chunks", [1, 3])
def test_chunking_and_packing_do_not_change_loss_or_gradient(
    make_llama: MakeLlama, make_rows: MakeRows, tokens_per_pass: int, chunks: int
) -> None:
    rows = make_rows(9)
    whole = core_of(make_llama())
    whole.accumulate(rows)
    expected = whole.step()
    core = core_of(make_llama(), tokens_per_pass=tokens_per_pass)
    for part in range(chunks):
        core.accumulate(rows[part::chunks])
    report = core.step()
    assert report.tokens == expected.tokens
    assert report.loss == pytest.approx(expected.loss, rel=1e-5)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_the_same_chunks_give_bitwise_equal_weights(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    batches = [make_rows(6, seed=s) for s in range(3)]
    first, second = core_of(make_llama()), core_of(make_llama())
    reports = [train(core, batches) for core in (first, second)]
    assert [r.loss for r in reports[0]] == [r.loss for r in reports[1]]
    assert_equal_bits(weights_of(first), weights_of(second))


def test_gradient_checkpointing_does_not_change_the_result(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    reports, calls = [], []
    for checkpointing in (False, True):
        core = core_of(make_llama(), gradient_checkpointing=checkpointing)
        seen: list[object] = []
        core.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        reports.append(train(core, [make_rows(6)])[0])
        calls.append(len(seen))
    assert calls == [2, 4], "two chunks, each computed once, and with checkpointing once more in backward"
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)


def test_dropout_is_never_applied(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    reports = [
        train(core_of(make_llama(attention_dropout=dropout), gradient_checkpointing=True), [make_rows(4)])[0]
        for dropout in (0.0, 0.5)
    ]
    assert reports[0].loss == reports[1].loss


def test_resuming_from_a_saved_state_gives_bitwise_equal_weights(
    make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path
) -> None:
    batches = [make_rows(6, seed=s) for s in range(5)]
    options = {"schedule": "cosine", "weight_decay": 0.01, "lr_warmup_steps": 1}
    core = core_of(make_llama(), {"run.steps": 5}, **options)
    train(core, batches[:3])
    state.save(core, tmp_path)
    expected = train(core, batches[3:])

    resumed = core_of(make_llama(seed=99), {"run.steps": 5}, **options)
    resumed.accumulate(make_rows(3))  # a partially accumulated batch is dropped on restore
    assert state.restore(resumed, tmp_path) == 3
    found = train(resumed, batches[3:])
    assert [without_seconds(r) for r in found] == [without_seconds(r) for r in expected]
    assert_equal_bits(weights_of(resumed), weights_of(core))
    assert resumed.tokens == core.tokens


def without_seconds(report: StepReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__ if name != "seconds"}


def test_a_state_from_before_the_first_step_can_be_restored(make_llama: MakeLlama, tmp_path: Path) -> None:
    core = core_of(make_llama())
    state.save(core, tmp_path)
    other = core_of(make_llama(seed=5))
    assert state.restore(other, tmp_path) == 0
    assert_equal_bits(weights_of(core), weights_of(other))


def test_the_saved_model_opens_with_transformers_and_keeps_tied_weights_tied(
    make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path
) -> None:
    core = core_of(make_llama())
    train(core, [make_rows(4)])
    state.save(core, tmp_path)
    core.model.config.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal_bits(weights_of(core), dict(model.named_parameters()))


@pytest.mark.parametrize("name", [state.MODEL_FILE, state.OPTIMIZER_FILE, state.COUNTERS_FILE])
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_or_missing_state_file_raises_and_changes_nothing(
    make_llama: MakeLlama, make_rows: MakeRows, tmp_path: Path, name: str, cut: bool
) -> None:
    core = core_of(make_llama())
    train(core, [make_rows(4)])
    state.save(core, tmp_path)
    path = tmp_path / name
    if cut:
        path.write_bytes(path.read_bytes()[:20])
    else:
        path.unlink()
    before = weights_of(core)
    with pytest.raises(CorruptData, match=name):
        state.restore(core, tmp_path)
    assert_equal_bits(weights_of(core), before)


def test_the_state_of_another_model_is_rejected(make_llama: MakeLlama, tmp_path: Path) -> None:
    state.save(core_of(make_llama(hidden_size=16)), tmp_path)
    with pytest.raises(CorruptData, match=r"model\.path"):
        state.restore(core_of(make_llama()), tmp_path)


def test_a_non_finite_step_changes_no_weight_and_counts_as_a_version(
    make_llama: MakeLlama, make_rows: MakeRows
) -> None:
    core = core_of(make_llama(), max_bad_steps=2)
    train(core, [make_rows(4)])
    before = weights_of(core)
    core.accumulate([spoiled(make_rows(1)[0])])
    report = core.step()
    assert report.skipped
    assert report.version == core.version == 2
    assert math.isnan(report.loss)
    assert_equal_bits(weights_of(core), before)
    good = train(core, [make_rows(4)])[0]
    assert not good.skipped
    assert math.isfinite(good.loss)


def test_too_many_bad_steps_in_a_row_end_the_run(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    core = core_of(make_llama(), max_bad_steps=2)
    bad = [spoiled(make_rows(1)[0])]
    core.accumulate(bad)
    core.step()
    train(core, [make_rows(4)])  # a good step resets the count
    core.accumulate(bad)
    core.step()
    core.accumulate(bad)
    with pytest.raises(OutpaceError, match=r"\b2\b"):
        core.step()


@pytest.mark.parametrize("rows", ["none", "untrained"])
def test_a_batch_without_trained_tokens_makes_a_version_without_an_update(
    make_llama: MakeLlama, make_row: Callable[..., Row], rows: str
) -> None:
    core = core_of(make_llama(), weight_decay=0.5)
    before = weights_of(core)
    core.accumulate([make_row(6, 6)] if rows == "untrained" else [])
    report = core.step()
    assert (report.version, report.tokens, report.loss, report.grad_norm, report.skipped) == (1, 0, 0.0, 0.0, False)
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert_equal_bits(weights_of(core), before)


def test_the_lag_of_every_token_is_counted(make_llama: MakeLlama, make_row: Callable[..., Row]) -> None:
    core = core_of(make_llama())
    core.version = 7
    report = core.accumulate([make_row(10, 4, version=7), make_row(9, 4, version=5)])
    assert report.lag_counts == {0: 6, 2: 5}
    metrics = core.step().metrics
    assert metrics["lag/max"] == metrics["lag/p95"] == 2
    assert metrics["lag/mean"] == pytest.approx(10 / 11)
    assert (metrics["lag/tokens_0"], metrics["lag/tokens_2"]) == (6, 5)


def test_on_policy_rows_have_importance_weight_one(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    core = core_of(make_llama())
    with torch.no_grad():
        rows = []
        for row in make_rows(4):
            logits = core.model.lm_head(on_its_own(core, row))
            logp = torch.log_softmax(logits, -1)[torch.arange(len(row.tokens) - 1), row.tokens[1:]]
            rows.append(Row(row.tokens, row.mask, np.append(np.float32(0), logp.numpy()), row.versions, row.advantages))
    core.accumulate(rows)
    metrics = core.step().metrics
    assert metrics["offpolicy/ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["offpolicy/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["offpolicy/masked"] == metrics["clip_ratio"] == 0
    assert metrics["offpolicy/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert 0 < metrics["entropy"] <= math.log(48)


def on_its_own(core: LearnerCore, row: Row) -> torch.Tensor:
    core.model.set_attn_implementation("sdpa")
    hidden = core.model.model(torch.from_numpy(row.tokens).long()[None], use_cache=False).last_hidden_state[0, :-1]
    core.model.set_attn_implementation(ATTENTION_NAME)
    return hidden


def test_the_learning_rate_follows_the_version(make_llama: MakeLlama, make_rows: MakeRows) -> None:
    core = core_of(make_llama(), {"run.steps": 4}, lr=1.0, schedule="linear")
    assert [report.lr for report in train(core, [make_rows(2)] * 4)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
