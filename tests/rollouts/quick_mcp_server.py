"""An MCP server on its standard streams with the standard library only: it starts in a tenth of the time of a real one.

For tests of what becomes of the process. mcp_server.py has the tools of a real server."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

TOOLS = {"whoami": {"variable": {"type": "string"}}, "hang": {}, "breed": {}}
printing = threading.Lock()


def whoami(variable: str = "") -> str:
    """The number of this process, or a variable of its environment."""
    return os.environ.get(variable, "") if variable else str(os.getpid())


def hang() -> str:
    """Never come back."""
    time.sleep(3600)
    return "never"


def breed() -> str:
    """Start a child that leaves the process group, holds every pipe and outlives the server; returns its pid."""
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    return str(child)


def result_of(method: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """Answer a request; None: an unknown method."""
    if method == "initialize":
        about = {"name": "quick", "version": "1"}
        return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        schemas = {name: {"type": "object", "properties": properties} for name, properties in TOOLS.items()}
        return {"tools": [{"name": name, "inputSchema": schema} for name, schema in schemas.items()]}
    if method == "tools/call":
        text = globals()[given["name"]](**given.get("arguments") or {})
        return {"content": [{"type": "text", "text": text}]}
    return {} if method == "ping" else None


def answer(request: dict[str, Any]) -> None:
    result = result_of(request["method"], request.get("params") or {})
    content = {"error": {"code": -32601, "message": "unknown method"}} if result is None else {"result": result}
    with printing:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **content}), flush=True)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            threading.Thread(target=answer, args=(request,), daemon=True).start()


if __name__ == "__main__":
    main()
