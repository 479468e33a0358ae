"""Atomic checkpoint directories.

A checkpoint is written into a hidden temporary directory and becomes `step-000100` by one rename, after everything
in it has reached the disk and `manifest.json` lists every file with its size and CRC-32.

Invariants
- A directory named `step-…` was whole when it got its name. What a kill leaves behind has another name, is never
  chosen, and is cleaned by the next `begin`.
- `newest_complete` checks every byte, and falls back to the newest one that passes.
- A complete checkpoint is removed only while a newer complete one stays, and loses its name before its first file.

Everything here blocks on the disk: call it off the event loop.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import zlib
from pathlib import Path, PurePosixPath

import msgspec

from outpace import crash
from outpace.errors import CorruptData

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"
_BLOCK = 1 << 20


class FileEntry(msgspec.Struct, frozen=True):
    path: str  # relative, with forward slashes
    size: int
    crc32: int


class CheckpointManifest(msgspec.Struct, frozen=True):
    step: int
    files: list[FileEntry]


# ------------------------------------------------------------------------------------------------------------ writing


def begin(root: str | Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` into. Cleans what killed writers left."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    clean(root)
    temporary = root / f"{_UNFINISHED}{_name(step)}"
    temporary.mkdir()
    crash.reached("commit.begin")
    return temporary


def commit(temporary: Path) -> Path:
    """Make it a checkpoint, or raise and leave nothing of it; complete ones stay whatever happens."""
    target = temporary.parent / temporary.name.removeprefix(_UNFINISHED)
    try:
        _complete(temporary, step_of(target))
        crash.reached("commit.before_rename")
        replaced = _set_aside(target)
        os.rename(temporary, target)
        _sync(target.parent)
    except BaseException:
        discard(temporary)
        _restore_replaced(temporary.parent)
        raise
    crash.reached("commit.after_rename")
    if replaced is not None:
        shutil.rmtree(replaced)
    return target


def _complete(temporary: Path, step: int) -> None:
    """Everything on the disk, and listed."""
    entries = [_seal(path, temporary) for path in sorted(temporary.rglob("*")) if path.is_file()]
    crash.reached("commit.before_manifest")
    manifest = CheckpointManifest(step=step, files=entries)
    (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    _sync(temporary / MANIFEST)
    for folder in [path for path in temporary.rglob("*") if path.is_dir()] + [temporary]:
        _sync(folder)


def discard(temporary: Path) -> None:
    """Give up a checkpoint that was begun."""
    shutil.rmtree(temporary, ignore_errors=True)


def clean(root: str | Path) -> None:
    """Remove what killed writers left behind. One writer per directory: nobody else's work is in there."""
    _restore_replaced(Path(root))
    for path in Path(root).glob(f"{_REMOVED}*"):
        shutil.rmtree(path)
    for path in Path(root).glob(f"{_UNFINISHED}*"):
        logger.warning("removing %s: its writer did not finish", path)
        shutil.rmtree(path)


def prune(root: str | Path, keep: int, best: int | None = None) -> list[Path]:
    """Remove all but the newest `keep` whole checkpoints and that of step `best`, and broken ones older than the newest
    whole one.

    Wholeness is judged by names and sizes: the newest was just written and read back when it was sealed."""
    assert keep >= 1, "the last complete checkpoint is never removed"
    crash.reached("prune.before")
    removed, whole = [], 0
    for path in _newest_first(Path(root)):
        is_whole = _is_plausible(path)
        whole += is_whole
        is_wanted = is_whole and (whole <= keep or step_of(path) == best)
        if whole and not is_wanted:
            _remove(path)
            removed.append(path)
    return removed


# ------------------------------------------------------------------------------------------------------------ reading


def newest_complete(root: str | Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; None if there is none."""
    root = Path(root)
    if not root.is_dir():
        return None
    _restore_replaced(root)
    for path in _newest_first(root):
        try:
            verify(path)
        except CorruptData as error:
            logger.warning("checkpoint %s is not complete (%s); trying the one before", path, error)
        else:
            return path
    return None


def verify(checkpoint: str | Path) -> CheckpointManifest:
    """Check every file against the manifest, or raise CorruptData."""
    checkpoint = Path(checkpoint)
    manifest = read_manifest(checkpoint)
    for entry in manifest.files:
        path = checkpoint / entry.path
        if not path.is_file() or path.stat().st_size != entry.size:
            raise CorruptData(f"{entry.path} is missing or has another size")
        try:
            found = _crc32(path)
        except OSError as error:  # a broken disk, or another process that has just removed it
            raise CorruptData(f"{entry.path} cannot be read: {error}") from None
        if found != entry.crc32:
            raise CorruptData(f"{entry.path} is not what was written")
    return manifest


def read_manifest(checkpoint: str | Path) -> CheckpointManifest:
    try:
        manifest = msgspec.json.decode((Path(checkpoint) / MANIFEST).read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptData(f"no readable {MANIFEST}: {error}") from None
    for entry in manifest.files:
        parts = PurePosixPath(entry.path)
        if parts.is_absolute() or ".." in parts.parts:
            raise CorruptData(f"{MANIFEST} names {entry.path!r}, outside the checkpoint")
    return manifest


def step_of(checkpoint: str | Path) -> int:
    return _step_of(Path(checkpoint).name)


def steps(root: str | Path) -> list[int]:
    """Of all checkpoints, the newest first; whether they are whole is another question."""
    return [step_of(path) for path in _newest_first(Path(root))] if Path(root).is_dir() else []


def of_step(root: str | Path, step: int) -> Path:
    return Path(root) / _name(step)


# ------------------------------------------------------------------------------------------------------------ details


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(name: str) -> int:
    match = _STEP.fullmatch(name)
    assert match is not None, f"{name} is not the name of a checkpoint"
    return int(match.group(1))


def _newest_first(root: Path) -> list[Path]:
    found = [path for path in root.iterdir() if path.is_dir() and _STEP.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def _is_plausible(checkpoint: Path) -> bool:
    try:
        files = read_manifest(checkpoint).files
    except CorruptData:
        return False
    paths = ((checkpoint / entry.path, entry.size) for entry in files)
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _seal(path: Path, root: Path) -> FileEntry:
    _sync(path)
    return FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, _crc32(path))


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _sync(path: Path) -> None:
    """To the disk: a file's bytes, or a directory's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(checkpoint: Path) -> None:
    """Half of it must never be taken for a checkpoint, not even for one that is broken."""
    nameless = checkpoint.parent / f"{_REMOVED}{checkpoint.name}"
    os.rename(checkpoint, nameless)
    _sync(checkpoint.parent)
    crash.reached("prune.middle")
    shutil.rmtree(nameless)


def _set_aside(target: Path) -> Path | None:
    """A checkpoint of the same step makes way for the new one, which is whole by now."""
    if not target.exists():
        return None
    aside = target.parent / f"{_REPLACED}{target.name}"
    os.rename(target, aside)
    crash.reached("commit.set_aside")
    return aside


def _restore_replaced(root: Path) -> None:
    """After a kill in the middle of a replacement: back to its name if the new one did not get there."""
    for aside in root.glob(f"{_REPLACED}*"):
        target = root / aside.name.removeprefix(_REPLACED)
        if target.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, target)
