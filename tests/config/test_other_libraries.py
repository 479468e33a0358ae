"""Setting names of other libraries are refused with the outpace equivalent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outpace.config.load import KNOWN, SECTIONS, load_config, make_config
from outpace.config.other_libraries import EQUIVALENTS, RENAMED, equivalent_setting
from outpace.errors import BadInput
from support import names

ROOT = Path(__file__).parents[2]
SETTING = re.compile(rf"\b({'|'.join(SECTIONS)})\.(\w+)")


def test_every_equivalent_names_settings_that_exist() -> None:
    for name, found in EQUIVALENTS.items():
        named = {*found.settings, *(".".join(match) for match in SETTING.findall(found.note))}
        assert named <= set(KNOWN), name
        assert found.settings or found.note, name


def test_no_equivalent_shadows_an_outpace_setting() -> None:
    for name in EQUIVALENTS:
        remedy = equivalent_setting(name)
        assert remedy is not None, name
        assert name not in KNOWN or name in remedy


def test_settings_that_were_renamed_exist_under_their_new_names() -> None:
    assert set(RENAMED.values()) <= set(KNOWN)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("num_generations", "rollout.group_size"),
        ("max_completion_length", "rollout.max_tokens"),
        ("--num-generations", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("actor_rollout_ref.actor.optim.lr", "learner.lr"),
        ("critic.optim.lr", "critic.lr"),
        ("trainer.optim.lr", "learner.lr"),
        ("orchestrator.max_async_level", "pacing.max_lag"),
        ("+algorithm.adv_estimator", "advantage.name"),
    ],
)
def test_a_name_is_found_with_or_without_its_sections(name: str, setting: str) -> None:
    remedy = equivalent_setting(name)
    assert remedy is not None
    assert names(remedy, setting)


def test_the_settings_of_the_page_for_verl_are_those_of_the_hints() -> None:
    table = (ROOT / "docs" / "from_verl.md").read_text().partition("## Settings")[2]
    rows = [[re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[:2]] for row in table.split("\n| ")[2:]]
    for theirs, ours in rows:
        for name, setting in zip(theirs, ours if len(ours) > 1 else (ours or [""]) * len(theirs), strict=True):
            remedy = equivalent_setting(name)
            assert remedy is not None, name
            assert names(remedy, setting), name
    assert len(rows) > 20


def test_an_unknown_name_has_no_equivalent() -> None:
    assert equivalent_setting("pacing.max_lagg") is None


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("verl.yaml", "actor_rollout_ref:\n  hybrid_engine: true\n  rollout: {n: 8}\n", "actor_rollout_ref.rollout.n"),
        ("verl.yaml", "algorithm:\n  kl_ctrl: {kl_coef: 0.1}\n", "algorithm.kl_ctrl.kl_coef"),
        ("prime.toml", "[orchestrator]\nrollouts_per_example = 8\n", "orchestrator.rollouts_per_example"),
        ("trl.yaml", "num_generations: 8\n", "num_generations"),
    ],
)
def test_a_file_of_another_library_is_refused_with_the_equivalent(
    tmp_path: Path, file: str, text: str, key: str
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(BadInput, match=rf"^{re.escape(key)}: .*{SETTING.pattern}"):
        load_config(tmp_path / file)


@pytest.mark.parametrize("values", [{"num_generations": 8}, {"rollout": {"num_generations": 8}}])
def test_a_dict_with_names_of_another_library_is_refused_with_the_equivalent(values: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"rollout\.group_size"):
        make_config(values)


def test_every_grpo_field_with_a_counterpart_is_listed() -> None:
    trl = pytest.importorskip("trl")
    unlisted = {field for field in trl.GRPOConfig.__dataclass_fields__ if equivalent_setting(field) is None}
    assert not unlisted & {key.rpartition(".")[2] for key in KNOWN}
