"""Results of the simulator, checked for cases with a known answer."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace.commands.simulate import print_plan, simulate_command
from outpace.config.load import describe_settings
from outpace.errors import BadInput, ComponentFailed
from outpace.simulator.plan import SimulationPlan, make_plan, with_best_split
from outpace.simulator.run import SimulatedRun
from outpace.simulator.settings import FIELDS, SECTIONS, SimulationSettings, load_settings
from support import names


def settings_of(**sections: dict[str, Any]) -> SimulationSettings:
    """Settings of a small cluster, by default with sequences of equal length."""
    base: dict[str, dict[str, Any]] = {
        "cluster": {"devices": 4},
        "engine": {"slots": 16, "load_s": 0.1, "pause_s": 0.0},
        "workload": {"lengths": "fixed", "mean_tokens": 500.0, "prompt_tokens": 0, "grade_s": 0.0, "group_size": 4},
        "pacing": {"groups_per_step": 8, "chunk_groups": 2, "depth": 2.0, "max_lag": 3},
        "learner": {"token_s": 1e-3, "step_s": 0.0, "publish_s": 0.0, "checkpoint_s": 0.0},
        "run": {"steps": 12, "probe_steps": 8},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}
    return SimulationSettings.model_validate(merged)


def test_if_the_learner_is_the_bottleneck_a_step_takes_as_long_as_training_its_tokens() -> None:
    figures = SimulatedRun(settings_of(cluster={"training": 1})).run()
    assert figures is not None
    assert figures.step_s == pytest.approx(8 * 4 * 500 * 1e-3, rel=0.02)
    assert figures.trained_tok_s == pytest.approx(1000, rel=0.02)
    assert figures.learner_wait < 0.02
    assert figures.engine_wait > 0.3


def test_efficiency_is_at_most_1_and_close_to_it_for_a_balanced_cluster() -> None:
    balanced = settings_of(cluster={"devices": 2, "training": 1}, learner={"token_s": 4.25e-4})
    figures = SimulatedRun(balanced).run()
    assert figures is not None
    assert 0.8 < figures.efficiency <= 1.0


def test_the_best_split_gives_more_devices_to_training_when_training_costs_more() -> None:
    much_training, _ = with_best_split(settings_of(cluster={"devices": 12}, learner={"token_s": 2e-3}))
    little_training, tried = with_best_split(settings_of(cluster={"devices": 12}, learner={"token_s": 1e-5}))
    assert much_training.cluster.training is not None
    assert little_training.cluster.training is not None
    assert much_training.cluster.training > 6 > little_training.cluster.training
    assert tried[little_training.cluster.training] == min(tried.values())


def test_the_same_seed_gives_the_same_results_and_another_seed_gives_others() -> None:
    faulty = settings_of(
        cluster={"training": 2},
        workload={"lengths": "lognormal"},
        faults={"engine_mtbf_s": 60.0, "learner_mtbf_s": 100.0, "restart_s": 1.0},
        checkpoint={"every": 2},
        supervise={"restarts": 1000},
    )
    first, again, other = (SimulatedRun(faulty.changed("run", seed=seed)).run() for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.step_s == again.step_s
    assert first.deaths == again.deaths
    assert first.step_s != other.step_s


def test_long_tails_make_asynchronous_training_faster_and_the_report_states_the_factor() -> None:
    plan = make_plan(
        settings_of(cluster={"training": 2}, workload={"lengths": "lognormal", "sigma": 1.2, "max_tokens": 8000})
    )
    assert plan.factor is not None
    assert plan.factor > 1.3
    assert names(printed(plan).splitlines()[-1], f"asynchronous {plan.factor:.2f}")


def test_synchronous_training_is_as_fast_if_generation_dominates_and_lengths_are_equal() -> None:
    equal_lengths = settings_of(
        cluster={"training": 1}, learner={"token_s": 1e-6}, engine={"load_s": 0.0, "slots": 8}, run={"switch_s": 0.0}
    )
    plan = make_plan(equal_lengths)
    assert plan.factor is not None
    assert plan.factor < 1.05
    verdict = printed(plan).splitlines()[-1]
    assert names(verdict, f"synchronous {1 / plan.factor:.2f}")
    assert not names(verdict, "asynchronous")


def test_engine_deaths_cost_time_and_tokens_and_are_reported() -> None:
    fault_free = settings_of(cluster={"training": 3}, run={"steps": 20})  # generation is the bottleneck
    faulty = fault_free.changed("faults", engine_mtbf_s=40.0, restart_s=5.0).changed("supervise", restarts=10_000)
    before, after = SimulatedRun(fault_free).run(), SimulatedRun(faulty).run()
    assert before is not None
    assert after is not None
    assert after.deaths["engine"] > 0
    assert after.restarts == after.deaths["engine"]
    assert after.waste > before.waste == 0.0
    assert after.step_s > before.step_s


def test_a_dead_learner_resumes_from_its_checkpoint_and_its_steps_are_counted_once() -> None:
    figures = SimulatedRun(
        settings_of(
            cluster={"training": 2}, run={"steps": 30}, checkpoint={"every": 3},
            faults={"learner_mtbf_s": 60.0, "restart_s": 10.0},
        )
    ).run()  # fmt: skip
    assert figures is not None
    assert figures.deaths["learner"] > 0
    assert figures.ended == "done"
    assert figures.steps == 30 - 7


def test_a_learner_that_always_dies_before_its_first_checkpoint_ends_the_simulation_with_an_error() -> None:
    hopeless = settings_of(cluster={"training": 1}, faults={"learner_mtbf_s": 1.0}, checkpoint={"every": 0})
    with pytest.raises(ComponentFailed, match=r"\blearner\b.*\b20\b"):
        make_plan(hopeless)


def test_a_fleet_that_never_serves_ends_the_simulation_with_an_error() -> None:
    hopeless = settings_of(
        cluster={"training": 1}, faults={"engine_mtbf_s": 0.5, "restart_s": 1.0}, supervise={"restarts": 10**9},
        run={"stall_s": 5000.0},
    )  # fmt: skip
    with pytest.raises(ComponentFailed, match=r"\b5000 s\b"):
        make_plan(hopeless)


# ---------------------------------------------------------------------------------------------------------- the command


def printed(plan: SimulationPlan) -> str:
    text = io.StringIO()
    print_plan(plan, settings_of(), Console(width=120, file=text))
    return text.getvalue()


def test_the_command_reads_a_file_and_options_and_prints_json(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[cluster]\ndevices = 3\ntraining = 1\n[run]\nsteps = 4\ncompare = false\n[engine]\nload_s = 1\n")
    assert simulate_command(file, ["--pacing.groups_per_step", "4", "--workload.mean_tokens=50"], as_json=True) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["asynchronous"]["generating"], result["asynchronous"]["training"]) == (2, 1)
    assert result["two_pools"] is None
    assert re.search(r"\b\d+\.\d s\b", err)


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (["--cluster.device", "8"], "cluster.device", "cluster.devices"),
        (["--max_lag", "8"], "max_lag", "pacing.max_lag"),
        (["--cluster.devices", "many"], "cluster.devices", "integer 'many'"),
        (["--cluster.devices"], "cluster.devices", "integer"),
        (["--cluster.training", "16"], "cluster.training", "16 1"),
        (["--workload.lengths", "list"], "workload.length_list", 'workload.lengths "list"'),
        (["--weights.every", "9"], "weights.every", "9 pacing.max_lag 8 4"),
        (["--workload.filtered=0.7", "--workload.failed=0.3"], "workload.failed", "workload.filtered"),
        (["--workload.sigma", "nan"], "workload.sigma", "finite nan"),
    ],
)
def test_bad_input_is_rejected_with_a_one_line_error(arguments: list[str], key: str, expected: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_settings(None, arguments)
    assert str(refused.value).startswith(f"{key}: ")
    assert names(str(refused.value), expected)
    assert "\n" not in str(refused.value)


def test_every_setting_has_a_description() -> None:
    text = describe_settings(SECTIONS)
    assert all(f"--{key} " in text for key in FIELDS)
    assert all(info.description for info in FIELDS.values())
