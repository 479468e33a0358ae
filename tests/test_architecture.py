"""Rules for the source: import layers, no cycles, file sizes, no pickle on sockets, no evaluated text."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "outpace"

LAYERS: list[set[str]] = [
    {"types", "protocols", "errors"},
    {"runtime"},
    {"algorithms"},
    {"config"},
    {"hardware"},
    {"models", "tasks"},
    {"weights", "checkpoint", "engines", "learner", "rewards", "rollouts", "monitoring"},
    {"controller"},
    {"run"},
    {"trainer", "commands", "simulator"},
    {"compat"},
    {"cli", "__main__"},
]
"""Bottom up: a package imports from its own layer and from those below."""

NO_TORCH = (
    "outpace.cli",
    "outpace.trainer",
    "outpace.algorithms",
    "outpace.commands.play",
    "outpace.config.validation",
    "outpace.controller.driver",
    "outpace.engines.fleet",
    "outpace.engines.server.build",
    "outpace.monitoring.console",
    "outpace.monitoring.reporter",
    "outpace.rewards.grader_process",
    "outpace.rewards.registry",
    "outpace.rollouts.build",
    "outpace.rollouts.environments.child",
    "outpace.rollouts.worker",
    "outpace.runtime.child",
    "outpace.tasks.produced",
    "outpace.tasks.registry",
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_LAYER_LINES = 600


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def layer_of(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


def imports() -> list[tuple[Path, str]]:
    """Every (file, outpace module it imports), anywhere in the file."""
    found = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and (node.module + ".").startswith("outpace."):
                names = [f"outpace.{alias.name}" for alias in node.names] if node.module == "outpace" else [node.module]
                found += [(path, name) for name in names]
            elif isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names if alias.name.startswith("outpace.")]
    return found


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_package_and_root_module_is_in_one_layer() -> None:
    packages = {package_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert packages == set().union(*LAYERS)


def test_packages_import_only_from_their_layer_and_below() -> None:
    upward = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path, module in imports()
        if package_of(path) != "__init__" and layer_of(module.split(".")[1]) > layer_of(package_of(path))
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph: dict[str, set[str]] = {module_name(path): set() for path in SOURCE.rglob("*.py")}
    for path, tree in modules().items():
        for node in runtime_imports(tree.body):
            base = node.module or ""
            for target in (f"{base}.{alias.name}" for alias in node.names):
                found = target if target in graph else base
                if found in graph and found != module_name(path):
                    graph[module_name(path)].add(found)
    graph["outpace.algorithms"].clear()  # the package registers the built-in functions of its own modules
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def module_name(path: Path) -> str:
    return ".".join(("outpace", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def runtime_imports(body: list[ast.stmt]) -> Iterator[ast.ImportFrom]:
    """The imports that run when the module is loaded: not those inside functions or for the type checker."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try | ast.If) and "TYPE_CHECKING" not in ast.unparse(node).partition("\n")[0]:
            yield from runtime_imports(node.body)


def test_no_public_class_name_is_defined_twice() -> None:
    names = Counter(
        node.name
        for path, tree in modules().items()
        for node in tree.body
        if package_of(path) != "compat"  # the names of other libraries
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_files_and_functions_stay_readable_in_length() -> None:
    too_long = []
    for path, tree in modules().items():
        if (lines := path.read_text().count("\n")) > MAX_FILE_LINES:
            too_long.append(f"{path.relative_to(SOURCE)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{path.relative_to(SOURCE)}: {node.name}, {lines} lines")
    assert too_long == []


def test_layers_for_other_libraries_stay_thin() -> None:
    for layer in [path for path in (SOURCE / "compat").iterdir() if path.suffix != ".py" and list(path.glob("*.py"))]:
        lines = sum(path.read_text().count("\n") for path in layer.rglob("*.py"))
        assert lines < MAX_LAYER_LINES, layer.name


def test_the_controller_uses_protocols_not_concrete_engines_learners_or_workers() -> None:
    concrete = ("outpace.engines", "outpace.learner", "outpace.rollouts", "outpace.weights", "outpace.rewards")
    assert [
        (path.name, module)
        for path, module in imports()
        if package_of(path) == "controller" and module.startswith(concrete)
    ] == []


def test_pickle_is_used_in_one_place_only() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any("pickle" in alias.name for alias in node.names)
    }
    assert users == {"runtime/by_value.py"}


def test_nothing_evaluates_text_as_code() -> None:
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]
    assert calls == []


def test_light_modules_do_not_import_torch() -> None:
    steps = [f"import {module}\nif 'torch' in sys.modules: sys.exit({module!r})" for module in NO_TORCH]
    done = subprocess.run([sys.executable, "-c", "\n".join(["import sys", *steps])], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_vllm_plugin_does_not_import_outpace() -> None:
    plugin = SOURCE.parent / "outpace_vllm"  # runs in the server's environment, where outpace is not installed
    files = sorted(plugin.glob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "outpace"], f"{path.name}: {names}"
