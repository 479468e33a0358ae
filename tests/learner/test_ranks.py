"""The helper that runs ranks in processes, which other tests rely on."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
from torch import distributed

from learner.ranks import run_ranks


def total_of(factor: int, rank: int) -> tuple[int, torch.Tensor, int]:
    value = torch.tensor([float(factor * (rank + 1))])
    distributed.all_reduce(value)
    return rank, value, torch.get_num_threads()


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("the second rank")
    distributed.barrier()


def die_on_rank_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(3600)


def sleep(rank: int) -> None:
    time.sleep(3600)


def test_ranks_reach_each_other_and_return_results_in_order() -> None:
    results = run_ranks(partial(total_of, 10), 2)
    assert results == [(0, torch.tensor([30.0]), 1), (1, torch.tensor([30.0]), 1)]


def test_an_error_of_a_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="the second rank") as raised:
        run_ranks(fail_on_rank_one, 2)
    assert "fail_on_rank_one" in "".join(raised.value.__notes__)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 .* 7"):
        run_ranks(die_on_rank_one, 2)


def test_ranks_that_take_too_long_are_named_and_killed() -> None:
    with pytest.raises(TimeoutError, match="rank 0, 1 "):
        run_ranks(sleep, 2, timeout_s=1)
