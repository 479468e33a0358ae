"""Atomic checkpoint directories, durable writes, and selection of the best checkpoint.

    begin ─▶ .unfinished-step-000100 ─▶ fsync files, manifest.json, directories ─▶ rename ─▶ step-000100

`manifest.json` lists every file with its size and CRC-32. The directory is renamed only after everything in it is on
the disk.

Invariants
- A directory named `step-…` was complete when it got its name. A killed writer leaves only directories with other
  names, which the next `clean` removes.
- A checkpoint being replaced by another one of the same step is named `.replaced-step-…` until the new one has its
  name, so a complete one can be found at any moment.
- `newest_complete` checks every byte and returns the newest checkpoint that passes.
- A complete checkpoint is removed only while a newer complete one remains. It is renamed before its first file is
  deleted.
- One process writes. Readers change nothing and may read while a run is writing.

The best checkpoint is the one with the highest held-out reward. Only evaluated versions with a checkpoint are compared;
ties go to the newest.

Everything here except `begin` blocks on the disk: call it off the event loop.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import msgspec

from outpace.errors import CorruptData
from outpace.monitoring.line_file import read_lines
from outpace.runtime import diagnostics


def fsync_path(path: Path) -> None:
    """Fsync a file, or a directory and the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and fsync it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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
    """Create an empty directory to write the checkpoint of `step` into. Fast: it deletes nothing."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f"{_UNFINISHED}{_name(step)}"
    if temporary.exists():  # left by a killed writer
        _unname(temporary)
    temporary.mkdir()
    diagnostics.crash_point("commit.begin")
    return temporary


def commit(temporary: Path) -> Path:
    """Turn the directory into a checkpoint. On error, discard it and raise. Complete checkpoints are never lost."""
    root, target = temporary.parent, temporary.parent / temporary.name.removeprefix(_UNFINISHED)
    try:
        _write_manifest(temporary, step_of(target))
        diagnostics.crash_point("commit.before_rename")
        _finish_replacement(root)
        _rename_to_step(temporary, target)
    except BaseException:
        discard(temporary)
        _finish_replacement(root)
        raise
    diagnostics.crash_point("commit.after_rename")
    _finish_replacement(root)
    return target


def _write_manifest(temporary: Path, step: int) -> None:
    """Fsync all files and directories, and write the manifest."""
    entries = [_sync_and_hash(path, temporary) for path in sorted(temporary.rglob("*")) if path.is_file()]
    diagnostics.crash_point("commit.before_manifest")
    manifest = CheckpointManifest(step=step, files=entries)
    (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    fsync_path(temporary / MANIFEST)
    for folder in [path for path in temporary.rglob("*") if path.is_dir()] + [temporary]:
        fsync_path(folder)


def _rename_to_step(temporary: Path, target: Path) -> None:
    if target.exists():
        os.rename(target, _replaced_path(target))
        diagnostics.crash_point("commit.set_aside")
    os.rename(temporary, target)
    try:
        fsync_path(target.parent)
    except OSError:
        os.rename(target, temporary)  # not durable: a power loss could undo the rename
        raise


def discard(temporary: Path) -> None:
    """Delete an unfinished checkpoint."""
    shutil.rmtree(temporary, ignore_errors=True)


def clean(root: str | Path) -> None:
    """Remove what killed writers left. Safe because a directory has only one writer."""
    _finish_replacement(Path(root))
    for path in Path(root).glob(f"{_UNFINISHED}*"):
        log.warning("removing %s: its writer did not finish", path)
        _erase(path)
    for path in Path(root).glob(f"{_REMOVED}*"):
        _erase(path)


def prune(root: str | Path, keep: int, best: int | None = None) -> list[Path]:
    """Remove all complete checkpoints except the newest `keep` and step `best`, and incomplete ones older than the
    newest complete one.

    Checks only file names and sizes: the newest checkpoint was read back for its checksums when it was written."""
    assert keep >= 1, "the last complete checkpoint is never removed"
    diagnostics.crash_point("prune.before")
    removed, complete = [], 0
    for path in _newest_first(Path(root)):
        is_complete = _sizes_match(path)
        complete += is_complete
        is_wanted = is_complete and (complete <= keep or step_of(path) == best)
        if complete and not is_wanted:
            _remove(path)
            removed.append(path)
    return removed


def remove_newer(root: str | Path, step: int) -> None:
    """Prepare to resume from `step`: clean up, and remove newer checkpoints.

    Newer ones are damaged; otherwise the run would resume from them. If kept, `prune` would count them as newest and
    delete good ones."""
    clean(root)
    for path in _newest_first(Path(root)):
        if step_of(path) > step:
            log.warning("removing damaged checkpoint %s: resuming from step %d", path, step)
            _remove(path)


# ------------------------------------------------------------------------------------------------------------ reading


def newest_complete(root: str | Path) -> Path | None:
    """Return the newest checkpoint whose files all match the manifest, or None."""
    return _first_complete(_newest_first(Path(root)))


def best_complete(run: str | Path) -> Path | None:
    """Return the checkpoint with the best held-out reward among those whose files all match the manifest, or None."""
    return _first_complete(checkpoint_path(Path(run) / CHECKPOINTS, step) for step in best_first(run))


def _first_complete(checkpoints: Iterable[Path]) -> Path | None:
    for path in checkpoints:
        try:
            verify(path)
        except CorruptData as error:
            log.warning("checkpoint %s is incomplete or damaged (%s); trying the next one", path, error)
        else:
            return path
    return None


def verify(checkpoint: str | Path) -> CheckpointManifest:
    """Check every file against the manifest. Raises `CorruptData`."""
    checkpoint = Path(checkpoint)
    manifest = read_manifest(checkpoint)
    for entry in manifest.files:
        try:
            if not _size_matches(checkpoint, entry):
                raise CorruptData(f"{entry.path} is missing or has the wrong size")
            found = _crc32(checkpoint / entry.path)
        except OSError as error:  # disk error, or removed by another process meanwhile
            raise CorruptData(f"{entry.path} cannot be read: {error}") from None
        if found != entry.crc32:
            raise CorruptData(f"{entry.path} does not match its checksum")
    return manifest


def read_manifest(checkpoint: str | Path) -> CheckpointManifest:
    try:
        manifest = msgspec.json.decode((Path(checkpoint) / MANIFEST).read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptData(f"cannot read {MANIFEST}: {error}") from None
    for entry in manifest.files:
        relative = PurePosixPath(entry.path)
        if relative.is_absolute() or ".." in relative.parts:
            raise CorruptData(f"{MANIFEST} lists {entry.path!r}, which is outside the checkpoint")
    return manifest


def step_of(checkpoint: str | Path) -> int:
    name = Path(checkpoint).name
    match = _STEP.fullmatch(name.removeprefix(_REPLACED))
    assert match is not None, f"{name} is not the name of a checkpoint"
    return int(match.group(1))


def list_steps(root: str | Path) -> list[int]:
    """Return the steps of all checkpoints, newest first. They may be incomplete."""
    return [step_of(path) for path in _newest_first(Path(root))]


def checkpoint_path(root: str | Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`, whether or not it exists."""
    path = Path(root) / _name(step)
    return _replaced_path(path) if not path.exists() and _replaced_path(path).exists() else path


