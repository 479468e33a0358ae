"""Builds a worker's rollout from the config and the Python objects passed to `Trainer`.

rollout.function, Trainer(rollout=…)    custom function
rollout.agent                           one program per episode, served by the gateway
environment, tools, or both             tool loop
none of these                           single turn: one prompt, one answer

`eval.rollout` and Trainer(eval_rollout=…) name another function for evaluation.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.config import Config
from outpace.config.defaults import evaluation_config
from outpace.errors import BadInput, one_line
from outpace.protocols import Rollout
from outpace.rollouts import agent_process, episode
from outpace.rollouts.environments.session import (
    EnvironmentSessions,
    EnvironmentSource,
    all_give_rewards,
    check_kinds,
    resolve_kinds,
)
from outpace.rollouts.episode import single_turn
from outpace.rollouts.tool_loop import ToolLoop
from outpace.rollouts.tools.functions import Tool, load_tools, tools_of
from outpace.rollouts.tools.mcp import close_servers, open_servers
from outpace.rollouts.tools.toolbox import FunctionTools, ToolSource, tools_by_name
from outpace.runtime.references import load_function
from outpace.types import Task

PythonObjects = Mapping[str, Any]
"""Objects passed from Python, by argument name: `rollout`, `eval_rollout`, `environment`, `tools`."""


@dataclass
class BuiltRollout:
    """The rollouts of training and evaluation, and the callbacks that close their resources."""

    rollout: Rollout
    evaluation: Rollout
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def close(self) -> None:
        for close in self.closers:
            await close()


async def build_rollout(config: Config, given: PythonObjects | None = None) -> BuiltRollout:
    """Build the rollout. Connects to the MCP servers in `tools.mcp`."""
    given = given or {}
    evaluation = _evaluation_rollout(config, given)
    if (custom_rollout := _custom_rollout(config, given)) is not None:
        return BuiltRollout(custom_rollout, evaluation or custom_rollout)
    origins, tools = resolve_kinds(config, given.get("environment")), _tools(config, given)
    if not origins and not tools and not config.tools.mcp:
        return BuiltRollout(single_turn, evaluation or single_turn)
    servers = await open_servers(config.tools.mcp) if config.tools.mcp else []
    sources: list[ToolSource] = [FunctionTools(tools), *servers]
    try:
        tools_by_name(sources)
        for origin in origins.values():  # one environment class per episode: names may repeat across classes
            tools_by_name([*sources, _environment_tools(origin)])
    except BaseException:
        await close_servers(servers)
        raise
    environments = EnvironmentSessions(origins, config.environment, config.tools) if origins else None
    closers: list[Callable[[], Awaitable[None]]] = [lambda: close_servers(servers)]
    loop = ToolLoop(sources, environments, config.rollout, config.tools)
    return BuiltRollout(
        loop,
        evaluation or replace(loop, limits=evaluation_config(config).rollout),
        closers if environments is None else [environments.close, *closers],
    )


def check_rollout(config: Config, given: PythonObjects, first: Task | None = None) -> bool:
    """Check the rollout settings before anything starts; raises `BadInput`.

    Returns whether the rollout gives its own reward."""
    _evaluation_rollout(config, given)
    if _custom_rollout(config, given) is not None:
        _refuse_unused(config, given)
        _check_program(config.rollout.agent)
        return not config.rollout.agent  # an agent program cannot return a reward
    functions = FunctionTools(_tools(config, given))
    origins = resolve_kinds(config, given.get("environment"))
    check_kinds(origins, config.environment.column, first)
    for origin in origins.values():
        tools_by_name([functions, _environment_tools(origin)])
    return bool(origins) and all_give_rewards(origins)


def _custom_rollout(config: Config, given: PythonObjects) -> Rollout | None:
    ways = {
        "Trainer(rollout=…)": given.get("rollout"),
        "rollout.function": config.rollout.function,
        "rollout.agent": config.rollout.agent,
    }
    named = [way for way, value in ways.items() if value]
    if len(named) > 1:
        raise BadInput(f"rollout: both {named[0]} and {named[1]} are set; keep one")
    if given.get("rollout") is not None:
        return episode.rollout(given["rollout"])
    if config.rollout.function is not None:
        return episode.rollout(load_function(config.rollout.function, "rollout.function"))
    return agent_process.agent_rollout(config.rollout.agent) if config.rollout.agent else None


def _evaluation_rollout(config: Config, given: PythonObjects) -> Rollout | None:
    """Return the evaluation rollout if it differs from the training rollout, else None."""
    if given.get("eval_rollout") is not None:
        if config.eval.rollout is not None:
            raise BadInput("eval.rollout: Trainer(eval_rollout=…) is also set; keep one")
        return episode.rollout(given["eval_rollout"], "eval_rollout")
    if config.eval.rollout is None:
        return None
    return episode.rollout(load_function(config.eval.rollout, "eval.rollout"), "eval.rollout")


def _refuse_unused(config: Config, given: PythonObjects) -> None:
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
    if len(command) > 1 and command[1].endswith(".py") and not Path(command[1]).is_file():
        raise BadInput(f"rollout.agent: there is no file {one_line(command[1], 200)}")


def _tools(config: Config, given: PythonObjects) -> list[Tool]:
    return load_tools([*config.tools.functions, *(given.get("tools") or ())])


def _environment_tools(origin: EnvironmentSource) -> FunctionTools:
    """Return the tools of an environment class; none for a function, whose tools are unknown until it is called."""
    factory = origin.load()
    tools = tools_of(factory, origin.setting).values() if isinstance(factory, type) else ()
    return FunctionTools(list(tools), origin.setting)
