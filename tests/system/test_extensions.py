"""Components of an installed package and of a script are found by name, in every process that uses them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outpace
from outpace.config.load import make_config
from outpace.engines.server.build import EngineSetup, transport_for
from outpace.errors import BadInput
from outpace.hardware.placement import ON_CPU
from outpace.rewards.registry import resolve_rewards
from outpace.run.plan import UserObjects, make_plan
from outpace.run.reporting import report_order
from outpace.runtime import by_value
from outpace.runtime.registry import REGISTRIES, REWARDS, TRACKERS, TRANSPORTS, Registry
from support import naming, read_lines, resolved

ENTRY_POINTS = {
    "outpace.tasks": "sums",
    "outpace.rewards": "digits",
    "outpace.environments": "Desk",
    "outpace.losses": "scaled",
    "outpace.advantages": "above_worst",
    "outpace.normalizers": "halved",
    "outpace.masks": "strict",
    "outpace.transports": "Courier",
    "outpace.trackers": "Notebook",
}
"""One component of each kind, by group."""

PACKAGE = """
from pathlib import Path
import outpace

CALLED = set()

def sums(config):
    return [outpace.Task(f"sum/{n}", f"{n} + 1 =") for n in range(16)], None

def digits(completions, **columns):
    CALLED.add("digits")
    return [float(sum(c.isdigit() for c in str(text))) for text in completions]

class Desk:
    def reset(self, **columns):
        CALLED.add("Desk")

    def get_reward(self):
        return 0.25

@outpace.policy_loss(old_policies=("rollout",), masks=("strict",))
def scaled(tokens, *, scale: float = 1.0):
    CALLED.add(f"scaled {scale}")
    return -tokens.advantages_N * tokens.logp_N * scale

@outpace.advantage(normalizer="halved")
def above_worst(group):
    CALLED.add("above_worst")
    return group.returns_G - group.returns_G.min()

@outpace.normalizer
def halved(batch, *, by: float = 2.0):
    CALLED.add(f"halved {by}")
    return [row / by for row in batch.advantages]

@outpace.mask(scope="sequence")
def strict(tokens, log_rho_N, *, reject_all: bool = False):
    CALLED.add("strict")
    return log_rho_N > (float("inf") if reject_all else float("-inf"))

class Courier:
    needs_pause = True

    def __init__(self, target):
        self.target = target

class Notebook:
    def start(self, tracked):
        self.file = tracked.directory / "notebook.txt"
        return tracked.run_id or tracked.new_id

    def metrics(self, step, values, at):
        with self.file.open("a") as file:
            print(step, file=file)

    def table(self, step, rows): ...
    def flush(self): ...
    def finish(self, summary, active): ...
