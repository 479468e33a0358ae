"""MERGED"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from outpace.errors import one_line
from outpace.rollouts.tools.functions import ToolError
from outpace.rollouts.tools.results import described

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock


def text_of(result: CallToolResult) -> str:
    """Return the text of a result, one part per line. Raises `ToolError` if the server marks it as an error."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise ToolError(text or "the tool failed without a message")
    return text


def _part(block: ContentBlock) -> str:
    """Return one part of a result: text verbatim, anything else as a description."""
    if block.type == "text":
        return block.text
    if block.type == "image" or block.type == "audio":
        return described(_decoded_size(block.data), block.mime_type)
    if block.type == "resource_link":
        return one_line(f"[{block.name}: {block.uri}]")
    resource = block.resource
    if hasattr(resource, "text"):
        return str(resource.text)
    return described(_decoded_size(resource.blob), resource.mime_type or "binary data")


def _decoded_size(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")
