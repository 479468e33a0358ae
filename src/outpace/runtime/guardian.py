"""Who cleans up after a controller that was killed: a tiny process, started first, that notices the end of a pipe.

Children die with their parent where the kernel promises it (`outpace.runtime.lifeline`). What is left to the guardian
are directories in memory and on disk, programs that children of children have started, and systems whose kernel
promises nothing. Its inside is `outpace.runtime.guardian_child`.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outpace.runtime import guardian_child
from outpace.runtime.guardian_child import VARIABLE

log = logging.getLogger(__name__)

LEAVE_LIMIT_S = 5.0


class Guardian:
    def __init__(self, directories: Sequence[Path]) -> None:
        """Removes `directories` if this process ends without `dismiss`."""
        self._mark = f"{secrets.token_hex(8)}."
        reading, self._pipe = os.pipe()
        command = [sys.executable, "-I", "-S", guardian_child.__file__, self._mark, *map(str, directories)]
        try:
            self._process = subprocess.Popen(
                command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath}, cwd="/", start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(reading)
        os.set_blocking(self._pipe, False)  # the controller never waits for it

    @property
    def pid(self) -> int:
        return self._process.pid

    def marked(self, part: str, attempt: int) -> dict[str, str]:
        """What the environment of this part has to hold, so that all who descend from it can be found."""
        return {VARIABLE: self._mark_of(part, attempt)}

    def watch(self, pid: int) -> None:
        """A part was started."""
        self._tell(f"child {pid}")

    def sweep(self, part: str, attempt: int) -> None:
        """A part has died: whatever it had started is to end too."""
        self._tell(f"sweep {self._mark_of(part, attempt)}")

    def dismiss(self) -> None:
        """All is in order; it may leave. Blocks until it has."""
        self._tell("bye")
        os.close(self._pipe)
        try:
            self._process.wait(LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _mark_of(self, part: str, attempt: int) -> str:
        return f"{self._mark}{part}.{attempt}."

    def _tell(self, order: str) -> None:
        try:
            os.write(self._pipe, f"{order}\n".encode())
        except OSError as error:  # it was killed or stopped: the run does not depend on it
            log.warning("the guardian cannot be told %r: %s", order, error)
