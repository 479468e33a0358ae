"""CPU detection: architecture, cores and bfloat16 support.

Uses only the standard library, so it also runs as a script before anything is installed and prints one line:
`python3 src/outpace/hardware/cpu.py`.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_FEATURES: tuple[frozenset[str], ...] = (
    frozenset({"bf16"}),  # aarch64
    frozenset({"avx512_bf16"}),
    frozenset({"amx_bf16"}),
    frozenset({"avx512bw", "avx512vl", "avx512dq"}),  # no bfloat16 instructions, but oneDNN has kernels for it
    frozenset({"avx_vnni", "avx_vnni_int8", "avx_ne_convert"}),
)
"""Sets of CPU features, any one of which is enough for bfloat16 kernels in oneDNN and so in torch and vLLM. Without
them torch warns and is slow, and vLLM's CPU build crashes at startup."""


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """Parse the text of /proc/cpuinfo: `flags` on x86-64, `Features` on aarch64."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def supports_bfloat16(features: frozenset[str] | None = None) -> bool:
    """Return whether a CPU with these features, by default this one, has bfloat16 kernels."""
    if features is None:
        if not CPUINFO.exists():  # not Linux
            return _torch_supports_bfloat16()
        features = cpu_features(CPUINFO.read_text())
    return any(enough <= features for enough in BFLOAT16_FEATURES)


def describe_cpu() -> str:
    """Return one line: architecture, number of cores, bfloat16 support."""
    support = "bfloat16" if supports_bfloat16() else "no bfloat16"
    return f"{platform.machine()}, {os.cpu_count()} cores, {support}"


def _torch_supports_bfloat16() -> bool:
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


if __name__ == "__main__":
    print(describe_cpu())
