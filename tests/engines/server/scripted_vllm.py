"""A fake vLLM that starts at once, with the routes that are called before a server counts as ready.

`laid_out` writes it as a package `vllm`, which is then started like the real one. Standard library only. Like the real
server it has a child process in another session; it prints that child's pid.

STAND_IN_TAKEN names a file: while it is not empty, a start removes its last byte and exits as if the port were taken.
STAND_IN_SEGMENTS names a file: the server creates shared memory and a semaphore, as vLLM does, and writes their paths
there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

VERSION = "0.99.0"
GENERATE = "/inference/v1/generate"


def laid_out(directory: Path) -> dict[str, str]:
    """Return the environment variables that make this Python import the fake vLLM."""
    module = directory / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    shutil.copy(__file__, module)
    described = directory / f"vllm-{VERSION}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    return {"PYTHONPATH": str(directory)}


def answers(flags: argparse.Namespace) -> dict[str, Any]:
    model = {"id": flags.served_model_name, "root": flags.model, "max_model_len": 256}
    settings = {"model": flags.model, "dtype": f"torch.{flags.dtype}", "max_model_len": 256}
    model_config = settings | {"logprobs_mode": flags.logprobs_mode}
    scheduler = {"max_num_seqs": int(flags.max_num_seqs)}
    return {
        "/version": {"version": VERSION},
        "/v1/models": {"data": [model]},
        "/openapi.json": {"paths": {GENERATE: {}, "/pause": {}}},
        "/server_info": {"vllm_config": {"model_config": model_config, "scheduler_config": scheduler}},
        "/is_paused": {"is_paused": False},
    }


class Handler(BaseHTTPRequestHandler):
    replies: dict[str, Any] = {}
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = self.replies.get(self.path.partition("?")[0])
        self._answer(404 if content is None else 200, "application/json", json.dumps(content or {}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != GENERATE:
            self._answer(404, "application/json", "{}")
            return
        token = {"token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "length"}
        chunk = json.dumps({"choices": [token]})
        self._answer(200, "text/event-stream", f"data: {chunk}\n\ndata: [DONE]\n\n")

    def _answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def created_segments(listing: str | None) -> list[Any]:
    """The segments last as long as the returned objects, or longer if this process is killed."""
    if listing is None:
        return []
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    names = [memory.name, f"sem.{semaphore._semlock.name.removeprefix('/')}"]
    with Path(listing).open("a") as file:
        file.writelines(f"/dev/shm/{name}\n" for name in names)
    return [memory, semaphore]


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("model", "served-model-name", "host", "port", "dtype", "logprobs-mode", "max-num-seqs"):
        parser.add_argument(f"--{flag}")
    flags, _ = parser.parse_known_args()
    taken = Path(os.environ.get("STAND_IN_TAKEN", "/nowhere"))
    if taken.exists() and taken.stat().st_size:
        os.truncate(taken, taken.stat().st_size - 1)
        raise OSError(98, "Address already in use")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
    kept = created_segments(os.environ.get("STAND_IN_SEGMENTS"))
    Handler.replies = answers(flags)
    ThreadingHTTPServer((flags.host, int(flags.port)), Handler).serve_forever()
    del kept


if __name__ == "__main__":
    main()
