"""`outpace train` with files of Axolotl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outpace.compat.axolotl import keys
from outpace.compat.axolotl.config import FIELDS
from outpace.compat.axolotl.data import open_tasks
from outpace.config import Config
from outpace.config.load import load_config, user_settings
from outpace.errors import BadInput
from support import run_command

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "axolotl_grpo" / "config.yaml"

TRANSFORM = """
def questions(cfg, *args, **kwargs):
    def transform(example, tokenizer=None):
        assert cfg.base_model == "starter" and cfg.no_such_key is None and tokenizer is not None
        return {"prompt": example["question"] + "?", "answer": int(example["answer"])}
    return transform, {"remove_columns": ["question", "not_there"]}

def raises(cfg):
    return lambda example: {"prompt": example["no_such_column"]}

def reward(completions, answer, **kwargs):
    return [1.0] * len(completions)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module and 40 rows."""
    (tmp_path / "my_rewards.py").write_text(TRANSFORM)
    rows = [{"question": f"{number}+1", "answer": str(number + 1), "level": number} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(folder: Path, **values: Any) -> Config:
    """The config of a file with these keys, in addition to what every file has."""
    dataset = {"path": "rows.jsonl", "type": "my_rewards.questions"}
    trl = {"num_generations": 2, "reward_funcs": ["my_rewards.reward"], **values.pop("trl", {})}
    content = {"base_model": "starter", "rl": "grpo", "datasets": [dataset], "micro_batch_size": 4, "trl": trl}
    (folder / "config.yaml").write_text(yaml.safe_dump(content | values))
    return load_config(folder / "config.yaml")


def settings(config: Config) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, section in user_settings(config).items() for key, value in section.items()}


def test_the_async_example_of_the_documentation_is_translated(folder: Path) -> None:
    content = yaml.safe_load(EXAMPLE.read_text())
    content["trl"] |= {"use_vllm": True, "max_completion_length": 512, "reward_num_workers": 4}
    content["trl"]["reward_funcs"] = ["my_rewards.reward"]
    content["datasets"] = [{"path": "rows.jsonl", "type": "my_rewards.questions", "split": "train"}]
    content |= {"gradient_accumulation_steps": 4, "micro_batch_size": 4, "max_steps": 500, "learning_rate": "1e-5"}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    found = settings(load_config(folder / "config.yaml"))
    assert (
        found
        | {
            "run.steps": 500,
            "pacing.groups_per_step": 2,  # 4 * 4 / 8
            "learner.lr": 1e-5,
            "learner.schedule": "cosine",
            "learner.lr_warmup_steps": 15,  # 3 %
            "lora.rank": 32,
            "lora.alpha": 64,
            "engine.kind": "vllm",  # on this machine, so outpace starts it
            "launch.gpu_memory": 0.35,
            "tasks.producer": "outpace:GRPODataProducer",
            "producer.async_prefetch": True,
            "producer.prefetch_depth": 1,
            "weights.every": 2,
            "pacing.max_lag": 2,  # one batch ahead, and one version that is not published
            "pacing.chunk_groups": 1,
            "correction.weight": "token",
            "correction.cap": 3.0,
            "correction.masks": ["opsm"],
            "correction.opsm_delta": 0.5,
            "filter.uniform": True,
            "replay.mode": "fill",
            "replay.max_age": 50,
            "reroll.from_step": 250,
            "reroll.max_groups": 1,
            "rewards.workers": 4,
            "rewards.functions": [f"{folder}/my_rewards.py:reward"],
        }
        == found
    )


def test_a_file_without_options_is_synchronous_and_has_axolotls_defaults(folder: Path) -> None:
    found = settings(loaded(folder))
    assert (
        found
        | {
            "run.dir": "./model-out",
            "run.steps": 20,  # one epoch: 40 rows in steps of 2
            "pacing.max_lag": 0,
            "learner.schedule": "cosine",
            "correction.weight": "none",
            "filter.uniform": False,
            "kl.coefficient": 0.0,
            "checkpoint.every": 20,  # once an epoch
            "checkpoint.keep": 4,
            "eval.count": 0,
        }
        == found
    )
    assert not {key for key in found if key.startswith(("reroll.", "replay.", "lora.", "engine.", "producer."))}


def test_everything_that_cannot_be_used_is_in_one_error_under_its_own_name(folder: Path) -> None:
    with pytest.raises(BadInput) as caught:
        loaded(
            folder,
            optimizer="lion_pytorch",
            lr_scheduler="rex",
            adapter="qlora",
            load_in_4bit=True,
            fsdp=["full_shard"],
            context_parallel_size=2,
            chat_template="chatml",
            plugins=["my.Plugin"],
            special_tokens={"eos_token": "x"},
            save_strategy="best",
            micro_batch_sise=2,
            trl={
                "top_p": 0.9,
                "rollout_func": "a.b",
                "replay_recompute_logps": False,
                "vllm_guided_decoding_regex": "a",
            },
        )
    named = {line.partition(":")[0] for line in str(caught.value).split(". ")}
    assert named >= {
        "optimizer", "lr_scheduler", "adapter", "load_in_4bit", "fsdp", "context_parallel_size", "chat_template",
        "plugins", "special_tokens.eos_token", "save_strategy", "micro_batch_sise", "trl.top_p", "trl.rollout_func",
        "trl.replay_recompute_logps", "trl.vllm_guided_decoding_regex",
    }  # fmt: skip


def test_keys_that_are_empty_or_off_or_without_effect_are_accepted(folder: Path) -> None:
    off = {key: None for key in keys.by_key(keys.REFUSED) if "." not in key} | {"load_in_8bit": False, "deepspeed": ""}
    any_value = {key: True for key in keys.by_key(keys.WITHOUT_EFFECT) if "." not in key}
    tokens = {"special_tokens": {"pad_token": "<pad>"}, "tensor_parallel_size": 1, "fsdp": [], "wandb_project": None}
    assert settings(loaded(folder, **(off | any_value | tokens)))["run.steps"] == 20


@pytest.mark.parametrize(("mode", "level"), [("token_mask", "token"), ("sequence_mask", "sequence")])
def test_mask_modes_mask_what_is_above_the_cap(folder: Path, mode: str, level: str) -> None:
    found = settings(loaded(folder, trl={"async_prefetch": True, "vllm_importance_sampling_mode": mode}))
    assert found["correction.masks"] == [level]
    assert (found[f"correction.{level}_low"], found[f"correction.{level}_high"]) == (0.0, 3.0)


def test_rows_of_all_datasets_are_transformed_and_a_number_of_them_is_held_out(folder: Path) -> None:
    (folder / "more.jsonl").write_text('{"prompt": "as it is", "answer": 2}\n')
    both = [{"path": "rows.jsonl", "type": "my_rewards.questions"}, {"path": "json", "data_files": ["more.jsonl"]}]
    config = loaded(folder, datasets=both, val_set_size=10)
    train, heldout = open_tasks(config)
    assert heldout is not None
    tasks = {
        task.prompt: task.columns for source in (train, heldout) for task in map(source.__getitem__, range(len(source)))
    }
    assert len(tasks) == len(train) + len(heldout) == 41
    assert config.eval.count == len(heldout)
    assert tasks["3+1?"] == {"answer": 4, "level": 3}
    assert tasks["as it is"] == {"answer": 2}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rl", {"rl": "dpo"}),
        ("base_model", {"base_model": None}),
        ("datasets", {"datasets": []}),
        ("datasets", {"datasets": [{"path": "rows.jsonl", "shards": 2}]}),
        ("datasets", {"datasets": [{"type": "my_rewards.questions"}]}),
        ("max_steps", {"max_steps": "many"}),
        ("datasets", {"datasets": [{"path": "rows.jsonl"}]}),  # no prompt
        ("datasets.type", {"datasets": [{"path": "rows.jsonl", "type": "my_rewards.raises"}]}),
        ("datasets.path", {"datasets": [{"path": "missing.jsonl"}]}),
        ("datasets", {"datasets": [{"split": "train"}]}),
        ("datasets", {"datasets": "rows.jsonl"}),
        ("plugins", {"plugins": "axolotl.integrations.liger.LigerPlugin"}),
        ("trl.reward_funcs", {"trl": {"reward_funcs": "my_rewards.reward"}}),
        ("num_generations", {"micro_batch_size": 3}),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_starts_with_its_key(
    folder: Path, key: str, values: dict[str, Any]
) -> None:
    with pytest.raises(BadInput, match=rf"^{key}: [^\n]+$"):
        loaded(folder, **values)


def test_exponents_in_lists_are_numbers(folder: Path) -> None:
    functions = ["my_rewards.reward", "my_rewards.other"]
    found = settings(loaded(folder, trl={"reward_funcs": functions, "reward_weights": ["1e-1", 2]}))
    assert found["rewards.weights"] == [0.1, 2.0]


@pytest.mark.parametrize(
    ("named", "urls"),
    [
        ({}, None),
        ({"vllm_mode": "server"}, ["http://localhost:8000"]),
        ({"vllm_server_base_url": "http://localhost:9000"}, ["http://localhost:9000"]),
    ],
)
def test_a_server_that_the_file_names_is_used_on_this_machine_too(
    folder: Path, named: dict[str, str], urls: list[str] | None
) -> None:
    found = settings(loaded(folder, vllm={"host": "0.0.0.0", "data_parallel_size": 2}, trl={"use_vllm": True, **named}))
    assert found.get("engine.urls") == urls
    assert found.get("engine.count") == (2 if urls is None else None)


def test_trackers_intervals_and_reference_are_settings(folder: Path) -> None:
    found = settings(
        loaded(
            folder,
            wandb_project="math",
            wandb_name="first",
            saves_per_epoch=2,
            eval_steps=5,
            val_set_size=0.2,
            num_epochs=2,
            rl_beta=0.01,
            curriculum_sampling=True,
        )
    )
    assert (found["run.report_to"], found["report.project"], found["report.name"]) == (["wandb"], "math", "first")
    assert (found["eval.every"], found["kl.coefficient"], found["tasks.shuffle"]) == (5, 0.01, False)
    assert found["run.steps"] == 2 * (2 * found["checkpoint.every"])


def test_the_page_has_every_field_and_key_with_its_reason() -> None:
    page = (ROOT / "docs" / "from_axolotl.md").read_text()
    for reason, names in {**keys.WITHOUT_EFFECT, **keys.REFUSED}.items():
        assert f"| {', '.join(f'`{name}`' for name in names.split())} | {reason} |" in page
    first = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert {*FIELDS, *keys.TRANSLATED, *keys.RENAMED} - set(re.findall(r"`([\w.]+)`", first)) == set()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_example_with_a_producer_raises_held_out_reward(tmp_path: Path) -> None:
    done = run_command("train", str(EXAMPLE), "--quiet", "--run.dir", str(tmp_path / "run"), within_s=900)
    assert done.returncode == 0, done.stderr
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    assert evaluations[-1]["eval/reward"] > evaluations[0]["eval/reward"] + 0.2
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["producer/rounds"] for step in metrics) >= len(metrics)
    assert max(step["lag/max"] for step in metrics) in (1, 2), "sampled ahead, by at most the documented number"
