"""A small fake server of SGLang's protocol, written from its public documentation and source (0.5.8 to 0.5.18).

SGLang has no CPU build, so outpace is tested against this fake and not against the real server. It samples from a table
of logits, one row per preceding token, read from a safetensors file: different weights give different logprobs. It
reproduces these pitfalls on purpose:

- Requests are aborted by id prefix; a request that waits for the end of a pause cannot be aborted.
- One decode step is always in flight: tokens sampled before a pause are delivered after it, with the later label.
- Flushing the cache fails while there are requests, and as part of an update it kills the server. That is the default.
- Changing the label aborts all requests. That is the default.
- `ignore_eos` disables stop ids. The answer to a request aborted in the queue has one id and all logprobs.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from aiohttp import web
from safetensors.numpy import load_file

EOS = 2
CONTROLS = [
    "pause_generation",
    "continue_generation",
    "update_weight_version",
    "update_weights_from_disk",
    "abort_request",
    "load_lora_adapter",
    "unload_lora_adapter",
]
Streaming = Literal["cumulative", "incremental", "half"]
"""All tokens so far; only new tokens; or new ids with all logprobs so far, as in releases before 0.5.11."""


@dataclass(eq=False)
class Request:
    body: dict[str, Any]
    rid: str
    sampled: list[tuple[float, int, None]] = field(default_factory=list)  # including tokens not delivered yet
    by: list[str] = field(default_factory=list)  # the weights each token was really sampled with
    top: list[Any] = field(default_factory=list)
    delivered: int = 0
    streamed: int = 0
    finish: dict[str, Any] | None = None
    doomed: bool = False
    retracted: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def how(self) -> dict[str, Any]:
        return self.body["sampling_params"]


class Sglang:
    """The fake server. Set its attributes to change its configuration or behavior."""

    def __init__(
        self, model: Path, *, streaming: Streaming = "incremental", key: str | None = None, admin: str | None = None
    ) -> None:
        self.settings: dict[str, Any] = {
            "version": "0.5.18",
            "model_path": str(model),
            "dtype": "float32",
            "max_running_requests": 8,
            "enable_lora": True,
            "incremental_streaming_output": streaming == "incremental",
        }
        self.context = 64
        self.original_logprobs = False
        self.lag_s = 0.0  # time from sampling a token to sending and labelling its chunk
        self.paused = False
        self.seen: list[Request] = []
        self.caches: set[tuple[str, str]] = set()  # contents of the prefix cache: pairs of salt and weights
        self.label = "default"
        self.weights = self.label
        self.url = ""
        self._streaming = streaming
        self._key = key
        self._admin = admin  # the key required by control routes
        self._logits = _table(model)
        self._adapters: dict[str, Any] = {}
        self._running: list[Request] = []
        self._going = asyncio.Condition()
        self._random = np.random.default_rng(0)

    @property
    def adapters(self) -> list[str]:
        return list(self._adapters)

    # ---------------------------------------------------------------------------------------------------- lifecycle

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_post("/generate", self._generate)
        for name in CONTROLS:
            app.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_route("*", "/flush_cache", self._flush_cache)
        for path in ("/server_info", "/model_info", "/v1/models", "/v1/loads"):
            app.router.add_get(path, self._info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._stepping = asyncio.create_task(self._steps())

    async def stop(self) -> None:
        """Stop without answering requests in flight, as in a crash."""
        self._stepping.cancel()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        wanted = self._admin if self._admin and request.path[1:] in CONTROLS else self._key
        if wanted and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    # ---------------------------------------------------------------------------------------------------- sampling

    async def _steps(self) -> None:
        """Deliver the tokens of the last step, then sample the next step."""
        while True:
            await asyncio.sleep(0.001)
            if not self.paused:
                for request in list(self._running):
                    request.retracted = False
                    self._deliver(request)
                    if request.finish is None:
                        self._sample(request)

    def _deliver(self, request: Request) -> None:
        while request.delivered < len(request.sampled) and request.finish is None:
            token = request.sampled[request.delivered][1]
            request.delivered += 1
            stops = not request.how["ignore_eos"] and token in (EOS, *request.how["stop_token_ids"])
            if request.doomed:
                request.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            elif stops:
                request.finish = {"type": "stop", "matched": token}
            elif request.delivered >= request.how["max_new_tokens"]:
                request.finish = {"type": "length", "length": request.delivered}
        self._notify(request)

    def _notify(self, request: Request) -> None:
        if request.finish is not None and request in self._running:
            self._running.remove(request)
        if request.delivered > request.streamed or request.finish is not None:
            request.news.set()

    def _sample(self, request: Request) -> None:
        before = request.sampled[-1][1] if request.sampled else request.body["input_ids"][-1]
        raw = self._logits[before] + self._adapters.get(str(request.body.get("lora_path")), 0.0)
        probabilities = _softmax(raw / (request.how["temperature"] or 1.0))
        token = int(self._random.choice(len(raw), p=probabilities)) if request.how["temperature"] else int(raw.argmax())
        logprobs = np.log(_softmax(raw) if self.original_logprobs else probabilities)
        request.sampled.append((float(logprobs[token]), token, None))
        request.by.append(self.weights)
        best = np.argsort(-logprobs)[: request.body.get("top_logprobs_num", 0)]
        request.top.append([[float(logprobs[i]), int(i), None] for i in best])
        self.caches.add((str(request.body.get("extra_key")), self.weights))

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        how = {"ignore_eos": False, "stop_token_ids": [], **body["sampling_params"]}
        request = Request({**body, "sampling_params": how}, body.get("rid", "unnamed"))
        self.seen.append(request)
        if len(body["input_ids"]) + how["max_new_tokens"] > self.context:
            message = f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
            return await self._refused(http, body, message)
        async with self._going:
            await self._going.wait_for(lambda: not self.paused)
        self._running.append(request)
        return await (self._streamed(http, request) if body["stream"] else self._whole(request))

    async def _refused(self, http: web.Request, body: dict[str, Any], message: str) -> web.StreamResponse:
        error = {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}
        if not body["stream"]:
            return web.json_response(error, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def _whole(self, request: Request) -> web.Response:
        while request.finish is None:
            await request.news.wait()
            request.news.clear()
        return web.json_response(self._chunk(request, "cumulative"))

    async def _streamed(self, http: web.Request, request: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        while True:
            await request.news.wait()
            request.news.clear()
            await asyncio.sleep(self.lag_s)
            last = request.finish is not None
            chunk = self._chunk(request, self._streaming)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if last:
                await response.write(b"data: [DONE]\n\n")
                return response

    def _chunk(self, request: Request, streaming: Streaming) -> dict[str, Any]:
        had, request.streamed = request.streamed, request.delivered
        entries = request.sampled[: request.delivered]
        ids = [token for _, token, _ in entries]
        listed = entries[had:] if streaming == "incremental" else entries
        if request.retracted and request.finish is not None:  # merged with the chunk before it
            ids, listed = ids[-1:], listed + entries if streaming == "incremental" else entries
        elif streaming != "cumulative":
            ids = ids[had:]
        meta = {
            "id": request.rid,
            "finish_reason": request.finish,
            "completion_tokens": request.delivered,
            "weight_version": self.label,
            "output_token_logprobs": listed,
            "output_top_logprobs": request.top[: request.delivered],
        }
        return {"output_ids": ids, "meta_info": meta}

    # --------------------------------------------------------------------------------------------------- its control

    async def _abort_request(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("abort_all") or body.get("rid"):
            self._abort("" if body.get("abort_all") else body["rid"])
        return web.Response()

    def _abort(self, beginning: str) -> None:
        for request in [request for request in self._running if request.rid.startswith(beginning)]:
            if request.retracted:
                request.finish = {"type": "abort", "message": "Abort in waiting queue"}
                self._notify(request)
            else:
                request.doomed = True

    async def _pause_generation(self, http: web.Request) -> web.Response:
        self.paused = True
        mode = (await http.json()).get("mode", "abort")
        assert mode in ("in_place", "retract"), "what `abort` does is not written here: nothing uses it"
        if mode == "retract":
            for request in list(self._running):
                self._deliver(request)
                request.retracted = True
        return web.json_response({"status": "ok"})

    async def _continue_generation(self, http: web.Request) -> web.Response:
        self.paused = False
        async with self._going:
            self._going.notify_all()
        return web.json_response({"status": "ok"})

    async def _flush_cache(self, http: web.Request) -> web.Response:
        if self._running:
            return web.Response(status=400, text="Flush cache failed.")
        self.caches.clear()
        return web.Response(text="Cache flushed.")

    async def _update_weights_from_disk(self, http: web.Request) -> web.Response:
        body = await http.json()
        try:
            table = _table(Path(body["model_path"]))
        except (OSError, ValueError, KeyError) as error:
            return web.json_response({"success": False, "message": f"Failed to update weights: {error}"}, status=400)
        if body.get("flush_cache", True) and self._running:
            await self.stop()
        self._logits, self.weights = table, Path(body["model_path"]).name
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _update_weight_version(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("abort_all_requests", True):
            self._abort("")
        self.label = body["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.label})

    async def _load_lora_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body["lora_name"] in self._adapters:
            return web.json_response({"success": False, "error_message": "already loaded"}, status=400)
        tensors = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        lift = sum(tensor.sum() for tensor in tensors.values())
        self._adapters[body["lora_name"]] = lift * np.arange(len(self._logits))
        return web.json_response({"success": True, "loaded_adapters": list(self._adapters)})

    async def _unload_lora_adapter(self, http: web.Request) -> web.Response:
        known = self._adapters.pop((await http.json())["lora_name"], None) is not None
        return web.json_response({"success": known}, status=200 if known else 400)

    async def _tokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"tokens": [ord(letter) % 8 for letter in (await http.json())["prompt"]]})

    async def _info(self, http: web.Request) -> web.Response:
        load = {"num_running_reqs": len(self._running), "num_waiting_reqs": 1, "token_usage": 0.25}
        answers = {
            "/server_info": self.settings,
            "/model_info": {"weight_version": self.label},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": self.context}]},
            "/v1/loads": {"loads": [{**load, "queues": {"retracted": 2}}]},
        }
        return web.json_response(answers[http.path])


def _table(folder: Path) -> Any:
    """Read the tensor `logits`: one row of logits per preceding token."""
    return load_file(folder / "model.safetensors")["logits"].astype(np.float64)


def _softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
