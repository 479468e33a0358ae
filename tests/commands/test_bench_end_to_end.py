"""The comparison with TRL: its figures on made-up runs, lengths that both systems share, and short whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace import cli
from outpace.commands import bench_end_to_end
from outpace.commands.end_to_end.lengths import answer_length, fixed_length
from outpace.commands.end_to_end.limit import Cost, Limit
from outpace.commands.end_to_end.report import Comparison, print_report
from outpace.commands.end_to_end.systems import OUTPACE, RUN, TRL, OutpaceSystem, SystemRun, seconds_to
from outpace.commands.end_to_end.work import Work
from outpace.errors import BadInput
from outpace.types import Task
from support import naming


def run_of(step_s: float) -> SystemRun:
    return SystemRun(
        step_s=step_s, samples=512, completion_tokens=5120, trained_tokens=5120, reward=0.5, first_step_s=9.0,
        details={"learner waits, s": 0.1},
    )  # fmt: skip


def comparison_of(own: list[float], trl: list[float]) -> Comparison:
    """Runs with these seconds per step, on a machine whose limit is 512 samples/s."""
    limit = Limit(Cost(0.0015, 1), Cost(1 / 256 - 0.0015, 2), units=2)
    runs = {OUTPACE: [run_of(step_s) for step_s in own], TRL: [run_of(step_s) for step_s in trl]}
    return Comparison({"title": "work"}, {}, runs, [limit] * len(own))


def test_a_run_is_compared_with_its_neighbor_and_the_median_counts() -> None:
    comparison = comparison_of(own=[2.0, 4.0, 8.0], trl=[4.0, 8.0, 12.0])
    ratios = comparison.as_json()["ratios"]
    assert ratios["samples_per_s"] == pytest.approx(2.0)
    assert ratios["step_s"] == pytest.approx(2.0)
    assert ratios["limit"] == pytest.approx(0.25)


def test_the_report_shows_ratios_and_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(comparison_of(own=[2.0], trl=[5.0]))
    shown = capsys.readouterr().out
    assert "2.5" in shown
    assert "512.0 samples/s" in shown


@pytest.mark.parametrize(("own_s", "code"), [(2.0, 0), (3.9, 0), (4.1, 1)])
def test_a_ratio_below_half_of_the_recorded_one_fails(own_s: float, code: int) -> None:
    recorded = comparison_of(own=[2.0], trl=[5.0]).as_json()
    found = comparison_of(own=[own_s], trl=[5.0]).as_json()
    assert bench_end_to_end.compare_with(recorded, found) == code


def test_time_to_an_accuracy_is_interpolated_between_evaluated_steps() -> None:
    clock = [1.0, 2.0, 3.0, 4.0]
    assert seconds_to(0.5, 0.2, clock, {2: 0.4, 4: 0.6}) == pytest.approx(3.0)
    assert seconds_to(0.3, 0.2, clock, {2: 0.4, 4: 0.6}) == pytest.approx(1.0)
    assert seconds_to(0.9, 0.2, clock, {2: 0.4, 4: 0.6}) is None


class LengthClient:
    """Stands in for the client of an episode and keeps what the rollout asks for."""

    max_tokens = 64

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt

    async def sample(self, prompt: str, **overrides: Any) -> str:
        self.overrides = overrides
        return "text"


async def test_both_systems_sample_the_same_lengths() -> None:
    work = Work.of({"pacing.groups_per_step": 4, "rollout.group_size": 3, "rollout.max_tokens": 64}, "long-tailed")
    asked = []
    for task in work.tasks(steps=2):
        clients = [LengthClient(attempt) for attempt in range(3)]
        for client in clients:
            await fixed_length(task, client)  # type: ignore[arg-type]
        asked.append([client.overrides["max_tokens"] for client in clients])
    assert work.trl_job(steps=2, batch=12)["lengths"] == asked
    assert len({length for lengths in asked for length in lengths}) > 3


def test_lengths_are_long_tailed_and_within_the_limit() -> None:
    lengths = sorted(answer_length(f"prompt {number}", 0, 256) for number in range(2000))
    assert lengths[0] >= 1
    assert lengths[-1] <= 256
    assert 14 <= lengths[1000] <= 18
    assert lengths[-20] > 6 * lengths[1000]


def test_trl_generates_exactly_the_drawn_lengths_with_an_unchanged_model() -> None:
    from outpace.commands.end_to_end.trl_process import with_forced_ends

    torch.manual_seed(0)
    eos, pad = 5, 0
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    generate = with_forced_ends(model.generate, [[1, 7, 3]], [eos])
    prompts = torch.full((3, 4), 9)
    output = generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=20,
        eos_token_id=eos, pad_token_id=pad,
    )  # fmt: skip
    answers = output[:, 4:]
    assert [(row == eos).nonzero().tolist() for row in answers] == [[[0]], [[6]], [[2]]]


def test_vllm_in_trl_samples_exactly_the_drawn_lengths() -> None:
    from outpace.commands.end_to_end.trl_process import with_vllm_lengths

    class Parameters(SimpleNamespace):
        def clone(self) -> Parameters:
            return Parameters(**vars(self))

    seen: list[Parameters] = []
    generate = with_vllm_lengths(lambda prompts, sampling_params: seen.extend(sampling_params), [[3, 1]])
    generate(["a", "b"], sampling_params=Parameters(temperature=1.0, max_tokens=9))
    assert [(each.min_tokens, each.max_tokens, each.temperature) for each in seen] == [(3, 3, 1.0), (1, 1, 1.0)]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--task", "calculator"], "--task"),
        (["--filter.uniform", "true"], "filter.uniform"),
        (["--trl-batches", "100"], "--trl-batches"),
        (["--lengths", "short"], "--lengths"),
    ],
)
def test_work_that_cannot_be_compared_is_refused(words: list[str], key: str) -> None:
    with pytest.raises(BadInput, match=naming(key)):
        bench_end_to_end.main([*words, "--device", "cpu"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_comparison_trains_both_systems_and_measures_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--prompts", "4", "--attempts", "4", "--trl-batches", "16", "--steps", "3", "--repeats", "1"]
    words += ["--max-tokens", "32", "--lengths", "long-tailed", "--device", "cpu", "--pacing.max_lag", "0"]
    words += ["--target", "2.0", "--save-every", "3"]  # out of reach: only the evaluations are looked at
    assert cli.main(["bench", "end-to-end", *words, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    own, trl = found["systems"][OUTPACE], found["systems"][TRL]
    assert own["samples_per_s"] > 0
    assert found["ratios"]["limit"] > 0
    assert own["mean_length"] == pytest.approx(trl["mean_length"])  # the same prompts, step by step
    assert own["target_s"] is None
    for system in (OUTPACE, TRL):
        assert [sorted(curve) for curve in found["target"]["by_step"][system]] == [["0", "3"]]


def test_every_task_of_both_systems_is_the_same() -> None:
    work = Work.of({"pacing.groups_per_step": 2}, "equal")
    tasks: list[Task] = work.tasks(steps=2)
    rows = work.trl_job(steps=2, batch=16)["rows"]
    assert [row["prompt"][0]["content"] for row in rows] == [task.prompt for task in tasks]
    assert [row["target"] for row in rows] == [task.columns["target"] for task in tasks]


def test_the_limit_is_measured_with_the_trained_model_on_tasks_after_those_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_tasks: list[int] = []

    def export(run: Path, directory: Path) -> Path:
        assert run.name == RUN
        directory.mkdir()
        return directory

    def measure_limit(work: Work, directory: Path, first_task: int, threads: object) -> Limit:
        first_tasks.append(first_task)
        assert Path(work.config.model.path).parent == directory
        return Limit(Cost(0.1, 1), Cost(0.1, 1), 2)

    monkeypatch.setattr(OutpaceSystem, "run", lambda self, steps, directory: run_of(1.0))
    monkeypatch.setattr(bench_end_to_end, "export", export)
    monkeypatch.setattr(bench_end_to_end, "measure_limit", measure_limit)
    words = ["--only", OUTPACE, "--prompts", "4", "--steps", "3", "--repeats", "2", "--pacing.max_lag", "1"]
    assert bench_end_to_end.main([*words, "--device", "cpu"]) == 0
    assert first_tasks == [20, 20]
