"""Weight transfer over a process group of two, with a real second process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
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
from outpace.weights.process_group import rendezvous_for, send_snapshot
from outpace.weights.shared_memory import SnapshotWriter
from outpace_vllm.collective import PIECE_BYTES

RECEIVER = """
import os, signal, sys, msgspec, torch
from outpace_vllm import collective

broadcast = collective.WeightChannel.broadcast

def stop_at_the_second(number):
    pieces = []

    def stop(channel, data, root):
        pieces.append(data)
        if len(pieces) == 2:
            os.kill(os.getpid(), number)
        broadcast(channel, data, root)

    return stop

print("ready", flush=True)
for line in sys.stdin:
    meeting, file, number = msgspec.json.decode(line)
    collective.WeightChannel.broadcast = stop_at_the_second(number) if number else broadcast
    try:
        torch.save({name: tensor.clone() for name, tensor in collective.receive(meeting)}, file)
        print("received", flush=True)
    except collective.TransferFailed as error:
        print("failed", error, flush=True)
"""


class Receiver:
    """A second process that receives one transfer after the other."""

    def __init__(self, program: Path) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, meeting: dict[str, Any], file: Path, stopped_by: int = 0) -> None:
        """Receive into a file. With `stopped_by`, the process sends itself this signal halfway."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode((meeting, str(file), stopped_by)).decode() + "\n")
        self.process.stdin.flush()

    def outcome(self) -> str:
        """Wait for the end of the start or of a transfer."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().removesuffix("\n")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Receivers:
    """Receivers that are reused while they live: importing torch takes longer than a transfer."""

    def __init__(self, program: Path) -> None:
        program.write_text(RECEIVER)
        self._program = program
        self._started: list[Receiver] = []

    def take(self, count: int = 1) -> list[Receiver]:
        living = [receiver for receiver in self._started if receiver.process.poll() is None]
        new = [Receiver(self._program) for _ in range(count - len(living))]
        self._started += new
        assert [receiver.outcome() for receiver in new] == ["ready"] * len(new)
        return (living + new)[:count]

    def close(self) -> None:
        for receiver in self._started:
            receiver.close()


@pytest.fixture(scope="module")
def receivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receivers]:
    started = Receivers(tmp_path_factory.mktemp("receivers") / "receiver.py")
    yield started
    started.close()


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
        await send_snapshot(manifest, meeting)


async def test_every_tensor_arrives_as_it_was_published(tmp_path: Path, receivers: Receivers) -> None:
    manifest, weights = published(tmp_path)
    meeting = rendezvous_for(manifest, 30.0, "gloo")
    [receiver] = receivers.take()
    receiver.start(meeting, tmp_path / "got.pt")
    await send(manifest, meeting)
    assert await asyncio.to_thread(receiver.outcome) == "received"
    got = torch.load(tmp_path / "got.pt", weights_only=True)
    assert got.keys() == weights.keys()
    for name, tensor in weights.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


@pytest.mark.slow
async def test_weights_are_sent_to_several_engines_concurrently(tmp_path: Path, receivers: Receivers) -> None:
    manifest, _ = published(tmp_path)
    meetings = [rendezvous_for(manifest, 40.0, "gloo") for _ in range(2)]
    both = receivers.take(2)
    for number, (receiver, meeting) in enumerate(zip(both, meetings, strict=True)):
        receiver.start(meeting, tmp_path / f"{number}.pt")
    await asyncio.gather(*(send(manifest, meeting) for meeting in meetings))
    assert [await asyncio.to_thread(receiver.outcome) for receiver in both] == ["received", "received"]


async def test_a_receiver_that_never_connects_is_an_error_by_the_deadline(tmp_path: Path) -> None:
    manifest, _ = published(tmp_path)
    with pytest.raises(UpdateFailed, match="version 4"):
        await send(manifest, rendezvous_for(manifest, 1.0, "gloo"))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_a_receiver_lost_halfway_is_an_error_and_the_next_transfer_succeeds(
    tmp_path: Path, receivers: Receivers, number: signal.Signals
) -> None:
    manifest, weights = published(tmp_path)
    meeting = rendezvous_for(manifest, 30.0 if number == signal.SIGKILL else 3.0, "gloo")
    lost, other = receivers.take(2)
    lost.start(meeting, tmp_path / "lost.pt", number)
    with pytest.raises(UpdateFailed, match="version 4"):
        await send(manifest, meeting)
    lost.process.kill()
    lost.process.wait()
    assert not (tmp_path / "lost.pt").exists()
    meeting = rendezvous_for(manifest, 30.0, "gloo")
    other.start(meeting, tmp_path / "got.pt")
    await send(manifest, meeting)
    assert await asyncio.to_thread(other.outcome) == "received"
    assert torch.equal(torch.load(tmp_path / "got.pt", weights_only=True)["second"], weights["second"])


@pytest.mark.slow
async def test_a_flipped_bit_is_found_by_the_receiver_and_reported_to_the_sender(
    tmp_path: Path, receivers: Receivers
) -> None:
    manifest, _ = published(tmp_path)
    flip(Path(manifest.path), manifest.tensors[2].offset + 9)
    meeting = rendezvous_for(manifest, 30.0, "gloo")
    [receiver] = receivers.take()
    receiver.start(meeting, tmp_path / "got.pt")
    with pytest.raises(UpdateFailed, match=r"\b1\b.*checksum"):
        await send(manifest, meeting)
    assert re.fullmatch(r"failed (?=.*checksum).*\bsecond\b.*", await asyncio.to_thread(receiver.outcome))
    assert not (tmp_path / "got.pt").exists()


async def test_sending_a_missing_snapshot_raises_corrupt_data(tmp_path: Path) -> None:
    manifest, _ = published(tmp_path)
    os.unlink(manifest.path)
    with pytest.raises(CorruptData):
        await send(manifest, rendezvous_for(manifest, 1.0, "gloo"))


@pytest.mark.slow
def test_a_sender_that_never_connects_is_an_error_for_the_receiver_by_the_deadline(
    tmp_path: Path, receivers: Receivers
) -> None:
    manifest, _ = published(tmp_path)
    meeting = rendezvous_for(manifest, 1.0, "gloo")
    [receiver] = receivers.take()
    receiver.start(meeting, tmp_path / "got.pt")
    assert re.match(rf"failed .*127\.0\.0\.1:{meeting['port']}\b", receiver.outcome())