# ------------------------------------------------------------------------------------------------------------ details


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _newest_first(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    # List twice: a checkpoint renamed during one listing could be missed under both names.
    there = {path.name for _ in range(2) for path in root.iterdir() if path.is_dir()}
    found = {name.removeprefix(_REPLACED) for name in there if _STEP.fullmatch(name.removeprefix(_REPLACED))}
    paths = [root / name if name in there else _replaced_path(root / name) for name in found]
    return sorted(paths, key=step_of, reverse=True)


def _sizes_match(checkpoint: Path) -> bool:
    try:
        files = read_manifest(checkpoint).files
    except CorruptData:
        return False
    return all(_size_matches(checkpoint, entry) for entry in files)


def _size_matches(checkpoint: Path, entry: FileEntry) -> bool:
    path = checkpoint / entry.path
    return path.is_file() and path.stat().st_size == entry.size


def _sync_and_hash(path: Path, root: Path) -> FileEntry:
    fsync_path(path)
    return FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, _crc32(path))


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _remove(checkpoint: Path) -> None:
    unnamed = _unname(checkpoint)
    fsync_path(unnamed.parent)
    diagnostics.crash_point("prune.middle")
    _erase(unnamed)


def _unname(directory: Path) -> Path:
    """Rename the directory, so that a half-deleted checkpoint is never taken for a checkpoint."""
    unnamed = directory.parent / f"{_REMOVED}{uuid.uuid4().hex}"
    os.rename(directory, unnamed)
    return unnamed


def _erase(directory: Path) -> None:
    """Delete a directory. What cannot be deleted is logged, and the next `clean` tries again."""
    shutil.rmtree(directory, onerror=lambda _, path, error: log.warning("cannot remove %s: %s", path, error[1]))


def _replaced_path(target: Path) -> Path:
    """Return the path of a checkpoint while another one of the same step replaces it."""
    return target.parent / f"{_REPLACED}{target.name}"


def _finish_replacement(root: Path) -> None:
    """Finish a replacement: delete the old checkpoint, or restore its name if the new one was never renamed."""
    for replaced in root.glob(f"{_REPLACED}*"):
        target = root / replaced.name.removeprefix(_REPLACED)
        if target.exists():
            _erase(replaced)
        else:
            os.rename(replaced, target)


CHECKPOINTS = "checkpoints"
EVALUATIONS = "evals.jsonl"
EVAL_REWARD = "eval/reward"


def best_step(run: str | Path) -> int | None:
    """Return the step of the best checkpoint of a run, or None if none was evaluated."""
    return next(iter(best_first(run)), None)


def best_first(run: str | Path) -> list[int]:
    """Return the steps of all evaluated checkpoints, best first. They may be incomplete."""
    rewards = _rewards(Path(run) / EVALUATIONS)
    evaluated = [step for step in list_steps(Path(run) / CHECKPOINTS) if step in rewards]
    return sorted(evaluated, key=lambda step: (rewards[step], step), reverse=True)


def _rewards(path: Path) -> dict[int, float]:
    """Return held-out rewards by version. After a resume, the later evaluation of a version counts."""
    return {
        line["step"]: float(line[EVAL_REWARD])
        for line in read_lines(path)
        if isinstance(line.get("step"), int) and isinstance(line.get(EVAL_REWARD), int | float)
    }
