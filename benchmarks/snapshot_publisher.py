"""The learner's part in `vllm_updates.py`: a process that holds a model, publishes snapshots and trains on request.

    python benchmarks/snapshot_publisher.py DIRECTORY INCARNATION SETTINGS

Reads one command per line and writes one line of JSON for each. As in a run, the copy of the weights is queued on the
thread that trains.

    ready, idle   nothing
    busy          train until the next `idle`, also between publishes
    publish N     change the weights a little and publish them as version N: a manifest
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from outpace.config.load import make_config
from outpace.config.validation import resolve
from outpace.hardware.placement import uses_gpu
from outpace.learner.learner import build_snapshot_writer
from outpace.models.loading import resolve_model


def main(directory: str, incarnation: str, settings: dict[str, Any]) -> None:
    config = resolve(make_config(settings))
    device = "cuda" if uses_gpu(config) else "cpu"
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(str(resolve_model(config.model.path)), dtype=torch.float32).to(device)
    writer = build_snapshot_writer(config, device, Path(directory), incarnation)
    train = _training(model, device)
    busy, version = False, 0
    while True:
        if busy and not select.select([sys.stdin], [], [], 0)[0]:
            train()
            continue
        words = sys.stdin.readline().split()
        if not words:
            return
        reply = b"{}"
        if words[0] == "publish":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.view(-1)[::50] += 1e-4
            leased, version = [version], int(words[1])
            reply = msgspec.json.encode(writer.publish(version, model.state_dict(), leased))
        busy = words[0] == "busy" or (busy and words[0] == "publish")
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.flush()


def _training(model: Any, device: str) -> Callable[[], None]:
    """A training step: passes queued without waiting for the device, then one update of the weights."""
    rows, length, passes = (16, 512, 4) if device == "cuda" else (4, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=device == "cuda")
    tokens = torch.randint(0, model.config.vocab_size, (rows, length), device=device)

    def step() -> None:
        for _ in range(passes):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
