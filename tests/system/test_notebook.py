"""A real Jupyter kernel: an interrupt ends the run, writes a checkpoint and lets later cells resume it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from support import INLINE

Settings = dict[str, Any]


class Notebook:
    """Runs cells in a kernel and returns their messages or their text."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def start(self, code: str) -> None:
        self.client.execute(code)

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the running cell and return all its messages."""
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["content"].get("execution_state") != "idle":
            messages.append(self.client.get_iopub_msg(timeout=120))
        return messages

    def run(self, code: str) -> str:
        """Run a cell and return what it printed."""
        self.start(code)
        messages = self.finish()
        assert not of_type(messages, "error"), of_type(messages, "error")
        return "".join(message["content"]["text"] for message in of_type(messages, "stream"))


def of_type(messages: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["msg_type"] == kind]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for all tests: importing torch takes longer than their runs."""
    folder = tmp_path_factory.mktemp("notebook")
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env={**os.environ, "IPYTHONDIR": str(folder / "ipython")})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    yield Notebook(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def setup_cell(settings: Settings) -> str:
    config = {**settings, "run.steps": 100_000, **INLINE}
    return f"import outpace\nconfig = {config!r}\ntrainer = outpace.Trainer(config=config)"


def interrupt_after_two_steps(notebook: Notebook, run: Path) -> None:
    end, metrics = time.monotonic() + 120, run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < end
        time.sleep(0.05)
    notebook.manager.interrupt_kernel()


RESULT = "print(trainer.summary.exit, trainer.summary.reason, trainer.summary.steps >= 2)"
RESUME = """
class Soon(outpace.Callback):
    def on_batch_end(self, metrics):
        if metrics["step"] > before:
            self.stop()

before = trainer.summary.steps
trainer = outpace.Trainer(config=config, callbacks=[Soon()], quiet=True)
print(trainer.train(resume=True).steps > before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["trainer.train()", "await trainer.train_async()"], ids=["train", "train_async"])
def test_a_kernel_interrupt_ends_the_run_with_a_checkpoint_and_the_next_cell_resumes_it(
    notebook: Notebook, settings: Settings, cell: str
) -> None:
    run = Path(settings["run.dir"])
    notebook.run(setup_cell(settings))
    notebook.start(cell)
    interrupt_after_two_steps(notebook, run)
    messages = notebook.finish()
    shown = of_type(messages, "error")
    assert [message["content"]["ename"] for message in shown] == ["Interrupted"]
    assert len(shown[0]["content"]["traceback"]) == 1, "one line"
    assert list((run / "checkpoints").iterdir())
    assert notebook.run(RESULT).split() == ["3", "stopped", "True"]
    assert notebook.run(RESUME).splitlines()[-1] == "True"


@pytest.mark.slow
def test_progress_is_shown_in_one_output_that_is_updated(notebook: Notebook, settings: Settings) -> None:
    notebook.run(setup_cell({**settings}).replace("100000", "5"))
    notebook.start("summary = trainer.train()")
    messages = notebook.finish()
    assert not of_type(messages, "error"), of_type(messages, "error")
    (output,) = of_type(messages, "display_data")
    updates = of_type(messages, "update_display_data")
    assert updates
    assert {message["content"]["transient"]["display_id"] for message in [output, *updates]} == {
        output["content"]["transient"]["display_id"]
    }
    shown = updates[-1]["content"]["data"]["text/plain"]
    assert settings["run.dir"] in "".join(shown.split())  # a long path is broken into lines
    assert [
        each["content"]["text"] for each in of_type(messages, "stream") if each["content"]["name"] == "stdout"
    ] == []
