from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outpace.hardware.cores import (
    EXPLORE_FIRST,
    EXPLORE_MOST,
    LEARNER_ROW,
    SAMPLE_S,
    CoreSharing,
    CpuUsage,
    Role,
    SpeedComparison,
    ThreadCounts,
    read_usage,
    thread_share,
)
from outpace.models.loading import call_at_every_layer


@dataclass
class Machine:
    """A manual clock, and the CPU usage of programs outside the run."""

    board: ThreadCounts
    cores: int = 2
    now: float = 0.0
    others: float = 0.0  # cores in use by other programs
    busy_s: float = 0.0
    applied: dict[int, int] = field(default_factory=dict)

    def joins(self, role: Role, line: int) -> CoreSharing:
        def apply(threads: int) -> None:
            self.applied[line] = threads

        return CoreSharing(self.board, role, line, self.cores, apply, clock=lambda: self.now, usage=self.usage)

    def usage(self, pids: Collection[int]) -> CpuUsage:
        return CpuUsage(self.now, self.busy_s, {pid: 0.0 for pid in pids if pid == os.getpid()})

    def runs(self, seconds: float, *adjusting: CoreSharing) -> None:
        """Advance time in steps of one sample while these processes work."""
        for _ in range(round(seconds / SAMPLE_S)):
            self.now += SAMPLE_S
            self.busy_s += SAMPLE_S * self.others
            for sharing in adjusting:
                sharing.adjust()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(ThreadCounts(tmp_path / "cores"))


@pytest.mark.parametrize(
    ("role", "cores", "others", "engines", "learner", "most", "threads"),
    [
        ("learner", 2, 0.0, [], 0, None, 2),  # alone
        ("learner", 2, 0.0, [1], 0, None, 1),
        ("learner", 2, 0.3, [], 0, None, 2),  # the controller and the workers
        ("learner", 2, 0.7, [], 0, None, 1),  # another program uses a core
        ("learner", 2, 1.0, [1], 0, None, 1),
        ("learner", 16, 0.0, [3], 0, None, 13),
        ("engine", 2, 0.0, [], 0, None, 2),
        ("engine", 2, 0.0, [], 2, None, 1),
        ("engine", 16, 0.0, [], 8, None, 8),
        ("engine", 16, 0.0, [4], 8, None, 5),
        ("engine", 16, 0.0, [], 0, 4, 4),  # more threads do not help
    ],
)
def test_a_process_uses_the_cores_left_by_other_processes(
    role: Role, cores: int, others: float, engines: Sequence[int], learner: int, most: int | None, threads: int
) -> None:
    assert thread_share(role, cores, others, engines, learner, most) == threads


@given(
    cores=st.integers(1, 64),
    others=st.floats(0, 64),
    engines=st.integers(0, 8),
    most=st.none() | st.integers(1, 64),
)
def test_engines_and_learner_fit_on_the_cores_unless_there_are_fewer_cores_than_processes(
    cores: int, others: float, engines: int, most: int | None
) -> None:
    each = thread_share("engine", cores, others, [1] * (engines - 1), 1, most) if engines else 0
    learner = thread_share("learner", cores, others, [each] * engines)
    assert min(each, learner) >= (1 if engines else 0)
    assert each * engines + learner <= max(cores, engines + 1)


def test_the_learner_yields_a_core_to_a_working_engine_and_takes_it_back_when_the_engine_is_idle(
    machine: Machine,
) -> None:
    learner, engine = machine.joins("learner", LEARNER_ROW), machine.joins("engine", 1)
    with learner.working():
        assert machine.applied[LEARNER_ROW] == 2
        engine.adjust()
        learner.adjust()
        assert (machine.applied[LEARNER_ROW], machine.applied[1]) == (1, 1)
        engine.idle()
        learner.adjust()
        assert machine.applied[LEARNER_ROW] == 2
    engine.adjust()
    assert machine.applied[1] == 2


def test_thread_counts_follow_the_load_of_other_programs(machine: Machine) -> None:
    learner = machine.joins("learner", LEARNER_ROW)
    machine.runs(3.0, learner)
    assert machine.applied[LEARNER_ROW] == 2
    machine.others = 1.0
    machine.runs(3.0, learner)
    assert machine.applied[LEARNER_ROW] == 1
    machine.others = 0.0
    machine.runs(3.0, learner)
    assert machine.applied[LEARNER_ROW] == 2


def test_fixed_thread_counts_do_not_follow_the_load(machine: Machine) -> None:
    learner, engine = machine.joins("learner", LEARNER_ROW), machine.joins("engine", 1)
    machine.board.fix(engine=2, learner=2)
    machine.others = 1.0
    machine.runs(3.0, learner, engine)
    assert set(worked(machine, learner, LEARNER_ROW, 100, {2: 1.0})) == {2}
    assert machine.applied[1] == 2
    machine.board.fix(0, 0)
    machine.runs(3.0, learner, engine)
    assert machine.applied == {LEARNER_ROW: 1, 1: 1}


