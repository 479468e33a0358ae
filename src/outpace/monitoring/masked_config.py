"""The settings of a run as trackers receive them, with secrets masked: values of `launch.env`, values of arguments in
`launch.args` and `tools.mcp` whose names say so, and users, passwords and queries of URLs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MASK = "***"

_SECRET = re.compile("key|token|secret|password|bearer", re.IGNORECASE)
_URL_USER = re.compile(r"(\w://)[^/@\s]+@")
_URL_QUERY = re.compile(r"(\w://[^\s?]+\?)\S+")


def read_masked_config(run: Path) -> dict[str, Any]:
    config = tomllib.loads((run / "resolved.toml").read_text())
    launch, tools = config.get("launch", {}), config.get("tools", {})
    if env := launch.get("env"):
        launch["env"] = dict.fromkeys(env, MASK)
    if arguments := launch.get("args"):
        launch["args"] = mask_arguments(arguments)
    if servers := tools.get("mcp"):
        tools["mcp"] = [" ".join(mask_arguments(server.split(" "))) for server in servers]
    masked: dict[str, Any] = _mask_urls(config)
    return masked


def mask_arguments(words: Sequence[str]) -> list[str]:
    """Mask the values of arguments whose names say that they are secret, as `--api-key X`, `--api-key=X`, `KEY=X`."""
    masked = []
    named = False  # the word before names a secret
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = bool(_SECRET.search(name))
        masked.append(MASK if named else f"{name}={MASK}" if equals and is_secret else word)
        named = is_secret and not equals and (word.startswith("-") or word.lower() == "bearer")
    return masked


def _mask_urls(value: Any) -> Any:
    """Mask users, passwords and queries of all URLs."""
    if isinstance(value, dict):
        return {name: _mask_urls(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_mask_urls(each) for each in value]
    if isinstance(value, str):
        return _URL_QUERY.sub(rf"\1{MASK}", _URL_USER.sub(rf"\1{MASK}@", value))
    return value
