"""Numbers and foreign text for people. None is a dash."""

from __future__ import annotations

from collections.abc import Iterable

DASH = "–"
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """Three significant digits, or the whole number it is."""
    if value is None:
        return DASH
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f} %"


def si(value: float | None) -> str:
    """With k, M or G."""
    if value is None:
        return DASH
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def clock_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def sparkline(values: Iterable[float]) -> str:
    """One character per value, between the smallest and the largest of them."""
    series = list(values)
    if not series:
        return ""
    low, high = min(series), max(series)
    span = high - low
    if span <= 0:
        return _BARS[0] * len(series)
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in series)


def printable(text: str, lines: bool = False) -> str:
    """Foreign text for a terminal: control characters, which could move the cursor or hide text, become `�`. On one
    line, or with its `lines` (and tabs as spaces)."""
    if not lines:
        return _visible(" ".join(text.split()))
    return "\n".join(_visible(line.expandtabs(4)) for line in text.replace("\r\n", "\n").split("\n"))


def _visible(line: str) -> str:
    return "".join(" " if each.isspace() else each if each.isprintable() else "�" for each in line)
