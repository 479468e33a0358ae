"""Weight transports: the calls they send to a server, recorded by a fake server."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from safetensors.torch import load_file

from outpace.engines.server.http import HttpClient
from outpace.engines.server.transports import AdapterTransport, CollectiveTransport, FilesTransport, MemoryTransport
from outpace.errors import CorruptData, ServerFaulty, UpdateFailed
from outpace.types import DeviceMemory, LoraAdapter, Manifest
from outpace.weights.delta import LocalSnapshot
from outpace.weights.shared_memory import SnapshotWriter
from outpace.weights.snapshot import SnapshotFile
from support import naming
from weights_support import flip

PHASES = {"hold_s": 0.25, "copy_s": 0.5, "resume_s": 0.125}


@dataclass
class Recorder:
    """Records calls and tracks adapters as vLLM does. `failing` paths answer with 500."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    adapters: dict[str, str] = field(default_factory=dict)
    folder: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((request.path, body))
        if request.path in self.failing:
            return web.json_response({"error": {"message": "the cause"}}, status=500)
        if body.get("method") == "reload_weights":
            self.folder = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        if body.get("method") == "outpace_update":
            return web.json_response({"results": [PHASES]})
        if "lora" in request.path:
            return self._adapter(request.path, body)
        return web.json_response({"message": "done"})

    def _adapter(self, path: str, body: Any) -> web.Response:
        name, loads = body["lora_name"], "unload" not in path
        if loads == (name in self.adapters):
            reason = "it has already been loaded" if loads else "it cannot be found"
            return web.json_response({"error": {"message": reason}}, status=400 if loads else 404)
        if loads:
            self.adapters[name] = body["lora_path"]
        else:
            del self.adapters[name]
        return web.Response(text=f"Success: LoRA adapter '{name}'.")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[Recorder, HttpClient]]:
    recorder = Recorder()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{tail:.*}", recorder.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    http = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}", retries=0)
    yield recorder, http
    await http.close()
    await runner.cleanup()


@pytest.fixture
def writer(tmp_path: Path) -> SnapshotWriter:
    return SnapshotWriter(tmp_path, "run", deltas=tmp_path)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64,), float(value)), "b": torch.arange(256.0)}