def test_an_engine_measures_its_useful_threads_only_while_no_other_process_computes(machine: Machine) -> None:
    learner, engine = machine.joins("learner", 0), machine.joins("engine", 1)
    learner.adjust()
    engine.measure_most(lambda: 1)
    assert engine.most is None
    learner.idle()

    def measure() -> int:
        assert machine.board.threads(1) == machine.cores
        return 1

    engine.measure_most(measure)
    engine.adjust()
    assert engine.most == machine.applied[1] == 1


def test_an_engine_that_died_while_working_holds_no_core(machine: Machine) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    machine.board.write(1, gone.pid, 1)
    learner = machine.joins("learner", LEARNER_ROW)
    learner.adjust()
    assert machine.applied[LEARNER_ROW] == 1
    machine.runs(1.0, learner)
    assert machine.applied[LEARNER_ROW] == 2


def worked(machine: Machine, sharing: CoreSharing, line: int, turns: int, seconds: dict[int, float]) -> list[int]:
    """Return the thread count of each turn; `seconds` maps a thread count to the duration of a turn."""
    used = []
    for _ in range(turns):
        with sharing.comparing(tokens=100):
            used.append(machine.applied[line])
            machine.now += seconds[used[-1]]
            machine.busy_s += machine.others * seconds[used[-1]]
    return used


def trained(machine: Machine, learner: CoreSharing, chunks: int, seconds: dict[int, float]) -> list[int]:
    used = []
    for _ in range(chunks):
        with learner.working():
            learner.adjust()
            used += worked(machine, learner, LEARNER_ROW, 1, seconds)
    return used


@pytest.mark.parametrize(("with_all", "mostly"), [(0.8, 2), (1.2, 1)])
def test_a_learner_that_rarely_waits_uses_all_cores_if_that_is_faster(
    machine: Machine, with_all: float, mostly: int
) -> None:
    learner, engine = machine.joins("learner", LEARNER_ROW), machine.joins("engine", 1)
    engine.adjust()
    trained(machine, learner, 100, {1: 1.0, 2: with_all})
    used = trained(machine, learner, 2 * EXPLORE_MOST, {1: 1.0, 2: with_all})
    assert used.count(mostly) == 2 * EXPLORE_MOST - 2  # the slower choice is still tried occasionally


def test_a_learner_that_mostly_waits_leaves_a_core_to_the_engine(machine: Machine) -> None:
    learner, engine = machine.joins("learner", LEARNER_ROW), machine.joins("engine", 1)
    engine.adjust()
    for _ in range(50):
        assert trained(machine, learner, 1, {1: 1.0, 2: 0.5}) == [1]
        machine.now += 2.0


@pytest.mark.parametrize(("with_all", "mostly"), [(0.008, 2), (0.012, 1)])
def test_an_engine_next_to_a_busy_program_uses_all_cores_if_that_is_faster(
    machine: Machine, with_all: float, mostly: int
) -> None:
    machine.others = 1.0
    engine = machine.joins("engine", 1)
    seconds = {1: 0.01, 2: with_all}
    worked(machine, engine, 1, 5_000, seconds)
    used = worked(machine, engine, 1, 2_000, seconds)
    assert 0.9 < used.count(mostly) / len(used) < 1.0


def test_an_engine_next_to_only_the_learner_keeps_to_its_share(machine: Machine) -> None:
    learner, engine = machine.joins("learner", LEARNER_ROW), machine.joins("engine", 1)
    learner.adjust()
    assert set(worked(machine, engine, 1, 1_000, {1: 0.01, 2: 0.005})) == {1}


def test_the_speed_comparison_adapts_when_the_faster_choice_changes() -> None:
    faster = SpeedComparison()
    for second_speed in (2.0, 0.5):
        for _ in range(10 * EXPLORE_MOST):
            second = faster.next_is_second()
            faster.record(second, second_speed if second else 1.0)
        assert faster.second == (second_speed > 1)


def test_a_choice_that_stays_slower_is_tried_less_and_less() -> None:
    faster = SpeedComparison()
    tried = []
    for turn in range(200):
        second = faster.next_is_second()
        faster.record(second, 0.1 if second else 1.0)
        if second:
            tried.append(turn)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)
    assert EXPLORE_FIRST < gaps[0] < gaps[-1] == EXPLORE_MOST


def test_the_cpu_usage_of_this_machine_is_read() -> None:
    before = read_usage([os.getpid(), 2**22 + 1])
    sum(range(10_000_000))
    after = read_usage([os.getpid()])
    assert before is not None
    assert after is not None
    assert before.running_s.keys() == {os.getpid()}
    assert after.running_s[os.getpid()] > before.running_s[os.getpid()]
    assert after.busy_s > before.busy_s


def test_the_layer_hook_is_called_before_each_forward_and_after_each_backward_pass() -> None:
    called: list[None] = []
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    call_at_every_layer(nn.ModuleDict({"layers": layers}), lambda: called.append(None))
    hidden = torch.ones(1, 2, requires_grad=True)
    for layer in layers:
        hidden = layer(hidden)
    assert len(called) == 3
    hidden.sum().backward()
    assert len(called) == 6
