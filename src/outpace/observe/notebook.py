"""The live view in a notebook: one output that is updated in place, instead of a new one for every line."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

EVERY_S = 0.5
WIDTH = 90
HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


class NotebookView:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._output: Any = None  # IPython's handle of the output
        self._updated = 0.0

    def show(self, renderable: RenderableType, now: bool = True) -> None:
        """Replace what the output shows; unless `now`, not more often than every EVERY_S."""
        time = self._clock()
        if not now and self._output is not None and time - self._updated < EVERY_S:
            return
        self._updated = time
        if self._output is None:
            display = importlib.import_module("IPython.display").display
            self._output = display(rendered(renderable), raw=True, display_id=True)
        else:
            self._output.update(rendered(renderable), raw=True)


def rendered(renderable: RenderableType) -> dict[str, str]:
    """By MIME type."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, force_jupyter=False)
    console.print(renderable)
    html = console.export_html(inline_styles=True, code_format=HTML, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}
