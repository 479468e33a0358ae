"""Digests of the tokenizer files in a directory."""

from pathlib import Path

from outpace.models.loading import tokenizer_digest


def directory(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_the_tokenizer_digest_depends_only_on_the_vocabulary_files(tmp_path: Path) -> None:
    here = directory(tmp_path / "a", tokenizer__json="{}", chat_template__jinja="x", config__json="1")
    there = directory(tmp_path / "b", tokenizer__json="{}", chat_template__jinja="y", config__json="2")
    assert tokenizer_digest(here) == tokenizer_digest(there)


def test_different_vocabulary_files_have_different_digests(tmp_path: Path) -> None:
    digests = {
        tokenizer_digest(directory(tmp_path / str(number), **files))
        for number, files in enumerate(
            [{}, {"tokenizer__json": "{}"}, {"tokenizer__json": "{ }"}, {"vocab__json": "ab", "merges__txt": "c"},
             {"vocab__json": "a", "merges__txt": "bc"}]
        )
    }  # fmt: skip
    assert len(digests) == 5
