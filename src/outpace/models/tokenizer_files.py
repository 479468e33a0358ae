"""MERGED"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")


def tokenizer_digest(directory: Path) -> str:
    """Return a digest of the vocabulary files, independent of where the directory is.

    Detects a changed tokenizer when a run resumes. The chat template may change and is not included."""
    digest = blake2b(digest_size=16)
    for name in VOCABULARY_FILES:
        if (directory / name).is_file():
            content = (directory / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
