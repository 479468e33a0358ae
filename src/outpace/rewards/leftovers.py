"""Removing what a sandboxed program wrote, whatever it did to make that hard.

Directories that may not be read, trees deeper than a path can be long, links to somewhere else: a tree is taken down by
moving what lies in its directories up to its top, one level at a time, by descriptors and never through a link.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress

log = logging.getLogger(__name__)

WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")
"""Where every user may write, on any system."""


def remove_tree(path: str) -> None:
    """Remove a directory of ours with all that is in it; a warning where the system refuses."""
    try:
        top = _opened(path, None)
        try:
            while names := os.listdir(top):
                for name in names:
                    _remove(name, top)
        finally:
            os.close(top)
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("what a sandboxed program wrote cannot be removed: %s", error)


def remove_owned(uid: int, places: tuple[str, ...] = WRITABLE) -> None:
    """Remove what that user, who had only one program to run, has put into the directories that all may write to."""
    for place in places:
        with suppress(FileNotFoundError):
            names = os.listdir(place)
            for path in (os.path.join(place, name) for name in names):
                _remove_if_owned(path, uid)


def _remove_if_owned(path: str, uid: int) -> None:
    with suppress(FileNotFoundError):  # others use the directory too
        found = os.lstat(path)
        if found.st_uid != uid:
            return
        if stat.S_ISDIR(found.st_mode):
            remove_tree(path)
        else:
            os.unlink(path)


def _remove(name: str, top: int) -> None:
    """One entry of the top directory; the directories in it become entries of the top themselves."""
    if _unlinked(name, top):
        return
    here = _opened(name, top)
    try:
        for inner in os.listdir(here):
            if not _unlinked(inner, here):
                os.close(_opened(inner, here))  # nothing may be moved that may not be written
                os.rename(inner, f"moved-{secrets.token_hex(16)}", src_dir_fd=here, dst_dir_fd=top)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=top)


def _unlinked(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        return False
    return True


def _opened(name: str, directory: int | None) -> int:
    """A directory, opened for reading after its owner has been given back all rights."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(place)
