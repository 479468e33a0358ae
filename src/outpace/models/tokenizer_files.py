"""Whether a model directory still holds the tokenizer that a run was started with.

By the files that say which text has which ids; how messages are rendered may change from one start to the next.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

VOCABULARY = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")


def tokenizer_digest(directory: Path) -> str:
    """The same for the same vocabulary files, wherever the directory is."""
    digest = blake2b(digest_size=16)
    for name in VOCABULARY:
        if (directory / name).is_file():
            content = (directory / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
