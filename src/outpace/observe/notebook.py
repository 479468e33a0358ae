"""MERGED"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

NOTEBOOK_REFRESH_S = 0.5
NOTEBOOK_WIDTH = 90
NOTEBOOK_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


class NotebookView:
    """Displays a renderable in one notebook output cell, updated in place."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._output: Any = None  # IPython display handle
        self._updated = 0.0

    def show(self, renderable: RenderableType, now: bool = True) -> None:
        """Replace the content of the output cell. Unless `now`, skip updates closer than NOTEBOOK_REFRESH_S."""
        shown_at = self._clock()
        if not now and self._output is not None and shown_at - self._updated < NOTEBOOK_REFRESH_S:
            return
        self._updated = shown_at
        if self._output is None:
            display = importlib.import_module("IPython.display").display
            self._output = display(_render_mime(renderable), raw=True, display_id=True)
        else:
            self._output.update(_render_mime(renderable), raw=True)


def _render_mime(renderable: RenderableType) -> dict[str, str]:
    """Render to HTML and plain text, keyed by MIME type."""
    console = Console(file=io.StringIO(), record=True, width=NOTEBOOK_WIDTH, force_terminal=True, force_jupyter=False)
    console.print(renderable)
    html = console.export_html(inline_styles=True, code_format=NOTEBOOK_HTML, clear=False)
    return {"text/html": html, "text/plain": console.export_text()}
