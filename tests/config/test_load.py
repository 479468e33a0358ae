import json
import math
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.config import Config
from outpace.config.load import (
    FIELDS,
    describe_settings,
    dump_settings,
    dump_toml,
    load_config,
    make_config,
    parse_arguments,
    parse_text,
)
from outpace.config.validation import resolve
from outpace.errors import BadInput
from support import examples, names

JSON: st.SearchStrategy[Any] = st.recursive(
    st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
"""Values that a config file can contain."""


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(BadInput) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


@given(st.dictionaries(st.text(), JSON))
def test_task_options_round_trip_through_toml(options: dict[str, Any]) -> None:
    config = make_config({"tasks.options": options})
    assert make_config(tomllib.loads(dump_toml(config))) == config


def test_nan_and_infinity_round_trip_through_toml() -> None:
    written = dump_toml(make_config({"tasks.options": {"bounds": [math.nan, -math.inf]}}))
    not_a_number, lowest = tomllib.loads(written)["tasks"]["options"]["bounds"]
    assert math.isnan(not_a_number)
    assert lowest == -math.inf


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        ({"a": None}, "tasks.options.a", "null"),
        ({"a": [1, {"b": [None]}]}, "tasks.options.a.b", "null"),
        ({"a": date(2020, 1, 1)}, "tasks.options.a", "date"),
        ({"a": (1, 2)}, "tasks.options.a", "tuple"),
        ({"a": {3: 1}}, "tasks.options.a", "3"),
        ({"a": "\ud800"}, "tasks.options.a", r"\ud800"),
        ({"b": {"\ud800": 1}}, "tasks.options.b", r"\ud800"),
    ],
)
def test_task_options_that_toml_cannot_hold_are_refused(options: dict[str, Any], key: str, expected: str) -> None:
    message = refusal(make_config, {"tasks.options": options})
    assert message.startswith(f"{key}: ")
    assert names(message, expected)
    message.encode()


# ------------------------------------------------------------------------------------------------------------ layers


def test_no_settings_give_the_defaults() -> None:
    assert load_config() == Config()


def test_overrides_win_over_the_file_which_wins_over_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "train.toml", "[pacing]\nmax_lag = 4\ndepth = 2\n")
    config = load_config(file, ["--pacing.max_lag", "1"])
    assert (config.pacing.max_lag, config.pacing.depth, config.pacing.groups_per_step) == (1, 2.0, 64)


@pytest.mark.parametrize(
    ("first", "on_top"),
    [
        ({}, {"algorithm.preset": "gspo"}),
        ({"algorithm.preset": "grpo"}, {"algorithm.preset": "gspo"}),
        ({"algorithm.preset": "ppo"}, {"algorithm.preset": "no_correction"}),
        ({"policy_loss.name": "ppo", "correction.masks": ["opsm"]}, {"algorithm.minibatches": 2}),
        ({}, {"governor.enabled": False}),
        ({"kl.coefficient": 0.1}, {"kl.coefficient": 0.0}),
        ({"kl.coefficient": 0.1, "kl.place": "reward"}, {"kl.place": "loss"}),
        ({"replay.fraction": 0.5}, {"replay.fraction": 0.0}),
        ({}, {"filter.uniform": False}),
        ({}, {"algorithm.minibatches": 2}),
        ({}, {"run.deterministic": True}),
        ({}, {"pacing.max_lag": 0}),
        ({"advantage.name": "gae", "learner.lr": 1e-3}, {"learner.lr": 1e-4}),
        ({"tasks.name": "calculator"}, {"tasks.name": "arithmetic"}),
        ({"tasks.name": "calculator"}, {"tasks.name": "guess"}),
        ({"tasks.name": "guess"}, {"tasks.name": "countdown"}),
        ({"tasks.name": "arithmetic"}, {"tasks.name": "calculator"}),
        ({"tasks.name": "arithmetic"}, {"tasks.name": "reasoning_gym/chain_sum"}),
        ({"tasks.name": "calculator"}, {"rollout.environment": "none"}),
        ({"tasks.name": "calculator", "rewards.functions": ["number"]}, {"rollout.function": "m:f"}),
        ({"tasks.name": "calculator", "rewards.functions": ["m:mine"]}, {"tasks.name": "arithmetic"}),
        ({"tasks.name": "calculator", "rollout.environment": "none"}, {"run.steps": 3}),
    ],
)
def test_an_override_of_a_run_equals_making_that_choice_from_the_start(
    tmp_path: Path, first: dict[str, Any], on_top: dict[str, Any]
) -> None:
    first = {**first, "run.dir": "here", "engine.context": 256, "engine.slots": 64}
    file = write(tmp_path, "config.toml", dump_settings(resolve(make_config(first))))
    assert resolve(load_config(file, on_top)) == resolve(make_config({**first, **on_top}))


