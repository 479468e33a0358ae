"""Formatting of numbers and untrusted text for the console. None is shown as a dash."""

from __future__ import annotations

from collections.abc import Iterable

DASH = "–"
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """Format with three significant digits, or as an integer if it is one."""
    if value is None:
        return DASH
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f} %"


def si(value: float | None) -> str:
    """Format with an SI suffix: k, M or G."""
    if value is None:
        return DASH
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def clock_text(seconds: float) -> str:
    """Format as h:mm:ss or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def sparkline(values: Iterable[float]) -> str:
    """Draw one bar character per value, scaled between the minimum and the maximum."""
    series = list(values)
    if not series:
        return ""
    low, high = min(series), max(series)
    span = high - low
    if span <= 0:
        return _BARS[0] * len(series)
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in series)


def printable(text: str, lines: bool = False) -> str:
    """Make untrusted text safe for a terminal: control characters, which could move the cursor or hide text, become
    `�`. The result is one line; with `lines`, line breaks are kept and tabs expanded."""
    if not lines:
        return _visible(" ".join(text.split()))
    return "\n".join(_visible(line.expandtabs(4)) for line in text.replace("\r\n", "\n").split("\n"))


def _visible(line: str) -> str:
    return "".join(" " if each.isspace() else each if each.isprintable() else "�" for each in line)
