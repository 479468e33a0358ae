"""From the config, and what a Python caller brings, to the rollout of a worker and all that it keeps open.

rollout.function, Trainer(rollout=…)         a function of the user
rollout.agent                                a program per episode, behind the gateway
an environment, tools, or both               the loop of tool calls
none of these                                one prompt, one answer
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.config import Config
from outpace.errors import BadInput, one_line
from outpace.protocols import Rollout
from outpace.references import load_function
from outpace.rollouts import agent_process, custom
from outpace.rollouts.environments.kinds import Origin, check_kinds, give_rewards, kinds_of
from outpace.rollouts.environments.stage import Stages
from outpace.rollouts.limits import Limits
from outpace.rollouts.loop import ToolLoop
from outpace.rollouts.single_turn import single_turn
from outpace.rollouts.tools.functions import Tool, load_tools, tools_of
from outpace.rollouts.tools.mcp_servers import close_servers, open_servers
from outpace.rollouts.tools.toolbox import FunctionTools, Offer, ToolLimits, by_name
from outpace.types import Task

Given = Mapping[str, Any]
"""The objects of a Python caller by the name of the argument: `rollout`, `environment`, `tools`."""


@dataclass
class Assembled:
    """A rollout, and how to close what it keeps open."""

    rollout: Rollout
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def close(self) -> None:
        for close in self.closers:
            await close()


async def assemble(config: Config, given: Given | None = None) -> Assembled:
    """The rollout that the config or the caller wants. Connects to MCP servers, if there are any."""
    given = given or {}
    if (own := _own_rollout(config, given)) is not None:
        return Assembled(own)
    origins, tools = kinds_of(config, given.get("environment")), _tools(config, given)
    if not origins and not tools and not config.tools.mcp:
        return Assembled(single_turn)
    servers = await open_servers(config.tools.mcp) if config.tools.mcp else []
    offers = [Offer("tools.functions", FunctionTools(tools)), *(server.offer for server in servers)]
    try:
        by_name(offers)
        for origin in origins.values():  # two kinds may have tools of one name: an episode has one of them
            by_name([*offers, _of_class(origin)])
    except BaseException:
        await close_servers(servers)
        raise
    stages = Stages.of(origins, config.environment, config.tools) if origins else None
    closers: list[Callable[[], Awaitable[None]]] = [lambda: close_servers(servers)]
    return Assembled(_loop(config, offers, stages), closers if stages is None else [stages.close, *closers])


def check_assembly(config: Config, given: Given, first: Task | None = None) -> bool:
    """Raise `BadInput` for what can be known to be wrong before anything starts; whether the rollout gives a reward of
    its own is the answer."""
    if _own_rollout(config, given) is not None:
        _refuse_unused(config, given)
        _check_program(config.rollout.agent)
        return not config.rollout.agent  # a program has no way to say what it deserves
    functions = Offer("tools.functions", FunctionTools(_tools(config, given)))
    origins = kinds_of(config, given.get("environment"))
    check_kinds(origins, config.environment.column, first)
    for origin in origins.values():
        by_name([functions, _of_class(origin)])
    return bool(origins) and give_rewards(origins)


def _own_rollout(config: Config, given: Given) -> Rollout | None:
    ways = {
        "Trainer(rollout=…)": given.get("rollout"),
        "rollout.function": config.rollout.function,
        "rollout.agent": config.rollout.agent,
    }
    named = [way for way, value in ways.items() if value]
    if len(named) > 1:
        raise BadInput(f"rollout: {named[0]} and {named[1]} are given; keep one")
    if given.get("rollout") is not None:
        return custom.rollout(given["rollout"])
    if config.rollout.function is not None:
        return custom.rollout(load_function(config.rollout.function, "rollout.function"))
    return agent_process.as_rollout(config.rollout.agent) if config.rollout.agent else None


def _refuse_unused(config: Config, given: Given) -> None:
    """A rollout of the user's own calls neither the tools nor the environments of the config."""
    unused = {
        "rollout.environment": config.rollout.environment_class,
        "environment.kinds": config.environment.kinds,
        "environment": given.get("environment"),
        "tools.functions": config.tools.functions,
        "tools.mcp": config.tools.mcp,
        "tools": given.get("tools"),
    }
    for name, value in unused.items():
        if value:
            raise BadInput(f"{name}: the run has a rollout of its own, which would not use this; keep one of the two")


def _check_program(command: list[str]) -> None:
    if command and shutil.which(command[0]) is None:
        raise BadInput(f"rollout.agent: there is no program {one_line(command[0], 200)} that can be started")


def _tools(config: Config, given: Given) -> list[Tool]:
    return load_tools([*config.tools.functions, *(given.get("tools") or ())])


def _of_class(origin: Origin) -> Offer:
    """What a class will offer, as far as it is known before an instance is made."""
    factory = origin.load()
    tools = tools_of(factory, origin.setting).values() if isinstance(factory, type) else ()
    return Offer(origin.setting, FunctionTools(list(tools)))


def _loop(config: Config, offers: list[Offer], stages: Stages | None) -> ToolLoop:
    rollout = config.rollout
    return ToolLoop(
        offers=offers,
        stages=stages,
        limits=Limits(
            rollout.max_turns, rollout.max_calls, rollout.max_episode_tokens, rollout.max_seconds, rollout.max_tokens
        ),
        tool_limits=ToolLimits(config.tools.timeout_s, config.tools.max_result_chars),
    )
