"""`outpace.Trainer`: the whole system from a script or a notebook, the same parts as the command line.

    import outpace

    def short(prompts, completions, **columns):
        return [1.0 / (1 + len(text)) for text in completions]

    outpace.Trainer(model="starter", tasks=[{"prompt": "Say hello"}], rewards=short).train()

The controller runs on a thread of its own with its own event loop, so `train()` also works where a loop is already
running, as in a notebook. Functions that cannot be imported by name reach the workers by value.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outpace.config import Config
from outpace.config.loading import load_config, make_config
from outpace.errors import BadInput, Interrupted
from outpace.observe.callbacks import Callback
from outpace.observe.runlog import RunLog
from outpace.observe.summary import Summary
from outpace.planning import Objects, Tasks, already_done, make_plan, nothing_left, with_checkpoint
from outpace.protocols import Reward, Rollout
from outpace.references import is_reference
from outpace.rollouts.environments.kinds import Given
from outpace.runtime.threads import steady_executor
from outpace.session import Plan, Session
from outpace.tasks.registry import is_of_family

SAME_MOMENT_S = 0.3


class Trainer:
    """Trains `model` on `tasks` by `rewards`.

    model: what `model.path` takes. tasks: a registered name, a file or dataset path, a list of rows with a `prompt`,
    or any sized, indexable source of rows. eval_tasks: what is held out, likewise but for the name. rewards: functions
    in TRL's signature or their names. config: a `Config`, a nested or dotted dict, or a TOML or YAML file. rollout: an
    `async def rollout(task, client)`. environment: a class with `reset`, typed methods as tools and, if it judges its
    episodes itself, `get_reward`; or several of them by the name that a column of the task gives. tools: typed,
    documented functions that the model may call.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        tasks: str | Path | Tasks | None = None,
        rewards: Reward | str | Sequence[Reward | str] | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        eval_tasks: str | Path | Tasks | None = None,
        rollout: Rollout | None = None,
        environment: Given | None = None,
        tools: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] = (),
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
    ) -> None:
        changes: dict[str, Any] = {}
        if model is not None:
            changes["model"] = {"path": str(model)}
        if isinstance(tasks, str | Path):
            changes["tasks"] = _named_tasks(tasks)
        if isinstance(eval_tasks, str | Path):
            changes["tasks"] = {**changes.get("tasks", {}), "eval_path": str(eval_tasks)}
        self._objects = Objects(
            tasks=None if isinstance(tasks, str | Path) else tasks,
            eval_tasks=None if isinstance(eval_tasks, str | Path) else eval_tasks,
            rewards=_as_tuple(rewards),
            rollout=rollout,
            environment=environment,
            tools=_as_tuple(tools),
            callbacks=tuple(callbacks),
        )
        self.config = _merge(_as_config(config), changes)
        self._quiet = quiet

    def train(self, resume: bool = False) -> Summary:
        """Run to the end. Ctrl-C once: checkpoint and leave (raises `Interrupted`); twice: leave at once.

        With `resume`, go on from the newest complete checkpoint of `run.dir`."""
        return run_plan(make_plan(self.config, self._objects, self._quiet), resume)

    async def train_async(self, resume: bool = False) -> Summary:
        """The same inside a running event loop, which stays free."""
        return await asyncio.to_thread(self.train, resume)


def run_plan(plan: Plan, resume: bool = False) -> Summary:
    """Carry a plan out, on a thread of its own, with signals turned into a clean stop."""
    assert plan.config.run.dir is not None, "the config was resolved"
    log = RunLog.claim(plan.config.run.dir, overwrite=plan.config.run.overwrite, resume=resume)
    try:
        if resume:
            plan = with_checkpoint(plan, log.dir)
        summary = _nothing_left(plan, log) or _Background(plan, log).run()
    except (BadInput, Interrupted) as error:
        if isinstance(error, BadInput) or not log.began:
            log.abandon()
        else:
            log.close()
        raise
    except BaseException:
        log.close()
        raise
    log.close()
    return summary


def _nothing_left(plan: Plan, log: RunLog) -> Summary | None:
    """What the run has come to, said at once, where all that it was to do is done."""
    done = already_done(plan, log.dir) if plan.resumes else None
    if done is not None:
        print(f"{log.dir}: {nothing_left(plan)}")
    return done


class _Background:
    """The controller's thread, and what a signal means to it."""

    def __init__(self, plan: Plan, log: RunLog) -> None:
        self._plan = plan
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._work: asyncio.Task[Summary] | None = None
        self._result: Summary | BaseException | None = None
        self._signals = 0
        self._last: tuple[int, float] | None = None  # signal, and when

    def run(self) -> Summary:
        # A daemon: if this thread is told to leave at once, the interpreter must not wait for the controller.
        thread = threading.Thread(target=self._main, name="outpace-controller", daemon=True)
        with _signals(self._signalled):
            thread.start()
            while thread.is_alive():  # in turns: a signal that reaches another thread does not end one long wait
                thread.join(0.5)
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result

    def _main(self) -> None:
        try:
            self._result = asyncio.run(self._session_main())
        except BaseException as error:  # a boundary between threads: raised again by `run`
            self._result = error

    async def _session_main(self) -> Summary:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(steady_executor())
        self._session = Session(self._plan, self._log)
        self._work = asyncio.ensure_future(self._session.run())
        if self._signals:  # one that came before there was a loop to tell
            self._session.stop()
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._signals < 2:
                raise
            raise KeyboardInterrupt from None

    def _signalled(self, number: int) -> None:
        """First signal: checkpoint and leave. Second: leave now. One that comes twice in the same moment, from a
        terminal and again from a wrapper that passes it on, is one."""
        last, self._last = self._last, (number, time.monotonic())
        if last is not None and last[0] == number and self._last[1] - last[1] < SAME_MOMENT_S:
            return
        self._signals += 1
        if self._loop is None or self._session is None or self._work is None:
            return
        self._loop.call_soon_threadsafe(self._session.stop if self._signals == 1 else self._work.cancel)


@contextmanager
def _signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Signals can be caught on the main thread only; elsewhere they are somebody else's business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: handle(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_config(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, str | Path):
        return load_config(Path(config))
    return make_config(config or {})


def _merge(config: Config, changes: Mapping[str, Any]) -> Config:
    values = config.model_dump(exclude_unset=True)
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return make_config(values)


def _named_tasks(tasks: str | Path) -> dict[str, str]:
    """A path if it looks like one or is there, a registered name otherwise."""
    text = str(tasks)
    if isinstance(tasks, str) and (is_reference(text) or is_of_family(text)):
        return {"name": text}
    is_path = "/" in text or text.endswith((".jsonl", ".json", ".parquet")) or Path(text).exists()
    return {"path": text} if is_path or isinstance(tasks, Path) else {"name": text}


def _as_tuple(rewards: Reward | str | Sequence[Reward | str] | None) -> tuple[Reward | str, ...]:
    if rewards is None:
        return ()
    if isinstance(rewards, str) or callable(rewards):
        return (rewards,)
    return tuple(rewards)
