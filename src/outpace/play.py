"""`outpace play`: a person takes the model's seat in a task.

    config ─▶ tasks, tools, environment, rewards: as in a run ─▶ rollout ─ HumanClient ─▶ terminal
                                                                    └─▶ graded, shown, and on to the next task

Only the model is missing: budgets, tool results and rewards are those that it would get. No weights are loaded, and a
tokenizer only to show the prompt as the model's own text (`--raw`). An answer is sent by an empty line.
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
from outpace.config.loading import load_config
from outpace.config.rules import resolve
from outpace.errors import BadInput, RewardFailed, one_line
from outpace.models.chat import Schema
from outpace.parts import judges_of
from outpace.protocols import Rollout, TaskSource
from outpace.rewards.grading import grade
from outpace.rewards.registry import check_rewards
from outpace.rollouts.assembly import assemble, check_assembly
from outpace.rollouts.episodes import run_episode, whole_return
from outpace.rollouts.human import HumanClient, Scene, Typed
from outpace.rollouts.policy.client import PolicyClient
from outpace.rollouts.policy.history import text_of
from outpace.rollouts.typed_calls import is_call, read_answer, read_call, signature
from outpace.rollouts.worker import Judges
from outpace.runtime import threads
from outpace.tasks.registry import open_tasks
from outpace.types import Episode, Message, Task

HELP = """\
an empty line sends what you have typed; text without a call is your final answer
/call name key=value …   call a tool; several lines are several calls
/call name {"key": 1}    the same, with arguments as JSON
/tools                   what can be called
/prompt                  the whole conversation again
/give-up                 end this attempt, ungraded
/help                    this text
//…                      an answer that begins with a slash
Ctrl-D                   leave"""

Reader = Callable[[], str | None]
"""The next line, or None at the end of the input. May block."""

Raw = Callable[[Sequence[Message], Sequence[Schema]], str]
"""A conversation as the text that the model gets."""

STYLES = {"user": "bold", "tool": "cyan", "system": "magenta", "assistant": "green", "text": "bold"}


@dataclass
class Terminal:
    """Implements `outpace.rollouts.human.Person`: shows scenes, and reads lines on a thread."""

    console: Console
    read: Reader
    raw: Raw | None = None
    left: bool = False  # the input has ended
    _reading: asyncio.Future[threads.Answer] | None = None

    async def answer(self, scene: Scene) -> Typed | None:
        self._open(scene)
        lines: list[str] = []
        while (line := await self.line()) is not None:
            if not line.strip() and lines:
                break
            if line.strip() == "/give-up":
                return None
            if not self._obeyed(line, scene):
                lines += [line] if line.strip() else []
        return read_answer(lines, scene.tools) if lines else None

    def hear(self, text: str) -> None:
        self.show("text", text)

    async def line(self) -> str | None:
        """The next line. A read that somebody gave up on goes on, and is for whoever asks next."""
        if self.left:
            return None
        self._reading = self._reading or threads.in_thread(self.read)
        line, error = await asyncio.shield(self._reading)
        self._reading = None
        if error is not None:
            raise error
        self.left = line is None
        return cast(str | None, line)

    def show(self, role: str, text: str) -> None:
        self.console.print(Text(f"{role}: ", STYLES.get(role, "bold")) + Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        self.console.print(Text(text, "dim"), soft_wrap=True)

    def _open(self, scene: Scene) -> None:
        first = len(scene.new) == len(scene.messages)
        self.note(f"--- your turn{'' if scene.role == 'policy' else f' as {scene.role}'} ---")
        self._tell(scene, scene.new)
        if first and scene.tools:
            self._list(scene.tools)

    def _tell(self, scene: Scene, messages: Sequence[Message]) -> None:
        if self.raw is not None:
            self.console.print(Text(self.raw(scene.messages, scene.tools)), soft_wrap=True)
            return
        for message in messages:
            self.show(str(message.get("name") or message.get("role")), _said(message))

    def _list(self, tools: Sequence[Schema]) -> None:
        for tool in tools:
            self.note(f"/call {signature(tool)}")

    def _obeyed(self, line: str, scene: Scene) -> bool:
        """Whether the line was a command, or something that cannot be sent; then that is said in one line."""
        command = line.strip()
        if not command.startswith("/") or command.startswith("//"):
            return False
        if is_call(line):
            return not self._readable(line, scene.tools)
        match command:
            case "/tools":
                self._list(scene.tools) if scene.tools else self.note("there are no tools")
            case "/prompt":
                self._tell(scene, scene.messages)
            case "/help":
                self.note(HELP)
            case _:
                self.note(f"{one_line(command.split()[0], 40)}: no such command; /help lists them")
        return True

    def _readable(self, line: str, tools: Sequence[Schema]) -> bool:
        try:
            read_call(line, tools)
        except BadInput as error:
            self.note(str(error))
            return False
        return True


def _said(message: Message) -> str:
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    asked = [f"/call {call.get('name')} {call.get('arguments')}" for call in calls]
    return "\n".join(filter(None, [text_of(message.get("content")), *asked]))


# ---------------------------------------------------------------------------------------------------------------- game


@dataclass(frozen=True)
class Game:
    config: Config
    tasks: TaskSource
    rollout: Rollout
    judges: Judges
    terminal: Terminal
    chosen: int | None = None
    rng: random.Random = field(default_factory=random.Random)

    async def run(self) -> None:
        """One task after the other, until the person has enough."""
        for index in self._indices():
            task = await asyncio.to_thread(self.tasks.__getitem__, index)
            await self.attempt(task)
            if not await self._another():
                return

    async def attempt(self, task: Task) -> None:
        terminal, client = self.terminal, HumanClient(self.terminal, self.config.model.system)
        terminal.note(f"task {task.id}; /help says what you can type")
        try:
            # A client by its methods; there is no engine behind it. A person may take their time: no limit of a run.
            episode = await run_episode(self.rollout, task, cast(PolicyClient, client), math.inf)
        except asyncio.CancelledError:
            if not client.gave_up:
                raise
            terminal.note("you have left" if terminal.left else "given up")
            return
        if episode.error is not None:
            terminal.note(f"the attempt failed: {episode.error}")
            return
        counted = "".join(f", {value:g} {name}" for name, value in episode.metrics.items())
        terminal.note(f"--- the end: {episode.stop}{counted} ---")
        await self._judge(task, episode, client)

    async def _judge(self, task: Task, episode: Episode, client: HumanClient) -> None:
        columns = {name: [value] for name, value in task.columns.items()}
        judges, timeout_s = self.judges, self.config.rewards.timeout_s
        on_request: dict[str, list[Any]] = {"completion_ids": [[]], "environments": [client.environment]}
        try:
            (graded,) = await grade(
                judges.functions, judges.weights, [task.prompt], [episode.completion], columns, timeout_s, judges.pool,
                (task, [episode]), on_request,
            )  # fmt: skip
        except RewardFailed as error:
            self.terminal.note(f"no reward: {error}")
            return
        own = episode.rewards or ({"rollout": episode.reward} if episode.reward or not judges.functions else {})
        shown = {**own, **client.own_rewards, **graded.parts}
        for name, value in shown.items():
            self.terminal.note(f"reward {name}: {value:g}")
        if not shown:
            self.terminal.note("no reward: no reward function applies")
            return
        reward = sum(own.values()) + (graded.total or 0.0)
        whole = msgspec.structs.replace(episode, reward=reward, trajectories=client.rewarded())
        self.terminal.show("total", f"{whole_return(whole):g}")

    async def _another(self) -> bool:
        if not self.terminal.left:
            self.terminal.note("another task? Enter for yes, n for no")
        line = await self.terminal.line()
        return line is not None and line.strip().lower() in ("", "y", "yes")

    def _indices(self) -> Iterator[int]:
        if self.chosen is not None:
            yield self.chosen
        while True:
            yield self.rng.randrange(len(self.tasks))


def play(
    config: Path | None,
    settings: Sequence[str],
    task: str | None = None,
    raw: bool = False,
    read: Reader | None = None,
    console: Console | None = None,
) -> None:
    """Open what the config names, and play until the person leaves."""
    loaded = load_config(config, settings)
    open_tasks(resolve(loaded, own_rewards=True))  # a misspelt task is told before the rewards it would have brought
    resolved = resolve(loaded, own_rewards=loaded.rollout.function is not None)
    if resolved.rollout.agent:
        raise BadInput("rollout.agent: a program talks to a model behind a URL, and a person has none; leave this out")
    train, _ = open_tasks(resolved)
    rewards = check_rewards(resolved.rewards.functions, resolved.rewards.weights, train[0].columns, resolved)
    if not check_assembly(resolved, {}, train[0]) and not rewards:
        raise BadInput("rewards.functions: name at least one: nothing else gives an attempt a reward")
    chosen = None if task is None else index_of(task, train)
    terminal = Terminal(console or Console(highlight=False), read or read_line, _raw(resolved) if raw else None)
    asyncio.run(_play(resolved, train, chosen, terminal))


async def _play(config: Config, tasks: TaskSource, chosen: int | None, terminal: Terminal) -> None:
    assembled = await assemble(config)
    judges = judges_of(config, None)
    try:
        await Game(config, tasks, assembled.rollout, judges, terminal, chosen, random.Random(config.run.seed)).run()
    finally:
        await assembled.close()
        if judges.pool is not None:
            await judges.pool.close()


def index_of(task: str, tasks: TaskSource) -> int:
    """A task by its number or its id."""
    if task.isdecimal() and int(task) < len(tasks):
        return int(task)
    found = next((index for index in range(len(tasks)) if tasks[index].id == task), None)
    if found is None:
        raise BadInput(f"--task: there is no task {one_line(task, 60)}; give an id, or a number below {len(tasks)}")
    return found


def read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _raw(config: Config) -> Raw:
    from outpace.models.loading import eos_ids, load_tokenizer
    from outpace.models.speaking import dialect_of

    model = config.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    dialect = dialect_of(tokenizer, eos_ids(model.path), model.renderer)
    return lambda messages, tools: str(tokenizer.decode(dialect.open(messages, tools)))
