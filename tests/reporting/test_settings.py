"""Settings of trackers: which are refused, and what an override drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import load_config, make_config
from outpace.config.other_libraries import equivalent_setting
from outpace.errors import BadInput
from outpace.run.reporting import report_order
from support import naming, resolved


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"run.report_to": ["wandbb"]}, ("run.report_to", "wandbb", "wandb?")),
        ({"run.report_to": ["none"]}, ("run.report_to", "[]")),
        ({"run.report_to": ["neptune"]}, ("run.report_to", "neptune", "trackio, wandb, tensorboard, mlflow")),
        ({"run.report_to": ["wandb", "wandb"]}, ("run.report_to", "wandb")),
        ({"run.report_to": ["a.py:Mine", "b.py:Mine"]}, ("run.report_to", "Mine")),
        ({"report.project": "mine"}, ("report.project", "run.report_to")),
        ({"run.report_to": ["wandb"], "report.tables_every": 0}, ("report.tables_every",)),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=naming(*named)):
        make_config(settings)


def test_the_name_defaults_to_that_of_the_run_directory(tmp_path: Path) -> None:
    config = resolved({"run.report_to": ["wandb"]})
    assert report_order(config, tmp_path / "lucky").name == "lucky"
    named = resolved({"run.report_to": ["wandb"], "report.name": "mine"})
    assert report_order(named, tmp_path / "lucky").name == "mine"


def test_a_reference_and_the_python_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").touch()
    config = resolved({"run.report_to": ["wandb", "mine.py:Tracker"], "report.python": "python"})
    assert config.run.report_to == ["wandb", f"{tmp_path}/mine.py:Tracker"]
    assert config.report.python == f"{tmp_path}/python"


def test_turning_trackers_off_drops_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[run]\nreport_to = ["wandb"]\n[report]\nproject = "mine"\n')
    assert load_config(file).report.project == "mine"
    for off in ("", "[]"):
        config = load_config(file, ["--run.report_to", off])
        assert (config.run.report_to, config.report.project) == ([], "outpace")
    assert load_config(file, ["--run.report_to", "mlflow"]).report.project == "mine"


@pytest.mark.parametrize(
    ("name", "setting"),
    [("report_to", "run.report_to"), ("wandb_project", "report.project"), ("project", "report.project")],
)
def test_names_of_other_libraries_lead_to_the_setting(name: str, setting: str) -> None:
    assert setting in (equivalent_setting(name) or "")
