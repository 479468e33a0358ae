"""The templates in examples/cluster: they parse, and the commands that they run are valid.

The scripts run here with stand-ins for SLURM and outpace on the path, which record their arguments."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from outpace import cli
from outpace.config import Config
from outpace.config.load import load_config
from outpace.config.validation import resolve
from outpace.hardware.placement import GpuAssignment, assign_gpus, assign_servers
from test_docs import KEY, KNOWN, ROOT, assert_parses

CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
CONFIGS = sorted(CLUSTER.glob("*.toml"))
SKYPILOT = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
EIGHT = [str(index) for index in range(8)]
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}

RECORD = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")
if "TORCHRUN" in os.environ:
    open(os.environ["RECORD"] + ".torchrun", "w").write(os.environ["TORCHRUN"])
"""
STAND_INS = {
    "outpace": RECORD,
    "scontrol": '#!/bin/bash\nfor index in $(seq 1 "$NODES"); do echo "node$index"; done\n',
    "srun": '#!/bin/bash\nuntil [ "$1" = outpace ] || [ "$1" = bash ]; do shift; done\n'
    'SLURM_PROCID=0 "$@"\n[ "$1" = bash ] || exec sleep 60\n',
    "torchrun": f"""#!{sys.executable}
import os, sys
module = sys.argv.index("-m")
os.environ["TORCHRUN"] = " ".join(sys.argv[1:module])
os.execvp("outpace", sys.argv[module + 1 :])
""",
    "curl": '#!/bin/bash\nuntil grep -q serve "$RECORD"; do sleep 0.1; done 2>/dev/null\n',
}


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if torch were built with CUDA, whatever build is installed."""
    monkeypatch.setattr("outpace.hardware.placement.torch_has_cuda", lambda: True)


def commands_of(script: str, tmp_path: Path, **variables: str) -> list[list[str]]:
    """Run a script in the checkout and return the arguments of every call of outpace."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    record = tmp_path / "record"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RECORD": str(record),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_PER_NODE": "8",
        "SLURM_CPUS_PER_TASK": "32",
        "NODES": "2",
        "RUN": str(tmp_path / "run"),
        "WEIGHTS_DIR": str(tmp_path / "weights"),
        **variables,
    }
    subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, check=True, timeout=60)
    return [json.loads(line) for line in record.read_text().splitlines()]


def config_of(words: list[str]) -> Config:
    """The config of a command of outpace, without `engine.urls` for `outpace serve`, as that command reads it."""
    assert_parses(words)
    known, settings = cli.split_settings(words)
    arguments = cli._parser().parse_args(known)
    return load_config(ROOT / arguments.config, settings)


def shown(assignments: list[GpuAssignment]) -> list[str]:
    return ["+".join(each.gpus) for each in assignments]


def test_there_are_templates_for_slurm_skypilot_docker_and_one_node() -> None:
    names = {"one_node.sh", "torchrun.sh", "slurm_one_node.sh", "slurm_many_nodes.sh"}
    assert {path.name for path in SCRIPTS} == names
    assert (CLUSTER / "Dockerfile").exists()


@pytest.mark.parametrize("script", [*(path.read_text() for path in SCRIPTS), SKYPILOT["setup"], SKYPILOT["run"]])
def test_every_script_parses(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("path", [path for path in CLUSTER.iterdir() if path.is_file()], ids=lambda path: path.name)
def test_every_setting_in_a_template_exists(path: Path) -> None:
    named = {f"{section}.{key}" for section, key in KEY.findall(path.read_text())}
    assert named <= set(KNOWN)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_resolves(path: Path) -> None:
    config = resolve(load_config(path, []))
    assert config.learner.devices > 1
    assert resolve(config) == config


@pytest.mark.parametrize("script", ["one_node.sh", "slurm_one_node.sh"])
def test_on_one_node_half_of_the_gpus_train_and_half_sample(script: str, tmp_path: Path) -> None:
    (words,) = commands_of(f"bash examples/cluster/{script}", tmp_path)
    placement = assign_gpus(resolve(config_of(words)), EIGHT)
    assert shown(placement.learners) == ["0", "1", "2", "3"]
    assert shown(placement.engines) == ["4", "5", "6", "7"]
    assert placement.transport == "memory"


def test_a_second_start_on_one_node_continues_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    (words,) = commands_of("bash examples/cluster/one_node.sh", tmp_path)
    assert words == ["train", "--resume", str(run)]
    assert_parses(words)


@pytest.mark.parametrize("nodes", [2, 8])
@pytest.mark.parametrize(("tensor", "groups"), [("8", ["+".join(EIGHT)]), ("4", ["0+1+2+3", "4+5+6+7"])])
def test_on_many_nodes_the_first_trains_and_the_others_sample(
    nodes: int, tensor: str, groups: list[str], tmp_path: Path
) -> None:
    script = "bash examples/cluster/slurm_many_nodes.sh"
    calls = commands_of(script, tmp_path, NODES=str(nodes), TENSOR_PARALLEL=tensor)
    serve, train = sorted(calls, key=lambda words: words[0])
    assert "--all-gpus" in serve
    served = config_of(serve)
    assert shown(assign_servers(served, EIGHT)) == groups
    config = resolve(config_of(train))
    ports = range(served.launch.port, served.launch.port + len(groups))
    assert config.engine.urls == [f"http://node{node}:{port}" for node in range(2, nodes + 1) for port in ports]
    assert config.weights.dir == str(tmp_path / "weights")
    placement = assign_gpus(config, EIGHT)
    assert shown(placement.learners) == EIGHT
    assert placement.transport == "files"


def torchrun_of(tmp_path: Path) -> dict[str, str]:
    """The options that a script has given to torchrun."""
    words = (tmp_path / "record.torchrun").read_text().split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_torchrun_on_one_node_starts_a_process_for_every_gpu_of_the_learner(tmp_path: Path) -> None:
    (words,) = commands_of("bash examples/cluster/torchrun.sh", tmp_path, NODES="1")
    options, config = torchrun_of(tmp_path), resolve(config_of(words))
    assert (options["--nnodes"], options["--nproc-per-node"]) == ("1", "4")
    assert config.learner.devices == 4
    assert shown(assign_gpus(config, EIGHT, ranks=4).engines) == ["4", "5", "6", "7"]


def test_torchrun_on_several_nodes_uses_the_servers_of_others(tmp_path: Path) -> None:
    place = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node1"}
    (words,) = commands_of("bash examples/cluster/torchrun.sh", tmp_path, **place, URLS="http://node3:8000")
    options, config = torchrun_of(tmp_path), resolve(config_of(words))
    assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "8")
    assert (options["--node-rank"], options["--master-addr"]) == ("1", "node1")
    assert config.learner.devices == 16
    placement = assign_gpus(config, EIGHT, ranks=8)
    assert shown(placement.learners) == EIGHT
    assert placement.transport == "files"


