"""Upload of an exported model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.errors import BadInput, one_line


def upload(directory: Path, name: str, *, token: str | None = None, private: bool | None = None, **options: Any) -> str:
    """Upload a model directory to the repository `name`, which is created if it does not exist. Returns its URL.

    `options`, such as `commit_message` and `revision`, go to `HfApi.upload_folder`."""
    from huggingface_hub import HfApi

    hub = HfApi(token=token)
    try:
        repository = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository.repo_id, folder_path=directory, **options)
    except (OSError, ValueError) as error:  # no connection, no token, no such repository
        raise BadInput(f"push_to_hub: cannot upload to {name}: {one_line(error, 200)}") from error
    return str(repository)
