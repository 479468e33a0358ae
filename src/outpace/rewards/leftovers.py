"""MERGED"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress

log = logging.getLogger(__name__)

WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")
"""World-writable directories."""


def remove_tree(path: str) -> None:
    """Remove a directory and its contents; log a warning if the system refuses."""
    try:
        top = _open_directory(path, None)
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
        log.warning("cannot remove the files of a sandboxed program: %s", error)


def remove_owned(uid: int, directories: tuple[str, ...] = WRITABLE) -> None:
    """Remove everything that the run's user id left in the world-writable directories."""
    for directory in directories:
        with suppress(FileNotFoundError):
            names = os.listdir(directory)
            for path in (os.path.join(directory, name) for name in names):
                _remove_if_owned(path, uid)


def _remove_if_owned(path: str, uid: int) -> None:
    with suppress(FileNotFoundError):  # the directory is shared: the entry may vanish
        found = os.lstat(path)
        if found.st_uid != uid:
            return
        if stat.S_ISDIR(found.st_mode):
            remove_tree(path)
        else:
            os.unlink(path)


def _remove(name: str, top: int) -> None:
    """Remove one entry of the top directory; its subdirectories are moved up to the top."""
    if _try_unlink(name, top):
        return
    here = _open_directory(name, top)
    try:
        for inner in os.listdir(here):
            if not _try_unlink(inner, here):
                os.close(_open_directory(inner, here))  # makes it writable: rename requires that
                os.rename(inner, f"moved-{secrets.token_hex(16)}", src_dir_fd=here, dst_dir_fd=top)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=top)


def _try_unlink(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        return False
    return True


def _open_directory(name: str, directory: int | None) -> int:
    """Open a directory for reading after restoring the owner's permissions."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(handle)