def test_a_second_start_with_torchrun_continues_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    (words,) = commands_of("bash examples/cluster/torchrun.sh", tmp_path, NODES="1")
    assert words == ["train", "--resume", str(run), "--learner.devices", "4"]
    assert_parses(words)


def test_on_many_nodes_the_learner_can_have_several(tmp_path: Path) -> None:
    script = "bash examples/cluster/slurm_many_nodes.sh"
    _, train = sorted(commands_of(script, tmp_path, NODES="8", LEARNER_NODES="2"), key=lambda words: words[0])
    options, config = torchrun_of(tmp_path), resolve(config_of(train))
    assert (options["--nnodes"], options["--nproc-per-node"], options["--node-rank"]) == ("2", "8", "0")
    assert options["--master-addr"] == "node1"
    assert config.learner.devices == 16
    assert config.engine.urls == [f"http://node{node}:8000" for node in range(3, 9)]


def test_on_many_nodes_the_gpus_per_node_are_those_of_the_job(tmp_path: Path) -> None:
    script = "bash examples/cluster/slurm_many_nodes.sh"
    calls = commands_of(script, tmp_path, NODES="4", LEARNER_NODES="2", SLURM_GPUS_PER_NODE="h100:4")
    serve, train = sorted(calls, key=lambda words: words[0])
    assert shown(assign_servers(config_of(serve), EIGHT[:4])) == ["0+1+2+3"]
    assert torchrun_of(tmp_path)["--nproc-per-node"] == "4"
    assert config_of(train).learner.devices == 8


@pytest.mark.parametrize(
    ("script", "variable", "value"),
    [
        ("slurm_many_nodes.sh", "TENSOR_PARALLEL", "3"),
        ("slurm_many_nodes.sh", "TENSOR_PARALLEL", "16"),
        ("slurm_many_nodes.sh", "LEARNER_NODES", "2"),
        ("torchrun.sh", "NODE_RANK", ""),
    ],
)
def test_a_wrong_variable_is_refused_in_one_line(
    script: str, variable: str, value: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        commands_of(f"bash examples/cluster/{script}", tmp_path, **{variable: value})
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{variable}:" in line


def test_a_second_start_on_many_nodes_continues_the_run_with_the_servers_of_this_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    calls = commands_of("bash examples/cluster/slurm_many_nodes.sh", tmp_path)
    train = next(words for words in calls if words[0] == "train")
    assert train[:3] == ["train", "--resume", str(run)]
    assert "--engine.urls" in train


def test_the_servers_on_other_nodes_have_the_model_and_context_of_the_run(tmp_path: Path) -> None:
    serve, train = sorted(commands_of("bash examples/cluster/slurm_many_nodes.sh", tmp_path), key=lambda each: each[0])
    served, trained = config_of(serve), config_of(train)
    assert served.model == trained.model
    assert served.engine.context == trained.engine.context


def test_skypilot_runs_the_one_node_launch(tmp_path: Path) -> None:
    assert SKYPILOT["resources"]["accelerators"].endswith(":8")
    (words,) = commands_of(SKYPILOT["run"].replace("$HOME/outpace/bin:", ""), tmp_path)
    assert assign_gpus(resolve(config_of(words)), EIGHT).learners
    checked = [line.partition("bin/outpace ")[2] for line in SKYPILOT["setup"].splitlines() if "bin/outpace " in line]
    for line in checked:
        assert_parses(shlex.split(line))


def dockerfile() -> list[tuple[str, str]]:
    """Return every instruction with its arguments."""
    lines = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    code = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in code)]


def test_the_dockerfile_has_only_valid_instructions_and_copies_files_that_exist() -> None:
    instructions = dockerfile()
    assert instructions[0][0] == "FROM"
    assert {word for word, _ in instructions} <= INSTRUCTIONS
    for word, rest in instructions:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
        if word == "RUN":
            subprocess.run(["bash", "-n"], input=rest, text=True, check=True)
        if word == "ENV":
            assert "=" in rest


def test_the_image_runs_the_one_node_launch() -> None:
    command: list[Any] = json.loads(dict(dockerfile())["CMD"])
    assert command[0] == "bash"
    assert (ROOT / command[1]).exists()
