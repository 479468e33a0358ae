"""A fake server with the part of vLLM's protocol that a server engine uses, and with scripted faults.

The token sampled at position p of a sequence is p itself, so a missing or duplicated token is visible.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

FaultKind = Literal[
    "500",
    "429",
    "400",
    "malformed",
    "no_logprobs",
    "nan",
    "no_end",
    "error",
    "refusal",
    "drop",
    "last_chunk",
    "hang",
    "abort",
    "more",
]
ROUTES = ["/inference/v1/generate", "/v1/completions", "/abort_requests", "/update_weight_version", "/pause"]


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    after: int = 0  # tokens


@dataclass
class FakeServer:
    """`fault` is called for every request and returns the fault to inject. A paused server samples nothing."""

    routes: list[str] = field(default_factory=lambda: list(ROUTES))
    fault: Callable[[], Fault | None] = lambda: None
    probes_wait: bool = False  # probes never get an answer
    delay_s: float = 0.0
    resume_s: float = 0.0  # delay of the answer to /resume
    version: str = "default"
    began: float = 1.0
    metrics: str | None = None  # replaces the real metrics
    preemptions: int = 0
    url: str = ""
    received: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)  # model names answered with 404
    silent: set[str] = field(default_factory=set)  # paths that never answer
    failing: set[str] = field(default_factory=set)  # paths that answer with 500
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeServer]:
        self.resumed.set()
        app = web.Application(middlewares=[self._intercept])
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @web.middleware
    async def _intercept(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.path in self.silent:
            await asyncio.Event().wait()
        if request.path in self.failing:
            return web.json_response({"error": "out of order"}, status=500)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/v1/models":
                return web.json_response({"data": [{"id": "toy", "root": "/toy", "max_model_len": 64}]})
            case "/openapi.json":
                return web.json_response({"paths": {route: {} for route in self.routes}})
            case "/metrics":
                return web.Response(text=self._metrics() if self.metrics is None else self.metrics)
            case "/pause":
                self.resumed.clear()
            case "/resume":
                self.resumed.set()
                await asyncio.sleep(self.resume_s)
            case "/is_paused":
                return web.json_response({"is_paused": not self.resumed.is_set()})
            case "/update_weight_version":
                self.version = (await request.json())["new_version"]
            case "/reset_prefix_cache":
                self.preemptions += len(self.running)
                return web.Response()
            case "/abort_requests":
                for name in (await request.json())["request_ids"]:
                    if name in self.running:
                        self.running[name].set()
            case "/inference/v1/generate":
                return await self._generate(request)
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"status": "done"})

    def _metrics(self) -> str:
        return (
            f"# HELP process_start_time_seconds Start\nprocess_start_time_seconds {self.began}\n"
            f'vllm:num_requests_running{{engine="0"}} {len(self.running)}.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25\n'
            f'vllm:num_preemptions_total{{engine="0"}} {self.preemptions}.0\n'
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        probe = body["request_id"].startswith("probe")
        if probe and self.probes_wait:
            await asyncio.Event().wait()
        fault = None if probe else self.fault()
        if fault is not None and fault.kind in ("500", "429", "400"):
            return web.json_response({"error": {"message": "no"}}, status=int(fault.kind))
        if body["model"] in self.unknown:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        self.received.append(body)
        name = f"generate-tokens-{body['request_id']}"
        ended = self.running[name] = asyncio.Event()
        try:
            return await _Stream(self, request, body, ended, fault).run()
        finally:
            del self.running[name]


@dataclass
class _Stream:
    server: FakeServer
    request: web.Request
    body: dict[str, Any]
    ended: asyncio.Event
    fault: Fault | None
    spans: list[dict[str, Any]] = field(default_factory=list)
    response: web.StreamResponse = field(default_factory=lambda: web.StreamResponse())

    async def run(self) -> web.StreamResponse:
        self.response.content_type = "text/event-stream"
        await self.response.prepare(self.request)
        begin, count = len(self.body["token_ids"]), self.body["sampling_params"]["max_tokens"]
        stops = self.body["sampling_params"]["stop_token_ids"]
        for done in range(count):
            if not await self._wait_until_resumed():
                await self._send([], finish="abort")
                break
            if self.fault is not None and self.fault.after <= done and await self._inject_fault(begin + done):
                return self.response
            token = begin + done
            finish = "stop" if token in stops else "length" if done + 1 == count else None
            self._record_version(done)
            await self._send([token], finish=finish)
            if finish == "stop":
                break
        await self.response.write(b"data: [DONE]\n\n")
        return self.response

    async def _wait_until_resumed(self) -> bool:
        await asyncio.sleep(self.server.delay_s)
        waits = {asyncio.create_task(event.wait()) for event in (self.server.resumed, self.ended)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self.ended.is_set()

    def _record_version(self, done: int) -> None:
        if not self.spans or self.spans[-1]["version"] != self.server.version:
            self.spans.append({"version": self.server.version, "start": done, "end": done})
        self.spans[-1]["end"] = done + 1

    async def _inject_fault(self, token: int) -> bool:
        """Inject the fault. Return whether the stream ends here."""
        assert self.fault is not None
        match self.fault.kind:
            case "malformed":
                await self.response.write(b'data: {"choices": [\n\n')
            case "no_logprobs":
                await self._send([token], logprobs=None)
            case "nan":
                await self._send([token], logprobs={"content": [{"logprob": None}]})
            case "no_end":
                await self.response.write(b"data: [DONE]\n\n")
            case "error":
                await self._write({"error": {"message": "the engine has failed", "code": 500}})
            case "refusal":
                await self._write({"error": {"message": "the prompt is wrong", "code": 400}})
            case "drop":
                assert self.request.transport is not None
                self.request.transport.abort()
            case "last_chunk":
                await self._send([token])
                await asyncio.sleep(0.05)
                assert self.request.transport is not None
                self.request.transport.abort()
            case "hang":
                await asyncio.Event().wait()
            case "abort":
                await self._send([], finish="abort")
            case "more":
                await self._send(list(range(token, token + 99)))
        return True

    async def _send(self, tokens: list[int], finish: str | None = None, logprobs: Any = "given") -> None:
        if logprobs == "given":
            logprobs = {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]}
        choice = {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None and "/update_weight_version" in self.server.routes:
            choice["weight_versions"] = self.spans
        await self._write({"request_id": "x", "choices": [choice]})

    async def _write(self, chunk: dict[str, Any]) -> None:
        await self.response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