def test_non_default_settings_of_a_file_survive_a_preset_override(tmp_path: Path) -> None:
    file = write(tmp_path, "config.toml", dump_settings(resolve(make_config({"filter.tolerance": 0.5}))))
    config = resolve(load_config(file, ["--algorithm.preset", "gspo"]))
    assert (config.policy_loss.name, config.filter.tolerance) == ("gspo", 0.5)


def test_an_override_can_fix_a_bad_value_in_a_file_which_is_otherwise_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", '[policy_loss]\nname = "pppo"\n')
    assert load_config(file, {"policy_loss.name": "ppo"}).policy_loss.name == "ppo"
    assert refusal(load_config, file, ["--run.steps=2"]).startswith("policy_loss.name: ")


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_yaml_and_toml_give_the_same_config(tmp_path: Path, suffix: str) -> None:
    toml = write(tmp_path, "a.toml", '[learner]\nlr = 1e-5\n[rewards]\nfunctions = ["a.b:c"]\n[run]\nsteps = 3\n')
    yaml = write(
        tmp_path, f"a{suffix}", "learner:\n  lr: 1e-5\nrewards:\n  functions: ['a.b:c']\nrun: {steps: 3}\neval:\n"
    )
    assert load_config(yaml) == load_config(toml)


def test_an_empty_yaml_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "a.yaml", "# empty\n")) == Config()


def test_a_dict_may_be_nested_or_dotted() -> None:
    assert make_config({"pacing": {"max_lag": 3}, "run.steps": 7}) == load_config(
        None, ["--pacing.max_lag=3", "--run.steps=7"]
    )
    assert load_config(None, {"run": {"steps": 7}}).run.steps == 7


# ------------------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--pacing.max_lag", "3"], {"pacing.max_lag": 3}),
        (["--pacing.max-lag=3"], {"pacing.max_lag": 3}),
        (["--learner.lr", "1e-5"], {"learner.lr": 1e-5}),
        (["--learner.lr=3"], {"learner.lr": 3.0}),
        (["--run.deterministic", "true"], {"run.deterministic": True}),
        (["--run.deterministic=False"], {"run.deterministic": False}),
        (["--run.deterministic", "--run.steps", "2"], {"run.deterministic": True, "run.steps": 2}),
        (["--run.deterministic"], {"run.deterministic": True}),
        (["--rewards.functions", "a, b:c"], {"rewards.functions": ["a", "b:c"]}),
        (["--rewards.functions", '["a", "b,c"]'], {"rewards.functions": ["a", "b,c"]}),
        (["--rewards.functions="], {"rewards.functions": []}),
        (["--rewards.weights", "1,0.5"], {"rewards.weights": [1.0, 0.5]}),
        (["--rewards.weights=none"], {"rewards.weights": None}),
        (["--tasks.name", "none"], {"tasks.name": None}),
        (["--advantage.name", "none"], {"advantage.name": "none"}),
        (["--advantage.normalizer=none"], {"advantage.normalizer": "none"}),
        (["--correction.weight", "none"], {"correction.weight": "none"}),
        (["--correction.masks", "token, veto"], {"correction.masks": ["token", "veto"]}),
        (["--correction.masks=none"], {"correction.masks": []}),
        (["--correction.masks="], {"correction.masks": []}),
        (["--governor.enabled", "--filter.uniform"], {"governor.enabled": True, "filter.uniform": True}),
        (["--critic.shared", "--learner.stream"], {"critic.shared": True, "learner.stream": True}),
        (["--kl.estimator", "none"], {"kl.estimator": None}),
        (["--model.system_prompt", "Be brief = good."], {"model.system_prompt": "Be brief = good."}),
        (["--run.steps", "2", "--run.steps", "5"], {"run.steps": 5}),
    ],
)
def test_arguments_are_read_by_the_type_of_their_setting(arguments: list[str], expected: dict[str, Any]) -> None:
    assert parse_arguments(arguments) == expected


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans()))
def test_a_number_or_flag_written_as_text_reads_back_as_itself(value: float | bool) -> None:
    read = parse_text(json.dumps(value), type(value))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("", {}),
        ("none", {}),
        ("min_terms=2, name = a b ,on=true", {"min_terms": 2, "name": "a b", "on": True}),
        ('operators=["+", "-"],bounds={"low": [1, 2]},text="a,b=\\"c",x=2', {
            "operators": ["+", "-"], "bounds": {"low": [1, 2]}, "text": 'a,b="c', "x": 2,
        }),
        ("a=b=c,d=", {"a": "b=c", "d": ""}),
        ('{"a": 1}', {"a": 1}),
    ],
)  # fmt: skip
def test_a_table_is_written_as_name_value_pairs_or_json(text: str, table: dict[str, Any]) -> None:
    assert parse_arguments(["--tasks.options", text]) == {"tasks.options": table}


