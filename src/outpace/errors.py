"""Exceptions and exit codes, and helpers for one-line messages.

Exit codes: 2 bad input, 3 stopped by a signal with a checkpoint, 4 a component failed, 5 stalled.
"""

from __future__ import annotations

import re

EXIT_SECOND_SIGNAL = 130
"""Exit code after a second signal: the run exits immediately, without writing a checkpoint."""


class OutpaceError(Exception):
    """Base class of all errors that outpace raises deliberately."""

    exit_code = 4


class BadInput(OutpaceError):
    """The user's config, file, model or function cannot work. The message is one line that says what to change."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Shown by IPython instead of a traceback."""
        return [f"outpace: {self}"]


class Interrupted(OutpaceError):
    """Stopped by a signal, with a checkpoint to resume from."""

    exit_code = 3

    def _render_traceback_(self) -> list[str]:
        """Shown by IPython instead of a traceback."""
        return [f"outpace: {self}"]


class ComponentFailed(OutpaceError):
    """A component raised or died. `remote_traceback` is its traceback as text."""

    exit_code = 4

    def __init__(self, component: str, message: str, remote_traceback: str = "") -> None:
        super().__init__(f"{component}: {message}")
        self.component = component
        self.message = message
        self.remote_traceback = remote_traceback


class ComponentLost(ComponentFailed):
    """A component or the connection to it is gone. The call may be retried on its successor."""


class CollectiveFailed(OutpaceError):
    """A collective call failed in a process of a sharded learner, usually because another one failed or does not
    respond."""

    exit_code = 4


class Stalled(OutpaceError):
    """No progress within the configured time. The message names the longest waits."""

    exit_code = 5


class RequestFailed(OutpaceError):
    """One engine request failed. The episode that made it fails; the others in its group do not."""


class ContextFull(RequestFailed):
    """The prompt leaves no room for a completion in the engine's context."""


class EngineClosed(RequestFailed):
    """The engine has left the run or is about to. The request can continue on another one."""


class UpdateFailed(OutpaceError):
    """New weights did not reach an engine. It keeps serving its current version."""


class UpdateTorn(UpdateFailed):
    """A weight update failed halfway, so the engine's weights are unknown. It serves nothing until the next update
    succeeds."""


class ServerFailed(OutpaceError):
    """A request to an inference server failed."""


class ServerGone(ServerFailed):
    """The connection could not be made or was lost."""


class ServerSilent(ServerFailed):
    """The server did not reply within the timeout."""


class ServerFaulty(ServerFailed):
    """The server replied with an internal error or with something unreadable."""


class ServerRefused(ServerFailed):
    """The server rejected the request as invalid. A retry does not help."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RewardFailed(OutpaceError):
    """A reward function raised, or did not return one number per completion.

    `function` is its name, empty if several are involved. `reason` is the message without the function and sample."""

    def __init__(self, message: str, function: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.function = function
        self.reason = reason or message


class NotSaved(OutpaceError):
    """A checkpoint could not be written, for example because the disk is full. Earlier checkpoints are intact."""


class CorruptData(OutpaceError):
    """A checksum does not match the data."""


def one_line(text: object, limit: int = 300) -> str:
    """Make text fit for a one-line message: collapse whitespace, replace characters that UTF-8 cannot encode, and clip
    it to `limit` characters."""
    return clip(" ".join(str(text).encode(errors="replace").decode().split()), limit)


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `plural(1, "step")` is "1 step", `plural(2048, "step")` is "2,048 steps"."""
    return f"{count:,} {noun if count == 1 else _plural_of(noun)}"


def _plural_of(noun: str) -> str:
    if re.search("[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun, chosen by its first letter. Correct for the nouns that messages use."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"
