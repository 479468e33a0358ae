"""User functions as rollouts."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import outpace
from outpace.errors import BadInput
from outpace.types import Endpoint, Task

TASK = Task("t", "hi")


class Client:
    async def endpoint(self, role: str = "policy") -> Endpoint:
        return Endpoint("http://here/v1", "key", "m")


async def test_an_async_function_gets_the_client() -> None:
    @outpace.rollout
    async def agent(task: Any, client: Any) -> Any:
        return task.id, client

    client: Any = Client()
    assert await agent(TASK, client) == ("t", client)


async def test_a_sync_function_gets_an_endpoint_and_runs_on_a_thread() -> None:
    @outpace.rollout
    def agent(task: Any, endpoint: Any) -> Any:
        return endpoint.base_url, threading.current_thread() is threading.main_thread()

    client: Any = Client()
    assert await agent(TASK, client) == ("http://here/v1", False)
    assert agent.__name__ == "agent"


@pytest.mark.parametrize("wrong", [lambda: None, lambda task: None, lambda task, client, more: None])
def test_a_function_with_the_wrong_signature_is_refused(wrong: Any) -> None:
    with pytest.raises(BadInput, match=r"^rollout\.function: .*task.*client"):
        outpace.rollout(wrong)
