from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outpace.weights.files import plugin_path

PROGRAM = """
import importlib.metadata, sys, types
(found,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.dist.name == "outpace-vllm"]
registered = {}
class Factory:
    _registry = registered
    @classmethod
    def register_engine(cls, name, module, class_name):
        assert name not in registered
        registered[name] = (module, class_name)
vllm = types.ModuleType("vllm.distributed.weight_transfer")
vllm.WeightTransferEngineFactory = Factory
for name in ("vllm", "vllm.distributed", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.core"):
    sys.modules[name] = types.ModuleType(name)
class Core:
    def collective_rpc(self):
        pass
sys.modules["vllm.v1.engine.core"].EngineCoreProc = Core
sys.modules["vllm.distributed.weight_transfer"] = vllm
register = found.load()
register()
register()
assert registered == {"outpace": ("outpace_vllm.engine", "OutpaceTransferEngine")}, registered
assert "torch" not in sys.modules
import outpace_vllm
print(outpace_vllm.__file__)
"""


def test_a_python_with_the_plugin_path_finds_the_plugin_and_can_register_it_twice(tmp_path: Path) -> None:
    path = plugin_path(tmp_path)
    assert plugin_path(tmp_path) == path, "writing it again changes nothing"
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(path))


def test_the_plugin_path_contains_only_the_plugin(tmp_path: Path) -> None:
    path = plugin_path(tmp_path)
    assert {entry.name for entry in path.iterdir()} == {"outpace_vllm", "outpace_vllm-0.dist-info"}