@pytest.mark.parametrize("text", ["foo", "=3", "a=1,foo", "a=1,=2", "a=1,,b=2", "foo,a=1", '{"a":1', "[1,2]", "a=[1,2"])
@pytest.mark.parametrize("key", ["tasks.options", "environment.kinds"])
def test_text_that_is_not_a_table_is_refused_in_one_line(key: str, text: str) -> None:
    message = refusal(load_config, None, [f"--{key}={text}"])
    assert message.startswith(f"{key}: ")
    assert names(message, "name=value JSON")


@given(st.dictionaries(st.text(st.characters(exclude_characters="=,", exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name == name.strip() and name[0] != "{"), JSON, min_size=1))  # fmt: skip
def test_a_table_whose_values_are_written_as_json_reads_back_as_itself(table: dict[str, Any]) -> None:
    text = ",".join(f"{name}={json.dumps(value)}" for name, value in table.items())
    assert parse_text(text, dict[str, Any]) == table


@given(st.lists(st.text()), st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_a_list_written_as_json_reads_back_as_itself(texts: list[str], numbers: list[float]) -> None:
    assert parse_text(json.dumps(texts), list[str]) == texts
    assert parse_text(json.dumps(numbers), list[float]) == numbers
    assert parse_text(",".join(map(repr, numbers)), list[float] | None) == numbers


@examples(30)  # times more than 200 keys
@given(st.text())
def test_any_text_is_either_accepted_or_refused_in_one_line_that_names_the_key(text: str) -> None:
    for key in FIELDS:
        message = attempt(key, text)
        assert message is None or (message.startswith(f"{key}: ") and len(message.splitlines()) == 1)


def attempt(key: str, text: str) -> str | None:
    try:
        load_config(None, [f"--{key}={text}"])
    except BadInput as refused:
        return str(refused)
    return None


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"pacing": {"max_lg": 1}}, "pacing.max_lg", "pacing.max_lag"),
        ({"learner": {"max_lag": 1}}, "learner.max_lag", "pacing.max_lag"),
        ({"paceing": {}}, "paceing", "pacing?"),
        ({"paceing.max_lag": 1}, "paceing.max_lag", "pacing.max_lag"),
        ({"max_lag": 1}, "max_lag", "pacing.max_lag"),
        ({"weights": {"zzzzzzzz": 1}}, "weights.zzzzzzzz", "every update"),
        ({"zzzzzzzz": {}}, "zzzzzzzz", "model pacing"),
        ({"run": {3: 1}}, "run.3", "steps seed"),
        ({7: {}}, "7", "model pacing"),
        ({"pacing": 3}, "pacing", "section 3"),
        ({"pacing": {"max_lag": "two"}}, "pacing.max_lag", "integer 'two'"),
        ({"pacing": {"max_lag": True}}, "pacing.max_lag", "integer True"),
        ({"pacing": {"max_lag": 1.5}}, "pacing.max_lag", "integer"),
        ({"pacing": {"max_lag": None}}, "pacing.max_lag", "integer None"),
        ({"pacing": {"max_lag": -1}}, "pacing.max_lag", "greater 0 -1"),
        ({"pacing": {"on_stale": "wate"}}, "pacing.on_stale", "'wait' 'requeue' 'drop' 'train'"),
        ({"learner": {"lr": "fast"}}, "learner.lr", "number"),
        ({"learner": {"lr": True}}, "learner.lr", "number"),
        ({"learner": {"lr": float("nan")}}, "learner.lr", "nan"),
        ({"learner": {"lr": 0}}, "learner.lr", "greater 0"),
        ({"rollout": {"timeout_s": float("inf")}}, "rollout.timeout_s", "finite"),
        ({"run": {"deterministic": 1}}, "run.deterministic", "true false"),
        ({"run": {"deterministic": "yes"}}, "run.deterministic", "true false 'yes'"),
        ({"run": {"seed": -1}}, "run.seed", "greater 0 -1"),
        ({"rewards": {"functions": 3}}, "rewards.functions", "list"),
        ({"rewards": {"functions": ["a", 3]}}, "rewards.functions", "2 string 3"),
        ({"rewards": {"functions": "[a"}}, "rewards.functions", "list"),
        ({"model": {"path": 3}}, "model.path", "string"),
        ({"model": {"path": "a\nb"}, "run": {"steps": "a\nb"}}, "run.steps", "integer"),
        ({"run": {"steps": 0, "seed": -1}}, "run.steps", "1 more"),
        ({"advantage": {"name": 3}}, "advantage.name", "string 3"),
        ({"advantage": {"name": len}}, "advantage.name", "path/to/file.py:function"),
        ({"policy_loss": {"name": len}}, "policy_loss.name", "path/to/file.py:function"),
        ({"algorithm": {"importance_cap": 2.0}}, "algorithm.importance_cap", "policy_loss.cap"),
        ({"algorithm": {"surrogate": "ppo"}}, "algorithm.surrogate", "policy_loss.name"),
        ({"algorithm.anchor": "proximal"}, "algorithm.anchor", "policy_loss.old_policy proximal recomputed"),
        ({"algorithm.baseline": "group_mean"}, "algorithm.baseline", "advantage.name"),
        ({"algorithm.filter_uniform": True}, "algorithm.filter_uniform", "filter.uniform"),
        ({"algorithm.uniform_tolerance": 0.1}, "algorithm.uniform_tolerance", "filter.tolerance"),
        ({"algorithm.beta": 0.1}, "algorithm.beta", "kl.coefficient"),
        ({"kl": {"beta": 0.1}}, "kl.beta", "kl.coefficient"),
        ({"learner.learning_rate": 0.1}, "learner.learning_rate", "learner.lr"),
        ({"rollout": {"n": 4}}, "rollout.n", "rollout.group_size"),
        ({"rollout.num_generations": 4}, "rollout.num_generations", "rollout.group_size"),
        ({"algorithm.epsilon": 0.2}, "algorithm.epsilon", "policy_loss.clip_low policy_loss.clip_high"),
        ({"algorithm.loss_type": "grpo"}, "algorithm.loss_type", "algorithm.preset"),
    ],
)
def test_bad_values_are_refused_in_one_line(values: dict[str, Any], key: str, expected: str) -> None:
    message = refusal(make_config, values)
    assert message.startswith(f"{key}: ")
    assert names(message, expected)


