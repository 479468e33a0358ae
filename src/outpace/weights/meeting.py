"""MERGED"""

from __future__ import annotations

import secrets
import socket
from typing import Any, Literal

import msgspec

from outpace.types import Manifest


def meeting_for(
    manifest: Manifest, timeout_s: float, backend: Literal["gloo", "nccl"], host: str = "127.0.0.1"
) -> dict[str, Any]:
    """Return the rendezvous of one transfer, at a free port of `host` (this machine), as plain data for both sides.

    See `outpace_vllm.collective` for the fields."""
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    return {
        "host": host,
        "port": port,
        "key": secrets.token_hex(8),
        "backend": backend,
        "timeout_s": timeout_s,
        "tensors": msgspec.to_builtins(sorted(manifest.tensors, key=lambda spec: spec.offset)),
    }