async def test_files_exist_during_the_swap_and_are_removed_after_it(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    transport = FilesTransport(http, 10, tmp_path / "folders")
    ready = await transport.prepare(writer.publish(3, tensors(1.0), []))
    assert (ready.version, ready.nbytes, recorder.calls) == (3, 4 * 320, [])
    await transport.swap(ready)
    assert recorder.calls[0][1]["method"] == "reload_weights"
    assert torch.equal(recorder.folder["a"], tensors(1.0)["a"])
    assert list((tmp_path / "folders").iterdir()) == []


async def test_the_folder_of_a_failed_update_is_removed_by_the_next_update(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    transport = FilesTransport(http, 10, tmp_path / "folders")
    recorder.failing = {"/collective_rpc"}
    with pytest.raises(ServerFaulty, match="the cause"):
        await transport.swap(await transport.prepare(writer.publish(1, tensors(1.0), [])))
    ready = await transport.prepare(writer.publish(2, tensors(2.0), []))
    assert list((tmp_path / "folders").iterdir()) == [Path(ready.source["folder"])]


async def test_a_memory_update_is_one_call_after_one_initialization(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter
) -> None:
    recorder, http = server
    transport = MemoryTransport(http, 10, label="run.{}".format, recompute=True)
    for version in (1, 2):
        manifest = writer.publish(version, tensors(version), [])
        phases = await transport.swap(await transport.prepare(manifest))
    assert recorder.paths == ["/init_weight_transfer_engine", "/collective_rpc", "/collective_rpc"]
    assert msgspec.to_builtins(phases) == {"prepare_s": 0.0, **PHASES}
    call = recorder.calls[-1][1]["kwargs"]
    assert (call["label"], call["recompute"]) == ("run.2", True)
    update = call["update"]
    assert (update["kind"], update["path"]) == ("memory", manifest.path)
    assert update["label"] == {"incarnation": "run", "version": 2}
    assert [spec["name"] for spec in update["tensors"]] == ["a", "b"]


async def test_a_failed_update_is_reported_with_its_cause(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter
) -> None:
    recorder, http = server
    transport = MemoryTransport(http, 10)
    ready = await transport.prepare(writer.publish(1, tensors(1.0), []))
    recorder.failing = {"/collective_rpc"}
    with pytest.raises(ServerFaulty, match="the cause"):
        await transport.swap(ready)


async def test_a_server_without_the_plugin_is_detected_before_it_is_paused(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter
) -> None:
    recorder, http = server
    recorder.failing = {"/init_weight_transfer_engine"}
    with pytest.raises(UpdateFailed, match="--weight-transfer-config"):
        await MemoryTransport(http, 10).prepare(writer.publish(1, tensors(1.0), []))


@pytest.mark.parametrize("kind", ["files", "memory"])
async def test_a_flipped_bit_is_found_before_anything_is_sent_to_the_server(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path, kind: str
) -> None:
    """Fault 31."""
    recorder, http = server
    transport = FilesTransport(http, 10, tmp_path / "folders") if kind == "files" else MemoryTransport(http, 10)
    manifest = writer.publish(1, tensors(1.0), [])
    flip(Path(manifest.path), manifest.tensors[1].offset + 9)
    with pytest.raises(CorruptData, match=r"^(?=.*checksum).*\bb\b"):
        await transport.prepare(manifest)
    assert "/collective_rpc" not in recorder.paths


@pytest.mark.parametrize("kind", ["files", "memory"])
async def test_with_a_local_copy_only_changed_weights_are_transferred(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path, kind: str
) -> None:
    recorder, http = server
    copy = LocalSnapshot(tmp_path)
    transport = FilesTransport(http, 10, tmp_path / "f", copy) if kind == "files" else MemoryTransport(http, 10, copy)
    await transport.swap(await transport.prepare(writer.publish(1, tensors(1.0), [])))
    second = writer.publish(2, tensors(2.0), [])
    assert second.delta is not None
    ready = await transport.prepare(second)
    assert ready.nbytes == second.delta.nbytes < second.nbytes
    await transport.swap(ready)
    if kind == "files":
        assert torch.equal(recorder.folder["a"], tensors(2.0)["a"])
    else:
        assert recorder.calls[-1][1]["kwargs"]["update"]["path"] == str(tmp_path / "local.weights")


async def test_a_gpu_memory_handle_is_sent_as_plain_text(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter
) -> None:
    recorder, http = server
    device = DeviceMemory("GPU-1", b"\x00handle\xff", 4096, [1, 2])
    manifest = msgspec.structs.replace(writer.publish(1, tensors(1.0), []), path="", device=device)
    transport = MemoryTransport(http, 10)
    await transport.swap(await transport.prepare(manifest))
    update = recorder.calls[-1][1]["kwargs"]["update"]
    assert base64.b64decode(update["handle"]) == device.handle
    assert (update["kind"], update["device"], update["nbytes"], update["sums"]) == ("ipc", "GPU-1", 4096, [1, 2])


async def test_a_process_group_is_joined_before_the_learner_sends_and_loaded_in_the_swap(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter
) -> None:
    recorder, http = server
    meetings: list[dict[str, Any]] = []

    async def send(manifest: Manifest, meeting: dict[str, Any]) -> None:
        update = {"kind": "fetch", "meeting": json.loads(json.dumps(meeting))}
        assert recorder.calls[-1][1]["kwargs"] == {"update": update, "hold": False}
        meetings.append(meeting)

    transport = CollectiveTransport(MemoryTransport(http, 10), send, "gloo", 10)
    ready = await transport.prepare(writer.publish(1, tensors(1.0), []))
    await transport.swap(ready)
    assert recorder.calls[-1][1]["kwargs"]["update"] == {"kind": "fetched", "key": meetings[0]["key"]}


def adapter(writer: SnapshotWriter, version: int) -> Manifest:
    return msgspec.structs.replace(
        writer.publish(version, tensors(version), []), adapter=LoraAdapter(4, 8.0, ["q_proj"])
    )


async def test_adapters_of_several_versions_stay_registered_until_removed(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    transport = AdapterTransport(http, 10, tmp_path / "adapters")
    for version in (1, 2):
        ready = await transport.prepare(adapter(writer, version))
        await transport.swap(ready)
        assert ready.adapter == f"outpace-run-{version}"
    assert recorder.adapters.keys() == {"outpace-run-1", "outpace-run-2"}
    await transport.forget(1)
    assert recorder.adapters == {"outpace-run-2": ready.source["lora_path"]}
    assert list((tmp_path / "adapters").iterdir()) == [Path(ready.source["lora_path"])]
    del recorder.adapters["outpace-run-2"]
    await transport.forget(2)
    assert list((tmp_path / "adapters").iterdir()) == []


async def test_an_adapter_whose_registration_answer_was_lost_is_registered_again(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    recorder.adapters["outpace-run-1"] = "an earlier folder"
    transport = AdapterTransport(http, 10, tmp_path / "adapters")
    ready = await transport.prepare(adapter(writer, 1))
    await transport.swap(ready)
    assert recorder.adapters == {"outpace-run-1": ready.source["lora_path"]}


async def test_closing_the_transport_of_a_remaining_server_removes_its_adapters(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    transport = AdapterTransport(http, 10, tmp_path / "adapters")
    for version in (1, 2):
        await transport.swap(await transport.prepare(adapter(writer, version)))
    recorder.adapters["another run's"] = "elsewhere"
    await transport.close(server_stays=True)
    assert recorder.adapters.keys() == {"another run's"}
    assert not (tmp_path / "adapters").exists()


async def test_closing_the_transport_of_a_stopping_server_sends_no_cleanup_calls(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    transport = AdapterTransport(http, 10, tmp_path / "adapters")
    await transport.swap(await transport.prepare(adapter(writer, 1)))
    await transport.close(server_stays=False)
    assert recorder.paths == ["/v1/load_lora_adapter"]
    assert not (tmp_path / "adapters").exists()


async def test_an_adapter_without_a_registration_answer_is_unregistered_when_removed(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    transport = AdapterTransport(http, 10, tmp_path / "adapters")
    ready = await transport.prepare(adapter(writer, 1))
    recorder.failing = {"/v1/load_lora_adapter"}
    with pytest.raises(ServerFaulty):
        await transport.swap(ready)
    recorder.adapters[ready.adapter] = ready.source["lora_path"]  # it was registered nevertheless
    await transport.forget(1)
    assert recorder.adapters == {}
    assert list((tmp_path / "adapters").iterdir()) == []


@pytest.mark.parametrize("kind", ["files", "memory"])
async def test_a_closed_transport_leaves_no_files(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path, kind: str
) -> None:
    _, http = server
    (tmp_path / "copy").mkdir()
    copy, folders = LocalSnapshot(tmp_path / "copy"), tmp_path / "folders"
    transport = FilesTransport(http, 10, folders, copy) if kind == "files" else MemoryTransport(http, 10, copy)
    await transport.prepare(writer.publish(1, tensors(1.0), []))
    await transport.close(server_stays=True)
    assert not folders.exists()
    assert list((tmp_path / "copy").iterdir()) == []


@pytest.mark.parametrize("kind", ["files", "memory", "adapters"])
async def test_a_cancelled_preparation_does_not_overlap_the_next_one(
    server: tuple[Recorder, HttpClient],
    writer: SnapshotWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    _, http = server
    transport = {
        "files": lambda: FilesTransport(http, 10, tmp_path / "f", LocalSnapshot(tmp_path)),
        "memory": lambda: MemoryTransport(http, 10, LocalSnapshot(tmp_path)),
        "adapters": lambda: AdapterTransport(http, 10, tmp_path / "f"),
    }[kind]()
    reading, overlaps, go_on = threading.Event(), threading.Event(), threading.Event()
    read_into = SnapshotFile.read_into

    def slow(self: SnapshotFile, *arguments: Any) -> Any:
        if self._manifest.version == 1 and not reading.is_set():
            reading.set()
            assert go_on.wait(20)
        elif not go_on.is_set():
            overlaps.set()
        return read_into(self, *arguments)

    monkeypatch.setattr(SnapshotFile, "read_into", slow)
    given_up = asyncio.create_task(transport.prepare(adapter(writer, 1)))
    await asyncio.to_thread(reading.wait, 20)
    given_up.cancel()
    following = asyncio.create_task(transport.prepare(adapter(writer, 2)))
    assert not await asyncio.to_thread(overlaps.wait, 0.5)
    go_on.set()
    assert (await following).version == 2


async def test_an_adapter_that_fails_to_load_raises_an_error(
    server: tuple[Recorder, HttpClient], writer: SnapshotWriter, tmp_path: Path
) -> None:
    recorder, http = server
    transport = AdapterTransport(http, 10, tmp_path / "adapters")
    ready = await transport.prepare(adapter(writer, 1))
    recorder.failing = {"/v1/load_lora_adapter"}
    with pytest.raises(ServerFaulty, match="the cause"):
        await transport.swap(ready)
    with pytest.raises(UpdateFailed, match=naming("version 2", "adapter")):
        await transport.prepare(writer.publish(2, tensors(2.0), []))
