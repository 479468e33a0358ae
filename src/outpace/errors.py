"""One vocabulary of failure, by boundary.

- `BadInput`: the user's config, file, model or function cannot work. One line, exit code 2, nothing left behind.
- `PartFailed`: an engine, the learner or a worker raised or died. Carries the part's own traceback. Exit code 4.
- `PartLost`: the same, because it or the connection to it went away. Its successor may be asked the same again.
- `Stalled`: nothing moved for longer than configured. Exit code 5.
- `Interrupted`: a signal asked the run to stop; a checkpoint was written. Exit code 3.
- `RequestFailed`: one engine request failed; the episode that made it fails, its siblings do not.
- `ContextFull`: the same, because the conversation has outgrown the model's context.
- `UpdateFailed`: new weights did not reach an engine, which goes on with those it has; `UpdateTorn`: nor has it those
  any more, and it serves nothing before the next update succeeds.
- `ServerFailed`: an inference server did not do what it was asked. By cause: `ServerGone` (no connection),
  `ServerSilent` (no answer in time), `ServerFaulty` (trouble of its own), `ServerRefused` (the request is wrong).
- `RewardFailed`: a reward function gave something unusable; names the function and the sample.
"""

from __future__ import annotations

EXIT_LEFT_AT_ONCE = 130
"""A second signal: the run left without a checkpoint of its own."""


class OutpaceError(Exception):
    """Anything outpace raises on purpose."""

    exit_code = 4


class BadInput(OutpaceError):
    """What the user gave cannot work; the message is one line that says what to change."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"outpace: {self}"]


class Interrupted(OutpaceError):
    """Stopped by a signal, with a checkpoint to resume from."""

    exit_code = 3

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"outpace: {self}"]


class PartFailed(OutpaceError):
    """A part of the running system raised or died. `remote_traceback` is the part's own, as text."""

    exit_code = 4

    def __init__(self, part: str, message: str, remote_traceback: str = "") -> None:
        super().__init__(f"{part}: {message}")
        self.part = part
        self.message = message
        self.remote_traceback = remote_traceback


class PartLost(PartFailed):
    """A part, or the connection to it, went away. Whoever takes its place may be asked again."""


class Stalled(OutpaceError):
    """No progress within the configured bound; the message names who waits on whom."""

    exit_code = 5


class RequestFailed(OutpaceError):
    """One generation request could not be served."""


class ContextFull(RequestFailed):
    """The prompt leaves no room for an answer in the engine's context."""


class UpdateFailed(OutpaceError):
    """New weights did not reach an engine. It serves the version that it had."""


class UpdateTorn(UpdateFailed):
    """An update has failed half-way: who can say what the engine holds? It serves nothing before the next one."""


class ServerFailed(OutpaceError):
    """An inference server did not do what it was asked."""


class ServerGone(ServerFailed):
    """There is no connection to it, or there is none any more."""


class ServerSilent(ServerFailed):
    """It gave no answer within the deadline."""


class ServerFaulty(ServerFailed):
    """It answered with trouble of its own, or with something that cannot be read."""


class ServerRefused(ServerFailed):
    """It says that the request is wrong. Asking again would not help."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RewardFailed(OutpaceError):
    """A reward function raised, or returned something that is not one number per completion.

    `function` is its name, empty if several are involved; `reason` is the message without the name and the sample."""

    def __init__(self, message: str, function: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.function = function
        self.reason = reason or message


class NotSaved(OutpaceError):
    """A checkpoint could not be written, for lack of room or the like. Those before it are as they were."""


class CorruptData(OutpaceError):
    """A checksum does not match what was written."""


def one_line(text: object, limit: int = 300) -> str:
    """Foreign text made fit for a one-line message: white space collapsed, characters that UTF-8 cannot hold replaced,
    the end cut off if it is long."""
    return clip(" ".join(str(text).encode(errors="replace").decode().split()), limit)


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
