"""Builds a worker's rollout from the config and the Python objects passed to `Trainer`.

rollout.function, Trainer(rollout=…)    custom function
rollout.agent                           one program per episode, served by the gateway
environment, tools, or both             tool loop
none of these                           single turn: one prompt, one answer
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
"""Objects passed from Python, by argument name: `rollout`, `environment`, `tools`."""


@dataclass
class Assembled:
    """A rollout, and the callbacks that close its resources."""

    rollout: Rollout
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def close(self) -> None:
        for close in self.closers:
            await close()


async def assemble(config: Config, given: Given | None = None) -> Assembled:
    """Build the rollout. Connects to the MCP servers in `tools.mcp`."""
    given = given or {}
    if (custom_rollout := _custom_rollout(config, given)) is not None:
        return Assembled(custom_rollout)
    origins, tools = kinds_of(config, given.get("environment")), _tools(config, given)
    if not origins and not tools and not config.tools.mcp:
        return Assembled(single_turn)
    servers = await open_servers(config.tools.mcp) if config.tools.mcp else []
    offers = [Offer("tools.functions", FunctionTools(tools)), *(server.offer for server in servers)]
    try:
        by_name(offers)
        for origin in origins.values():  # one environment class per episode: names may repeat across classes
            by_name([*offers, _environment_tools(origin)])
    except BaseException:
        await close_servers(servers)
        raise
    stages = Stages.of(origins, config.environment, config.tools) if origins else None
    closers: list[Callable[[], Awaitable[None]]] = [lambda: close_servers(servers)]
    return Assembled(_loop(config, offers, stages), closers if stages is None else [stages.close, *closers])


def check_assembly(config: Config, given: Given, first: Task | None = None) -> bool:
    """Check the rollout settings before anything starts; raises `BadInput`.

    Returns whether the rollout gives its own reward."""
    if _custom_rollout(config, given) is not None:
        _refuse_unused(config, given)
        _check_program(config.rollout.agent)
        return not config.rollout.agent  # an agent program cannot return a reward
    functions = Offer("tools.functions", FunctionTools(_tools(config, given)))
    origins = kinds_of(config, given.get("environment"))
    check_kinds(origins, config.environment.column, first)
    for origin in origins.values():
        by_name([functions, _environment_tools(origin)])
    return bool(origins) and give_rewards(origins)


def _custom_rollout(config: Config, given: Given) -> Rollout | None:
    ways = {
        "Trainer(rollout=…)": given.get("rollout"),
        "rollout.function": config.rollout.function,
        "rollout.agent": config.rollout.agent,
    }
    named = [way for way, value in ways.items() if value]
    if len(named) > 1:
        raise BadInput(f"rollout: both {named[0]} and {named[1]} are set; keep one")
    if given.get("rollout") is not None:
        return custom.rollout(given["rollout"])
    if config.rollout.function is not None:
        return custom.rollout(load_function(config.rollout.function, "rollout.function"))
    return agent_process.as_rollout(config.rollout.agent) if config.rollout.agent else None


def _refuse_unused(config: Config, given: Given) -> None:
    """Raise `BadInput` for environment and tool settings, which a custom rollout does not use."""
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
            raise BadInput(f"{name}: not used by a custom rollout; remove this setting or the rollout")


def _check_program(command: list[str]) -> None:
    if command and shutil.which(command[0]) is None:
        raise BadInput(f"rollout.agent: program {one_line(command[0], 200)} not found or not executable")


def _tools(config: Config, given: Given) -> list[Tool]:
    return load_tools([*config.tools.functions, *(given.get("tools") or ())])


def _environment_tools(origin: Origin) -> Offer:
    """Return the tools of an environment class, as far as they are known without an instance."""
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
