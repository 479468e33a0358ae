"""Atomic checkpoint directories.

A checkpoint is written into a hidden temporary directory and becomes `step-000100` by one rename, after everything
in it has reached the disk and `manifest.json` lists every file with its size and CRC-32.

Invariants
- A directory named `step-…` was whole when it got its name. What a kill leaves behind has another name, and goes with
  the next `clean`.
- A checkpoint that makes way for another one of its step is called `.replaced-step-…` until that has its name: there is
  a whole one to be found at any moment.
- `newest_complete` checks every byte, and falls back to the newest one that passes.
- A complete checkpoint is removed only while a newer complete one stays, and loses its name before its first file.
- One process writes, and only it changes anything; whoever reads only looks, also while a run is at it.

Everything here but `begin` blocks on the disk: call it off the event loop.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
import zlib
from pathlib import Path, PurePosixPath

import msgspec

from outpace import crash
from outpace.checkpoint.durable import sync
from outpace.errors import CorruptData

log = logging.getLogger(__name__)

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
    """An empty directory to write the checkpoint of `step` into. Takes no time: nothing is removed here."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f"{_UNFINISHED}{_name(step)}"
    if temporary.exists():  # its writer was killed
        _set_apart(temporary)
    temporary.mkdir()
    crash.reached("commit.begin")
    return temporary


def commit(temporary: Path) -> Path:
    """Make it a checkpoint, or raise and leave nothing of it; complete ones stay whatever happens."""
    root, target = temporary.parent, temporary.parent / temporary.name.removeprefix(_UNFINISHED)
    try:
        _complete(temporary, step_of(target))
        crash.reached("commit.before_rename")
        _settle_replaced(root)
        _give_name(temporary, target)
    except BaseException:
        discard(temporary)
        _settle_replaced(root)
        raise
    crash.reached("commit.after_rename")
    _settle_replaced(root)
    return target


def _complete(temporary: Path, step: int) -> None:
    """Everything on the disk, and listed."""
    entries = [_seal(path, temporary) for path in sorted(temporary.rglob("*")) if path.is_file()]
    crash.reached("commit.before_manifest")
    manifest = CheckpointManifest(step=step, files=entries)
    (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    sync(temporary / MANIFEST)
    for folder in [path for path in temporary.rglob("*") if path.is_dir()] + [temporary]:
        sync(folder)


def _give_name(temporary: Path, target: Path) -> None:
    if target.exists():
        os.rename(target, _aside(target))
        crash.reached("commit.set_aside")
    os.rename(temporary, target)
    try:
        sync(target.parent)
    except OSError:
        os.rename(target, temporary)  # a name that may be gone with the power is none to rely on
        raise


def discard(temporary: Path) -> None:
    """Give up a checkpoint that was begun."""
    shutil.rmtree(temporary, ignore_errors=True)


def clean(root: str | Path) -> None:
    """Remove what killed writers left behind. One writer per directory: nobody else's work is in there."""
    _settle_replaced(Path(root))
    for path in Path(root).glob(f"{_UNFINISHED}*"):
        log.warning("removing %s: its writer did not finish", path)
        _erase(path)
    for path in Path(root).glob(f"{_REMOVED}*"):
        _erase(path)


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


def go_back(root: str | Path, step: int) -> None:
    """The run goes on from this step: what killed writers left goes, and so do newer checkpoints. They are damaged, or
    the newest would have been taken; counted as newest, they would keep `prune` from keeping the good ones."""
    clean(root)
    for path in _newest_first(Path(root)):
        if step_of(path) > step:
            log.warning("removing %s: it is damaged, and the run goes on from step %d", path, step)
            _remove(path)


# ------------------------------------------------------------------------------------------------------------ reading


def newest_complete(root: str | Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; None if there is none."""
    for path in _newest_first(Path(root)):
        try:
            verify(path)
        except CorruptData as error:
            log.warning("checkpoint %s is not complete (%s); trying the one before", path, error)
        else:
            return path
    return None


def verify(checkpoint: str | Path) -> CheckpointManifest:
    """Check every file against the manifest, or raise CorruptData."""
    checkpoint = Path(checkpoint)
    manifest = read_manifest(checkpoint)
    for entry in manifest.files:
        try:
            if not _has_size(checkpoint, entry):
                raise CorruptData(f"{entry.path} is missing or has another size")
            found = _crc32(checkpoint / entry.path)
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
    return _step_of(Path(checkpoint).name.removeprefix(_REPLACED))


def steps(root: str | Path) -> list[int]:
    """Of all checkpoints, the newest first; whether they are whole is another question."""
    return [step_of(path) for path in _newest_first(Path(root))]


def of_step(root: str | Path, step: int) -> Path:
    """Where that checkpoint lies, if there is one."""
    path = Path(root) / _name(step)
    return _aside(path) if not path.exists() and _aside(path).exists() else path


# ------------------------------------------------------------------------------------------------------------ details


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(name: str) -> int:
    match = _STEP.fullmatch(name)
    assert match is not None, f"{name} is not the name of a checkpoint"
    return int(match.group(1))


def _newest_first(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    # Twice: what a writer sets aside and replaces meanwhile must not be missed under both names.
    there = {path.name for _ in range(2) for path in root.iterdir() if path.is_dir()}
    found = {name.removeprefix(_REPLACED) for name in there if _STEP.fullmatch(name.removeprefix(_REPLACED))}
    paths = [root / name if name in there else _aside(root / name) for name in found]
    return sorted(paths, key=step_of, reverse=True)


def _is_plausible(checkpoint: Path) -> bool:
    try:
        files = read_manifest(checkpoint).files
    except CorruptData:
        return False
    return all(_has_size(checkpoint, entry) for entry in files)


def _has_size(checkpoint: Path, entry: FileEntry) -> bool:
    path = checkpoint / entry.path
    return path.is_file() and path.stat().st_size == entry.size


def _seal(path: Path, root: Path) -> FileEntry:
    sync(path)
    return FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, _crc32(path))


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _remove(checkpoint: Path) -> None:
    nameless = _set_apart(checkpoint)
    sync(nameless.parent)
    crash.reached("prune.middle")
    _erase(nameless)


def _set_apart(directory: Path) -> Path:
    """Take its name from it: half of a checkpoint must never be taken for one, not even for one that is broken."""
    nameless = directory.parent / f"{_REMOVED}{uuid.uuid4().hex}"
    os.rename(directory, nameless)
    return nameless


def _erase(directory: Path) -> None:
    """What stays, for whatever reason, has a name that nobody looks for, and is tried again by the next `clean`."""
    shutil.rmtree(directory, onerror=lambda _, path, error: log.warning("cannot remove %s: %s", path, error[1]))


def _aside(target: Path) -> Path:
    """Where a checkpoint is while another one of the same step takes its name."""
    return target.parent / f"{_REPLACED}{target.name}"


def _settle_replaced(root: Path) -> None:
    """After a replacement, or a kill in the middle of one: back to its name if the other one did not get there."""
    for aside in root.glob(f"{_REPLACED}*"):
        target = root / aside.name.removeprefix(_REPLACED)
        if target.exists():
            _erase(aside)
        else:
            os.rename(aside, target)
