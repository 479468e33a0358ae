"""The ranks of a sharded learner as one learner: which answer and which error counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from outpace.errors import BadInput, CollectiveFailed, ComponentFailed, ComponentLost, NotSaved
from outpace.protocols import Learner
from outpace.run.learner_group import LearnerGroup

Answer = Callable[[], Awaitable[Any]]


class Rank:
    """A rank whose `save` and `load` do what the test says."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def save(self, directory: str, version: int) -> bool:
        return cast(bool, await self._answer())

    async def load(self, directory: str) -> int:
        return cast(int, await self._answer())


def group(*answers: Answer) -> LearnerGroup:
    names = ["learner", "learner-1", "learner-2"]
    ranks = {name: cast(Learner, Rank(answer)) for name, answer in zip(names, answers, strict=False)}
    return LearnerGroup(ranks, grace_s=0.05)


def returns(value: Any) -> Answer:
    async def answer() -> Any:
        return value

    return answer


def fails(error: Exception) -> Answer:
    async def answer() -> Any:
        raise error

    return answer


async def never() -> Any:
    await asyncio.Event().wait()


COLLECTIVE = CollectiveFailed("connection closed")


async def test_the_first_rank_answers_for_the_group() -> None:
    assert await group(returns(7), returns(7)).load("checkpoint") == 7


async def test_a_state_is_saved_if_all_ranks_have_saved_it() -> None:
    assert await group(returns(True), returns(True)).save("directory", 1)
    assert not await group(returns(True), returns(False)).save("directory", 1)


async def test_a_rank_that_has_died_is_the_error_although_others_fail_before_it() -> None:
    async def dies_later() -> Any:
        await asyncio.sleep(0)
        raise ComponentLost("learner-1", "ended with SIGKILL")

    with pytest.raises(ComponentLost) as raised:
        await group(fails(COLLECTIVE), dies_later).load("checkpoint")
    assert raised.value.component == "learner-1"


async def test_the_own_error_of_a_rank_counts_more_than_the_broken_connections_of_others() -> None:
    with pytest.raises(BadInput):
        await group(fails(COLLECTIVE), fails(BadInput("policy_loss.name: no")), fails(COLLECTIVE)).load("checkpoint")


async def test_a_rank_that_does_not_respond_is_named() -> None:
    with pytest.raises(ComponentFailed) as raised:
        await group(fails(COLLECTIVE), never).load("checkpoint")
    assert raised.value.component == "learner-1"


async def test_a_rank_that_does_not_respond_is_named_beside_one_that_has_died_waiting_for_it() -> None:
    with pytest.raises(ComponentLost) as raised:
        await group(fails(ComponentLost("learner", "ended with SIGABRT")), never).load("checkpoint")
    assert "learner-1" in raised.value.message


async def test_a_failed_checkpoint_waits_for_the_ranks_that_are_still_writing() -> None:
    written = []

    async def writes() -> bool:
        await asyncio.sleep(0.2)  # longer than the grace of other errors
        written.append(True)
        return True

    with pytest.raises(NotSaved):
        await group(fails(NotSaved("disk full")), writes).save("directory", 1)
    assert written == [True]
