from pathlib import Path
from typing import Any

import pytest

from outpace.config.defaults import get_value
from outpace.config.load import KNOWN, make_config
from outpace.config.presets import PRESETS
from outpace.config.validation import resolve
from outpace.errors import BadInput
from support import names

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def resolved(preset: str | None, **values: Any) -> Any:
    return resolve(make_config({"algorithm.preset": preset, **{k.replace("__", "."): v for k, v in values.items()}}))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_and_all_its_values_are_used(name: str) -> None:
    config = resolved(name)
    assert {key: get_value(config, key) for key in PRESETS[name].values} == dict(PRESETS[name].values)
    assert resolve(config) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_its_functions_and_sets_only_algorithm_settings(name: str) -> None:
    assert {"policy_loss.name", "advantage.name"} <= set(PRESETS[name].values) <= set(KNOWN)
    assert {key.partition(".")[0] for key in PRESETS[name].values} <= {
        "policy_loss",
        "advantage",
        "correction",
        "filter",
    }


def test_no_preset_sets_a_key_that_may_have_no_value() -> None:
    # if the user unset it, the dump would omit it and loading would restore the preset's value
    assert {key for preset in PRESETS.values() for key in preset.values} & {
        "policy_loss.dual_clip",
        "advantage.k",
    } == set()


def test_no_two_presets_resolve_to_the_same_thing() -> None:
    seen: dict[str, str] = {}
    for name in PRESETS:
        config = resolved(name, run__dir="here")
        text = config.model_copy(
            update={"algorithm": config.algorithm.model_copy(update={"preset": None})}
        ).model_dump_json()
        assert text not in seen, f"{name} and {seen[text]}"
        seen[text] = name


def test_the_preset_called_default_is_the_default() -> None:
    default, nothing = resolved("default", run__dir="here"), resolved(None, run__dir="here")
    for section in ("policy_loss", "advantage", "correction", "filter"):
        assert getattr(default, section) == getattr(nothing, section)


def test_user_settings_win_over_the_preset() -> None:
    config = resolved("dapo", policy_loss__clip_high=0.5, filter__uniform=False)
    assert (config.policy_loss.clip_low, config.policy_loss.clip_high, config.filter.uniform) == (0.2, 0.5, False)


def test_a_preset_does_not_set_parameters_of_functions_that_it_did_not_choose() -> None:
    config = resolved("gspo", policy_loss__name="ppo")
    assert (config.policy_loss.clip_low, config.policy_loss.aggregation) == (0.2, "token_mean")
    assert config.advantage.name == "grpo"
    other = resolved("lite_ppo", advantage__name="rloo")
    assert (other.advantage.normalizer, other.policy_loss.name) == ("none", "ppo")


def test_a_preset_parameter_that_is_no_longer_read_is_left_out() -> None:
    config = resolved("icepop", correction__masks=[], correction__weight="none")
    assert config.correction.model_extra == {}


@pytest.mark.parametrize(
    ("name", "expected", "lists_all"),
    [
        ("grpo2", "grpo", False),
        ("DAPO", "dapo", False),
        ("zzz", "'zzz'", True),
        ("a\nb", r"'a\nb'", True),
    ],
)
def test_an_unknown_preset_is_refused_with_a_suggestion(name: str, expected: str, lists_all: bool) -> None:
    with pytest.raises(BadInput) as caught:
        make_config({"algorithm.preset": name})
    assert str(caught.value).startswith("algorithm.preset: ")
    assert names(str(caught.value), expected)
    assert all(names(str(caught.value), preset) for preset in PRESETS) == lists_all
    assert "\n" not in str(caught.value)


def test_every_preset_is_in_the_document_with_its_summary() -> None:
    text = DOCUMENT.read_text()
    assert [name for name, preset in PRESETS.items() if f"| `{name}` | {preset.summary} |" not in text] == []
