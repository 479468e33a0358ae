"""verl's datasets and reward functions work unchanged."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.config.load import make_config
from outpace.errors import BadInput, RewardFailed
from outpace.monitoring.metric_table import collecting
from outpace.rewards.grading import GraderPool, grade
from outpace.rewards.registry import NamedReward, check_rewards, isolated_sources
from outpace.tasks.registry import open_tasks
from support import naming, read_lines

SCORE_FILE = '''
import json

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """In verl's signature, with a dict as its result."""
    assert data_source == "openai/gsm8k"
    solved = solution_str.split("####")[-1].strip() == ground_truth
    return {"score": float(solved), "acc": solved, "format error": "####" not in solution_str, "pred": solution_str}

async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.split("####")[-1].strip() == ground_truth)

def exact(solution_str, ground_truth):
    """Like the functions for single datasets in verl, which take only some of the arguments."""
    return solution_str == ground_truth

def echo(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Score 1 if everything is what verl passes."""
    return solution_str == json.dumps([data_source, ground_truth, extra_info, kwargs])
'''

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number, "tags": ["a", "b"]},
    }
    for number in range(12)
]
COLUMNS = {name: [ROWS[0][name]] * 2 for name in ("data_source", "ability", "reward_model", "extra_info")}


@pytest.fixture
def scores(tmp_path: Path) -> str:
    (tmp_path / "my_score.py").write_text(SCORE_FILE)
    return str(tmp_path / "my_score.py")


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).to_parquet(tmp_path / "train.parquet")
    return str(tmp_path / "train.parquet")


@asynccontextmanager
async def grading(functions: list[NamedReward], references: list[str]) -> AsyncIterator[GraderPool]:
    pool = GraderPool(isolated_sources(functions, None, references), workers=2)
    try:
        yield pool
    finally:
        await pool.close()


async def graded(reference: str, completions: list[Any], columns: dict[str, list[Any]] = COLUMNS) -> list[float | None]:
    functions = check_rewards([reference], columns=columns)
    prompts = [ROWS[0]["prompt"]] * len(completions)
    async with grading(functions, [reference]) as pool:
        return [found.total for found in await grade(functions, None, prompts, completions, columns, 30.0, pool)]


def test_a_dataset_of_verl_keeps_its_nested_columns(parquet: str) -> None:
    train, heldout = open_tasks(make_config({"tasks.path": parquet, "eval.holdout": 0.2}))
    assert heldout is not None
    tasks = [source[index] for source in (train, heldout) for index in range(len(source))]
    found = [{**task.columns, "prompt": task.prompt} for task in tasks]
    assert sorted(found, key=lambda row: row["extra_info"]["index"]) == ROWS


@pytest.mark.parametrize("name", ["compute_score", "compute_score_async"])
async def test_a_reward_function_of_verl_scores_each_answer(scores: str, name: str) -> None:
    answers = [[{"role": "assistant", "content": text}] for text in ("0 + 1 = 1 #### 1", "#### 2")]
    assert await graded(f"{scores}:{name}", answers) == [1.0, 0.0]


async def test_it_gets_what_verl_passes(scores: str) -> None:
    turns = [{"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "x"}]
    given = {**ROWS[0]["extra_info"], "num_turns": 2, "rollout_reward_scores": {}}
    text = json.dumps(["openai/gsm8k", "1", given, {}])
    assert await graded(f"{scores}:echo", [text, [{"role": "assistant", "content": text}]]) == [1.0, 1.0]
    given["num_turns"] = 4
    text = json.dumps(["openai/gsm8k", "1", given, {}])
    several = [{"role": "assistant", "content": text}, *({**turn, "content": ""} for turn in turns)]
    assert await graded(f"{scores}:echo", [several, several]) == [1.0, 1.0]


async def test_a_function_may_take_only_some_of_the_arguments(scores: str) -> None:
    assert await graded(f"{scores}:exact", ["1", "2"]) == [1.0, 0.0]


async def test_other_numbers_of_its_dict_become_metrics(scores: str) -> None:
    with collecting() as log:
        await graded(f"{scores}:compute_score", ["#### 1", "none"])
    assert sorted((name, value) for name, value, _ in log.take()) == [
        ("episode/acc", 0.0),
        ("episode/acc", 1.0),
        ("episode/format_error", 0.0),
        ("episode/format_error", 1.0),
    ]


async def test_a_dict_without_a_score_fails_the_group(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(data_source, solution_str, ground_truth, extra_info):\n return {'acc': 1}")
    with pytest.raises(RewardFailed, match=naming("f", "score", "acc")):
        await graded(f"{tmp_path}/bad.py:f", ["1", "2"])


def test_tasks_without_the_columns_of_verl_are_refused(scores: str) -> None:
    with pytest.raises(BadInput, match=naming("rewards.functions", "compute_score", "data_source", "reward_model")):
        check_rewards([f"{scores}:compute_score"], columns=["answer"])


def test_a_run_trains_on_a_dataset_and_a_reward_function_of_verl(parquet: str, scores: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "run.runtime": "inline",
        "tasks.path": parquet,
        "rewards.functions": [f"{scores}:compute_score"],
        "run.dir": str(tmp_path / "run"),
        "run.steps": 1,
        "rollout.group_size": 2,
        "rollout.max_tokens": 4,
        "pacing.groups_per_step": 2,
        "eval.count": 0,
        "filter.uniform": False,
        "run.threads": 1,
    }
    outpace.Trainer("starter", config=settings, quiet=True).train()
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["reward/compute_score"] == line["episode/acc"] == 0.0
    assert line["episode/format_error"] == 1.0