@pytest.mark.parametrize(
    ("arguments", "start", "expected"),
    [
        (["pacing.max_lag", "3"], "pacing.max_lag: ", "--section.key"),
        (["--pacing.max_lag"], "pacing.max_lag: ", "integer"),
        (["--pacing.max_lag", "--run.steps", "2"], "pacing.max_lag: ", "integer"),
        (["--pacing.max_lg", "3"], "pacing.max_lg: ", "pacing.max_lag"),
        (["--max_lag", "3"], "max_lag: ", "pacing.max_lag"),
        (["--pacing.max_lag", "-1"], "pacing.max_lag: ", "-1"),
        (["--run.deterministic", "maybe"], "run.deterministic: ", "'maybe'"),
        (["--"], ": ", "model pacing"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: list[str], start: str, expected: str) -> None:
    message = refusal(load_config, None, arguments)
    assert message.startswith(start)
    assert names(message, expected)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.toml", b"[run]\nsteps = \n", "TOML 2"),
        ("a.toml", b"[run]\nsteps = 1\nsteps = 2\n", "TOML 3"),
        ("a.toml", b"[run]\ndir = '''\n", "TOML 3"),
        ("a.toml", b'[run]\ndir = "\xff"\n', "utf-8"),
        ("a.yaml", b"run:\n  steps: [1\n", "YAML 3"),
        ("a.yaml", b"run:\n  steps: 1\n  steps: 2\n", "steps 3"),
        ("a.yaml", b"run: \x00\n", "YAML"),
        ("a.yaml", b"- run\n", "list"),
        ("a.json", b"{}", ".toml .yaml .yml"),
    ],
)
def test_an_unreadable_file_is_refused_with_its_path_and_line(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    message = refusal(load_config, file)
    assert message.startswith(f"{file}: ")
    assert names(message.removeprefix(f"{file}: "), expected)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    missing, folder = tmp_path / "none.toml", tmp_path / "folder.toml"
    assert refusal(load_config, missing).startswith(f"{missing}: ")
    folder.mkdir()
    message = refusal(load_config, folder)
    assert message.startswith(f"{folder}: ")
    assert names(message.removeprefix(f"{folder}: "), "directory")


# --------------------------------------------------------------------------------------------------------- round trips

words = st.text(st.characters(codec="utf-8"), max_size=20)


@settings(deadline=None)
@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "model.system_prompt": words,
            "model.trust_remote_code": st.booleans(),
            "rewards.functions": st.lists(words, unique=True),
            "rollout.stop": st.lists(words.filter(bool)),
            "learner.lr": st.floats(min_value=1e-300, max_value=1e300),
            "pacing.depth": st.floats(min_value=0, max_value=1e6),
            "pacing.on_stale": st.sampled_from(["wait", "drop"]),
            "run.steps": st.integers(1, 2**62),
            "run.seed": st.integers(0, 2**63 - 1),
        },
    )
)
def test_a_dumped_config_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "dumped.toml"
    config = make_config(values)
    file.write_text(dump_toml(config), encoding="utf-8")
    assert load_config(file) == config