"""


SETTINGS: dict[str, Any] = {
    "tasks.name": "sums",
    "rewards.functions": ["digits"],
    "rollout.environment": "desk",
    "policy_loss.name": "scaled",
    "advantage.name": "above_worst",
    "correction.reject_all": True,
    "run.report_to": ["notebook"],
    "run.steps": 1,
    "rollout.group_size": 2,
    "rollout.max_tokens": 4,
    "pacing.groups_per_step": 2,
    "filter.uniform": False,
    "eval.count": 0,
    "run.threads": 1,
}
"""A short run with all of them but the transport, which needs a server. The loss names the mask, the advantage the
normalizer."""


def install(place: Path, name: str, entry_points: dict[str, str], code: str = PACKAGE) -> None:
    """Install a package of one module into a folder, as pip does."""
    (place / f"{name}.py").write_text(code)
    (place / f"{name}-1.0.dist-info").mkdir(parents=True)
    (place / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n{entry.lower()} = {name}:{entry}\n" for group, entry in entry_points.items()]
    (place / f"{name}-1.0.dist-info" / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which packages are installed, for this process and its children. What is registered is forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "registered", {})
    return folder


def test_every_kind_has_a_group_and_a_component_in_these_tests() -> None:
    assert sorted(registry.group for registry in REGISTRIES) == sorted(ENTRY_POINTS)


def test_a_run_uses_components_of_an_installed_package_by_name(place: Path, tmp_path: Path) -> None:
    install(place, "own_kinds", ENTRY_POINTS)
    settings = {**SETTINGS, "policy_loss.scale": 3, "run.dir": str(tmp_path / "run")}
    settings |= {"run.runtime": "inline", "rewards.isolation": "thread"}
    outpace.Trainer("starter-agent", config=settings, quiet=True).train()
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["reward/environment"] == 0.25
    assert "reward/digits" in line
    assert line["offpolicy/masked"] == 1.0
    expected = {"digits", "Desk", "scaled 3.0", "above_worst", "halved 2.0", "strict"}
    assert expected == importlib.import_module("own_kinds").CALLED
    assert (tmp_path / "run" / "notebook.txt").read_text() == "1\n"


def test_a_transport_of_an_installed_package_gets_the_server(place: Path, tmp_path: Path) -> None:
    install(place, "own_kinds", ENTRY_POINTS)
    config = resolved({"engine.kind": "sglang", "weights.transport": "courier", "engine.urls": ["http://host:1"]})
    setup = EngineSetup("engine-0", 0, "http://host:1", "x", tmp_path, tmp_path, ON_CPU)
    made: Any = transport_for(config, setup, SimpleNamespace(http="client", label_of=str), None)  # type: ignore[arg-type]
    assert type(made).__name__ == "Courier"
    assert (made.target.kind, made.target.http, made.target.adapters) == ("sglang", "client", False)
    assert made.target.directory.is_relative_to(tmp_path)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.decorator)
def test_an_unknown_name_is_refused_with_the_closest_and_all_known(place: Path, registry: Registry) -> None:
    install(place, "own_kinds", ENTRY_POINTS)
    known = ENTRY_POINTS[registry.group].lower()
    with pytest.raises(BadInput, match=naming(registry.setting, f"'{known}x'", f"{known}?", *registry.built_in)):
        registry.find(f"{known}x")


def test_a_name_that_is_defined_twice_is_refused_when_it_is_used(place: Path) -> None:
    install(place, "first_kinds", {"outpace.rewards": "digits"})
    install(place, "second_kinds", {"outpace.rewards": "digits", "outpace.trackers": "Notebook"})
    with pytest.raises(BadInput, match=naming("rewards.functions", "digits", "first_kinds", "second_kinds")):
        resolve_rewards(["digits"])

    @outpace.register_reward("number")
    def letters(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(BadInput, match=naming("rewards.functions", "number", "outpace", "letters")):
        resolve_rewards(["number"])
    assert TRACKERS.find("notebook").__module__ == "second_kinds"


def test_a_decorated_function_that_is_also_an_entry_point_is_one_component(place: Path) -> None:
    code = "import outpace\n@outpace.register_reward('digits')\ndef digits(completions): return [0.0]\n"
    install(place, "inner_kinds", {}, code)
    install(place, "outer_kinds", {"outpace.rewards": "digits"}, "from inner_kinds import digits\n")
    for _ in range(2):
        assert REWARDS.find("digits").__module__ == "inner_kinds"
    plan = make_plan(make_config({"rewards.functions": ["digits"]}), UserObjects())
    assert plan.objects == (), "every process finds it by its entry point"


def test_an_entry_point_that_cannot_be_imported_is_refused_only_if_it_is_used(place: Path) -> None:
    install(place, "broken_kinds", {"outpace.rewards": "digits"}, "import not_installed_anywhere\n")
    assert resolve_rewards(["number"])
    with pytest.raises(BadInput, match=naming("rewards.functions", "digits", "broken_kinds", "not_installed_anywhere")):
        resolve_rewards(["digits"])


def test_registering_again_replaces_and_a_bare_decorator_uses_the_name_of_the_function(place: Path) -> None:
    def define(score: float) -> None:
        @outpace.register_reward
        def constant(completions: list[str]) -> list[float]:
            return [score] * len(completions)

    define(1.0)
    define(2.0)
    assert REWARDS.find("constant")(["a"]) == [2.0]


def test_a_transport_that_a_program_registers_reaches_the_engines(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @outpace.transport("mine")
    def mine(target: Any) -> Any:
        return "made"

    monkeypatch.setattr("outpace.run.plan._check_engines", lambda config: None)
    settings = {"engine.kind": "vllm", "weights.transport": "mine", "rewards.functions": ["countdown"]}
    plan = make_plan(make_config(settings), UserObjects())
    monkeypatch.setattr(TRANSPORTS, "registered", {})
    by_value.unpickle_objects(plan.engine_code)["registered"].install()
    assert TRANSPORTS.find("mine")(None) == "made"
    assert plan.objects == ("registered names",)


SCRIPT = """
{package}
outpace.register_task(sums)
outpace.register_reward("digits")(digits)
outpace.environment("desk")(Desk)
outpace.tracker("notebook")(Notebook)

if __name__ == "__main__":
    print(outpace.Trainer("starter-agent", config={config!r}, quiet=True).train().steps)
"""


@pytest.mark.slow
def test_names_that_a_script_registers_work_in_every_process(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.dir": str(tmp_path / "run")}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(package=PACKAGE, config=settings))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["1"]), result.stderr
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert (line["reward/environment"], line["offpolicy/masked"]) == (0.25, 1.0)
    assert (tmp_path / "run" / "notebook.txt").read_text() == "1\n"


def test_a_tracker_that_another_process_cannot_import_is_refused(place: Path, tmp_path: Path) -> None:
    @outpace.tracker("mine")
    class Mine: ...

    with pytest.raises(BadInput, match=naming("run.report_to", "mine")):
        report_order(resolved({"run.report_to": ["mine"]}), tmp_path)
