"""Two environments behind OpenEnv's own server, for the tests: `python openenv_server.py guess|shop PORT`.

Runs in the Python of `OUTPACE_ADAPTERS_PYTHON`, which has OpenEnv; nothing here imports outpace.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 3


class Guess(Action):
    """Guess the number."""

    number: int


class GuessResult(Observation):
    text: str = ""


class Guessing(Environment):
    """A number to guess; every miss costs a quarter of a point."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, secret: int = 7, **options: Any
    ) -> GuessResult:
        self.secret = secret
        return GuessResult(text="Guess.", metadata={"secret": secret})

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> GuessResult:
        if action.number < 0:
            raise ValueError("numbers are not negative")
        if action.number > 1000:
            time.sleep(5)
        right = action.number == self.secret
        return GuessResult(text="right" if right else "wrong", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return State()


class Shop(MCPEnvironment):
    """Two MCP tools; selling ends the episode and gives as many points as items were sold."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self.sold = 0

        @server.tool
        def price(item: str) -> int:
            """What an item costs."""
            if item == "gold":
                raise ValueError("not for sale")
            return len(item)

        @server.tool
        def sell(item: str, count: int = 1) -> str:
            """Sell some items."""
            self.sold += count
            return f"sold {count} {item}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        self.sold = 0
        return Observation(metadata={"status": "open"})

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._with_reward(super().step(action, timeout_s=timeout_s, **options))

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._with_reward(await super().step_async(action, timeout_s=timeout_s, **options))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        return Observation()

    def _with_reward(self, observation: Observation) -> Observation:
        observation.reward, observation.done = float(self.sold), self.sold > 0
        return observation

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kinds: dict[str, tuple[Any, ...]] = {
        "guess": (Guessing, Guess, GuessResult),
        "shop": (Shop, CallToolAction, CallToolObservation),
    }
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