def test_a_resolved_config_loads_back_equal(tmp_path: Path) -> None:
    config = resolve(make_config({"run.deterministic": True}))
    assert load_config(write(tmp_path, "config.toml", dump_toml(config))) == config


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_none_in_a_file_is_a_string_where_it_is_a_valid_name(tmp_path: Path, suffix: str) -> None:
    text = {".toml": '[correction]\nweight = "none"\n', ".yaml": "correction:\n  weight: none\n"}[suffix]
    assert load_config(write(tmp_path, f"a{suffix}", text)).correction.weight == "none"


def test_none_is_the_default_wherever_it_is_legal() -> None:
    # dump_toml leaves None out and relies on this
    for key, info in FIELDS.items():
        if type(None) in getattr(info.annotation, "__args__", ()):
            assert info.default is None, key


# --------------------------------------------------------------------------------------------------------------- help


def test_help_lists_every_setting_with_type_default_and_meaning() -> None:
    text = describe_settings()
    for key, info in FIELDS.items():
        assert f"--{key}  " in text
        assert info.description, f"{key} has no docstring"
    lines = {line.split()[0]: line for line in text.splitlines() if line.lstrip().startswith("--")}
    assert names(lines["--pacing.max_lag"], "integer 4")
    assert names(lines["--pacing.on_stale"], 'wait|requeue|drop|train "wait"')
    assert names(lines["--rewards.weights"], "list number none")
    assert names(lines["--advantage.name"], "text")
    assert names(lines["--correction.weight"], "none|token|sequence")
    assert not any("null" in line for line in lines.values())


def test_importing_the_config_loads_no_heavy_package() -> None:
    script = (
        "import sys, outpace.config.load, outpace.config.validation;"
        "print([name for name in ('torch', 'transformers', 'datasets', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
