"""`outpace play`: answer tasks in the terminal, in place of the model.

    config ─▶ tasks, tools, environment, rewards: as in a run ─▶ rollout ─ HumanClient ─▶ terminal
                                                                    └─▶ grade, print the rewards, next task

Everything but the model is as in a run: limits, tool results and rewards. No weights are loaded, and a tokenizer only
for `--raw`, which shows the prompt as the text the model receives. An empty line sends the answer.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.console import Console
from rich.text import Text

from outpace.config import Config
from outpace.config.load import load_config
from outpace.config.validation import resolve
from outpace.errors import BadInput, RewardFailed, one_line
from outpace.models.chat import Schema
from outpace.protocols import Rollout, TaskSource, TaskStream
from outpace.rewards.grading import grade
from outpace.rollouts.build import build_rollout
from outpace.rollouts.client import PolicyClient
from outpace.rollouts.episode import run_episode, total_return
from outpace.rollouts.history_digests import content_text
from outpace.rollouts.human import HumanClient, HumanTurn, TypedAnswer, is_call, read_answer, read_call, tool_signature
from outpace.rollouts.worker import RewardFunctions
from outpace.run.build import build_reward_functions
from outpace.run.plan import NOT_GRADED, check_functions
from outpace.runtime import async_tools
from outpace.tasks.registry import open_tasks
from outpace.types import Episode, Message, Task

HELP = """\
an empty line sends your answer; text without a tool call is the final answer
/call name key=value …   call a tool; use one line per call
/call name {"key": 1}    call a tool with JSON arguments
/tools                   list the tools
/prompt                  show the whole conversation again
/give-up                 end this attempt without grading
/help                    show this text
//…                      text that begins with a slash
Ctrl-D                   quit"""

ReadLine = Callable[[], str | None]
"""Returns the next line, or None at the end of the input. May block."""

RenderPrompt = Callable[[Sequence[Message], Sequence[Schema]], str]
"""Renders a conversation as the text the model receives."""

STYLES = {"user": "bold", "tool": "cyan", "system": "magenta", "assistant": "green", "text": "bold"}


@dataclass
class Terminal:
    """Implements `outpace.rollouts.human.Person`: prints messages and reads lines in a thread."""

    console: Console
    read: ReadLine
    raw: RenderPrompt | None = None
    input_ended: bool = False
    _reading: asyncio.Future[async_tools.ThreadResult] | None = None

    async def answer(self, human_turn: HumanTurn) -> TypedAnswer | None:
        self._show_turn(human_turn)
        lines: list[str] = []
        while (line := await self.line()) is not None:
            if not line.strip() and lines:
                break
            if line.strip() == "/give-up":
                return None
            if not self._handle_command(line, human_turn):
                lines += [line] if line.strip() else []
        return read_answer(lines, human_turn.tools) if lines else None

    def show(self, text: str) -> None:
        self.print_message("text", text)

    async def line(self) -> str | None:
        """Return the next line. If the caller is cancelled, the read continues and the next call gets its line."""
        if self.input_ended:
            return None
        self._reading = self._reading or async_tools.run_in_thread(self.read)
        line, error = await asyncio.shield(self._reading)
        self._reading = None
        if error is not None:
            raise error
        self.input_ended = line is None
        return cast(str | None, line)

    def print_message(self, role: str, text: str) -> None:
        self.console.print(Text(f"{role}: ", STYLES.get(role, "bold")) + Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        self.console.print(Text(text, "dim"), soft_wrap=True)

    def _show_turn(self, human_turn: HumanTurn) -> None:
        first = len(human_turn.new) == len(human_turn.messages)
        self.note(f"--- your turn{'' if human_turn.role == 'policy' else f' as {human_turn.role}'} ---")
        self._show_messages(human_turn, human_turn.new)
        if first and human_turn.tools:
            self._list_tools(human_turn.tools)

    def _show_messages(self, human_turn: HumanTurn, messages: Sequence[Message]) -> None:
        if self.raw is not None:
            self.console.print(Text(self.raw(human_turn.messages, human_turn.tools)), soft_wrap=True)
            return
        for message in messages:
            self.print_message(str(message.get("name") or message.get("role")), _message_text(message))

    def _list_tools(self, tools: Sequence[Schema]) -> None:
        for tool in tools:
            self.note(f"/call {tool_signature(tool)}")

    def _handle_command(self, line: str, human_turn: HumanTurn) -> bool:
        """Run a slash command. Returns False if the line is part of the answer.

        A tool call that cannot be parsed is reported and dropped, like an unknown command."""
        command = line.strip()
        if not command.startswith("/") or command.startswith("//"):
            return False
        if is_call(line):
            return not self._check_call(line, human_turn.tools)
        match command:
            case "/tools":
                self._list_tools(human_turn.tools) if human_turn.tools else self.note("this task has no tools")
            case "/prompt":
                self._show_messages(human_turn, human_turn.messages)
            case "/help":
                self.note(HELP)
            case _:
                self.note(f"{one_line(command.split()[0], 40)}: no such command; /help lists the commands")
        return True

    def _check_call(self, line: str, tools: Sequence[Schema]) -> bool:
        try:
            read_call(line, tools)
        except BadInput as error:
            self.note(str(error))
            return False
        return True


def _message_text(message: Message) -> str:
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    typed_calls = [f"/call {call.get('name')} {call.get('arguments')}" for call in calls]
    return "\n".join(filter(None, [content_text(message.get("content")), *typed_calls]))


# ---------------------------------------------------------------------------------------------------------------- game


@dataclass(frozen=True)
class Game:
    """Plays tasks one after another. `first_index` chooses the first one; the others are random."""

    config: Config
    tasks: TaskSource
    rollout: Rollout
    reward_functions: RewardFunctions
    terminal: Terminal
    first_index: int | None = None
    rng: random.Random = field(default_factory=random.Random)

    async def run(self) -> None:
        """Play tasks until the player stops."""
        for index in self._indices():
            task = await asyncio.to_thread(self.tasks.__getitem__, index)
            await self.attempt(task)
            if not await self._another():
                return

    async def attempt(self, task: Task) -> None:
        terminal, client = self.terminal, HumanClient(self.terminal, self.config.model.system_prompt)
        terminal.note(f"task {task.id}; type /help for the commands")
        try:
            # Same methods as a policy client, without an engine. No episode timeout: people are slow.
            episode = await run_episode(self.rollout, task, cast(PolicyClient, client), math.inf)
        except asyncio.CancelledError:
            if not client.gave_up:
                raise
            terminal.note("you left" if terminal.input_ended else "given up")
            return
        if episode.error is not None:
            terminal.note(f"the attempt failed: {episode.error}")
            return
        counts = "".join(f", {value:g} {name}" for name, value in episode.metrics.items())
        terminal.note(f"--- episode ended: {episode.stop}{counts} ---")
        await self._grade(task, episode, client)

    async def _grade(self, task: Task, episode: Episode, client: HumanClient) -> None:
        columns = {name: [value] for name, value in task.columns.items()}
        rewards, timeout_s = self.reward_functions, self.config.rewards.timeout_s
        progress = {"global_step": 0, "max_steps": 0, "epoch": 0.0, "num_train_epochs": 0}
        optional: dict[str, list[Any]] = {
            "completion_ids": [[]],
            "environments": [client.environment],
            "trainer_state": [progress],
        }
        try:
            (graded,) = await grade(
                rewards.functions, rewards.weights, [task.prompt], [episode.completion], columns, timeout_s,
                rewards.pool, (task, [episode]), optional,
            )  # fmt: skip
        except RewardFailed as error:
            self.terminal.note(f"no reward: {error}")
            return
        own = episode.rewards or ({"rollout": episode.reward} if episode.reward or not rewards.functions else {})
        shown = {**own, **client.own_rewards, **graded.parts}
        for name, value in shown.items():
            self.terminal.note(f"reward {name}: {value:g}")
        if not shown:
            self.terminal.note("no reward: no reward function applies to this task")
            return
        reward = sum(own.values()) + (graded.total or 0.0)
        whole = msgspec.structs.replace(episode, reward=reward, trajectories=client.rewarded())
        self.terminal.print_message("total", f"{total_return(whole):g}")

    async def _another(self) -> bool:
        if not self.terminal.input_ended:
            self.terminal.note("another task? Enter for yes, n for no")
        line = await self.terminal.line()
        return line is not None and line.strip().lower() in ("", "y", "yes")

    def _indices(self) -> Iterator[int]:
        if self.first_index is not None:
            yield self.first_index
        while True:
            yield self.rng.randrange(len(self.tasks))


def play(
    config: Path | None,
    settings: Sequence[str],
    task: str | None = None,
    raw: bool = False,
    read: ReadLine | None = None,
    console: Console | None = None,
) -> None:
    """Load the tasks of a config and play until the player stops."""
    loaded = load_config(config, settings)
    open_tasks(resolve(loaded, own_rewards=True))  # report a misspelled task before missing rewards
    resolved = resolve(loaded, own_rewards=loaded.rollout.function is not None)
    if resolved.rollout.agent:
        raise BadInput("rollout.agent: play cannot run an agent program, which needs a model URL; remove this setting")
    train, _ = open_tasks(resolved)
    if isinstance(train, TaskStream):
        raise BadInput("tasks.name: play needs tasks with an index, not a stream")
    if not check_functions(resolved, (), {}, train[0])[1]:
        raise BadInput(NOT_GRADED)
    first = None if task is None else index_of(task, train)
    render = _prompt_renderer(resolved) if raw else None
    terminal = Terminal(console or Console(highlight=False), read or read_line, render)
    asyncio.run(_play(resolved, train, first, terminal))


async def _play(config: Config, tasks: TaskSource, first: int | None, terminal: Terminal) -> None:
    built = await build_rollout(config)
    rewards = build_reward_functions(config, None)
    try:
        await Game(config, tasks, built.rollout, rewards, terminal, first, random.Random(config.run.seed)).run()
    finally:
        await built.close()
        if rewards.pool is not None:
            await rewards.pool.close()


def index_of(task: str, tasks: TaskSource) -> int:
    """Return the index of a task given by index or id."""
    if task.isdecimal() and int(task) < len(tasks):
        return int(task)
    found = next((index for index in range(len(tasks)) if tasks[index].id == task), None)
    if found is None:
        raise BadInput(f"--task: no task {one_line(task, 60)}; pass an id, or an index below {len(tasks)}")
    return found


def read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _prompt_renderer(config: Config) -> RenderPrompt:
    from outpace.models.chat_format import chat_format_for
    from outpace.models.loading import eos_ids, load_tokenizer

    model = config.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    chat_format = chat_format_for(tokenizer, eos_ids(model.path), model.renderer)
    return lambda messages, tools: str(tokenizer.decode(chat_format.open(messages, tools)))
