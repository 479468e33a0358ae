"""The rules of import, held against the code as it stands."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "outpace"

FLOORS: list[set[str]] = [
    {"types", "protocols", "wire", "errors", "references", "stopwatch", "wording", "crash", "cpu"},
    {"algorithms"},
    {"config", "resources", "placement", "memory"},
    {"models", "tasks"},
    {"rollouts", "rewards", "engines", "learn", "weights", "checkpoint", "runtime", "observe"},
    {"pipeline"},
    {"parts", "resuming", "saved_objects", "saving", "session", "planning"}
    | {"registered", "background"}
    | {"trainer", "evaluate", "play", "agree", "serve"},
    {"bench", "simulate"},
    {"cli"},
]
"""From the ground up: a room imports from its own floor and from those below."""

NO_TORCH = (
    "outpace.cli",
    "outpace.play",
    "outpace.config.rules",
    "outpace.algorithms.catalogue",
    "outpace.trainer",
    "outpace.pipeline.driver",
    "outpace.rollouts.worker",
    "outpace.engines.fleet.fleet",
    "outpace.engines.servers.build",
    "outpace.rollouts.assembly",
    "outpace.rollouts.environments.stage_child",
    "outpace.rewards.registry",
    "outpace.rewards.grader",
    "outpace.tasks.registry",
    "outpace.runtime.child",
    "outpace.observe.console",
)


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imports() -> list[tuple[Path, str]]:
    """Every (file, outpace module it imports), wherever in the file the import stands."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and (node.module + ".").startswith("outpace."):
                names = [f"outpace.{alias.name}" for alias in node.names] if node.module == "outpace" else [node.module]
                found += [(path, name) for name in names]
            elif isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names if alias.name.startswith("outpace.")]
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_room_stands_on_a_floor() -> None:
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert rooms == set().union(*FLOORS)


def test_imports_run_downward_only() -> None:
    upward = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path, module in imports()
        if room_of(path) != "__init__" and floor_of(module.split(".")[1]) > floor_of(room_of(path))
    ]
    assert upward == []


def test_the_pipeline_knows_protocols_and_no_concrete_engine_learner_or_worker() -> None:
    concrete = ("outpace.engines", "outpace.learn", "outpace.rollouts", "outpace.weights", "outpace.rewards")
    assert [
        (path.name, module) for path, module in imports() if room_of(path) == "pipeline" and module.startswith(concrete)
    ] == []


def test_pickle_is_used_in_one_place_only() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) and any("pickle" in alias.name for alias in node.names)
    }
    assert users == {"runtime/code.py"}


def test_nothing_evaluates_text_as_code() -> None:
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]
    assert calls == []


@pytest.mark.parametrize("module", NO_TORCH)
def test_a_light_module_loads_no_torch(module: str) -> None:
    program = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_plugin_for_servers_imports_nothing_of_outpace_which_is_not_installed_there() -> None:
    plugin = SOURCE.parent / "outpace_vllm"
    files = sorted(plugin.glob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "outpace"], f"{path.name}: {names}"
