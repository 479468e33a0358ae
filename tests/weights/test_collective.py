"""Weight transfer over a process group of two, with a real second process."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from outpace.errors import CorruptData, UpdateFailed
from outpace.types import Manifest
from outpace.weights.process_group import ProcessGroupSender, rendezvous_for
from outpace.weights.shared_memory import SnapshotWriter
from outpace_vllm.collective import PIECE_BYTES

RECEIVER = """
import sys, msgspec, torch
from outpace_vllm import collective

if "die" in sys.argv or "hang" in sys.argv:
    import os, signal
    broadcast, pieces = collective.Channel.broadcast, []

    def fail_at_the_second(channel, data, root):
        pieces.append(data)
        if len(pieces) == 2:
            print("halfway", flush=True)
            os.kill(os.getpid(), signal.SIGKILL if "die" in sys.argv else signal.SIGSTOP)
        broadcast(channel, data, root)

    collective.Channel.broadcast = fail_at_the_second

print("ready", flush=True)
meeting = msgspec.json.decode(sys.stdin.readline())
try:
    tensors = {name: tensor.clone() for name, tensor in collective.receive(meeting)}
    torch.save(tensors, sys.argv[1])
except collective.TransferFailed as error:
    print("failed", error, flush=True)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def receiver(directory: Path, programs: list[subprocess.Popen[str]], *how: str) -> subprocess.Popen[str]:
    program = directory / "receiver.py"
    program.write_text(RECEIVER)
    command = [sys.executable, str(program), str(directory / "got.pt"), *how]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    programs.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def send_rendezvous(process: subprocess.Popen[str], meeting: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(meeting).decode() + "\n")
    process.stdin.flush()


def published(directory: Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Publish a snapshot of more than two pieces, with tensors that cross piece boundaries."""
    torch.manual_seed(1)
    weights = {
        "first": torch.randn(PIECE_BYTES // 8),
        "odd": torch.randn(3).bfloat16(),
        "second": torch.randn(PIECE_BYTES // 3),
        "none": torch.zeros(0, 4),
        "last": torch.tensor(7),
    }
    return SnapshotWriter(directory, "a").publish(4, weights, []), weights


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        (value,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([value ^ 16]), offset)


async def send(manifest: Manifest, meeting: dict[str, Any]) -> None:
    async with asyncio.timeout(60):
        await ProcessGroupSender().send(manifest, meeting)


async def test_every_tensor_arrives_as_it_was_published(tmp_path: Path, programs: list[Any]) -> None:
    manifest, weights = published(tmp_path)
    meeting = rendezvous_for(manifest, 30.0, "gloo")
    process = receiver(tmp_path, programs)
    send_rendezvous(process, meeting)
    await send(manifest, meeting)
    assert await asyncio.to_thread(process.wait, 30) == 0
    got = torch.load(tmp_path / "got.pt", weights_only=True)
    assert got.keys() == weights.keys()
    for name, tensor in weights.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


async def test_weights_are_sent_to_several_engines_concurrently(tmp_path: Path, programs: list[Any]) -> None:
    manifest, _ = published(tmp_path)
    meetings = [rendezvous_for(manifest, 40.0, "gloo") for _ in range(2)]
    for number, meeting in enumerate(meetings):
        (tmp_path / str(number)).mkdir()
        send_rendezvous(receiver(tmp_path / str(number), programs), meeting)
    await asyncio.gather(*(send(manifest, meeting) for meeting in meetings))
    assert [await asyncio.to_thread(process.wait, 30) for process in programs] == [0, 0]


async def test_a_receiver_that_never_connects_is_an_error_by_the_deadline(tmp_path: Path) -> None:
    manifest, _ = published(tmp_path)
    with pytest.raises(UpdateFailed, match="version 4"):
        await send(manifest, rendezvous_for(manifest, 1.0, "gloo"))


@pytest.mark.parametrize("how", ["die", "hang"])
async def test_a_receiver_lost_halfway_is_an_error_and_the_next_transfer_succeeds(
    tmp_path: Path, programs: list[Any], how: str
) -> None:
    manifest, weights = published(tmp_path)
    meeting = rendezvous_for(manifest, 3.0, "gloo")
    send_rendezvous(receiver(tmp_path, programs, how), meeting)
    with pytest.raises(UpdateFailed, match="version 4"):
        await send(manifest, meeting)
    meeting = rendezvous_for(manifest, 30.0, "gloo")
    process = receiver(tmp_path, programs)
    send_rendezvous(process, meeting)
    await send(manifest, meeting)
    assert await asyncio.to_thread(process.wait, 30) == 0
    assert torch.equal(torch.load(tmp_path / "got.pt", weights_only=True)["second"], weights["second"])


async def test_a_flipped_bit_is_found_by_the_receiver_and_reported_to_the_sender(
    tmp_path: Path, programs: list[Any]
) -> None:
    manifest, _ = published(tmp_path)
    flip(Path(manifest.path), manifest.tensors[2].offset + 9)
    meeting = rendezvous_for(manifest, 30.0, "gloo")
    process = receiver(tmp_path, programs)
    send_rendezvous(process, meeting)
    with pytest.raises(UpdateFailed, match=r"\b1\b.*checksum"):
        await send(manifest, meeting)
    assert re.fullmatch(r"failed (?=.*checksum).*\bsecond\b.*\n", process.stdout.readline())
    assert not (tmp_path / "got.pt").exists()


async def test_sending_a_missing_snapshot_raises_corrupt_data(tmp_path: Path) -> None:
    manifest, _ = published(tmp_path)
    os.unlink(manifest.path)
    with pytest.raises(CorruptData):
        await send(manifest, rendezvous_for(manifest, 1.0, "gloo"))


def test_a_sender_that_never_connects_is_an_error_for_the_receiver_by_the_deadline(
    tmp_path: Path, programs: list[Any]
) -> None:
    manifest, _ = published(tmp_path)
    process = receiver(tmp_path, programs)
    meeting = rendezvous_for(manifest, 1.0, "gloo")
    send_rendezvous(process, meeting)
    assert re.match(rf"failed .*127\.0\.0\.1:{meeting['port']}\b", process.stdout.readline())
    assert process.wait(30) == 0
