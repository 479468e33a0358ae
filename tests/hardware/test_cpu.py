"""Detection of bfloat16 support, and refusal of bfloat16 on CPUs without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cpus import HASWELL, NEOVERSE_N1, NEOVERSE_V1, SAPPHIRE_RAPIDS, SIERRA_FOREST, SKYLAKE_SERVER
from outpace.config.load import make_config
from outpace.errors import BadInput
from outpace.hardware import cpu
from outpace.hardware.cores import check_dtype
from outpace.hardware.cpu import cpu_features, supports_bfloat16
from outpace.run.plan import UserObjects, make_plan


@pytest.mark.parametrize(
    ("cpuinfo", "supported"),
    [
        (NEOVERSE_N1, False),
        (NEOVERSE_V1, True),
        (HASWELL, False),
        (SKYLAKE_SERVER, True),
        (SAPPHIRE_RAPIDS, True),
        (SIERRA_FOREST, True),
        ("", False),
    ],
)
def test_bfloat16_support_follows_from_the_features_of_the_cpu(cpuinfo: str, supported: bool) -> None:
    assert supports_bfloat16(cpu_features(cpuinfo)) == supported


def test_this_machine_supports_bfloat16_exactly_if_torch_has_kernels_for_it() -> None:
    assert supports_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_without_a_cpuinfo_file_bfloat16_support_is_read_from_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "missing")
    assert supports_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.usefixtures("cpu_without_bfloat16")
def test_a_bfloat16_run_on_a_cpu_without_bfloat16_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"^model\.dtype: .*\bfloat32\b.*\bGPU\b"):
        make_plan(make_config({"model.dtype": "bfloat16", "run.device": "cpu"}), UserObjects())


@pytest.mark.usefixtures("cpu_without_bfloat16")
def test_bfloat16_on_a_gpu_and_float32_on_the_cpu_are_not_refused() -> None:
    check_dtype("bfloat16", "model.dtype", on_cpu=False)
    check_dtype("float32", "model.dtype", on_cpu=True)


@pytest.mark.usefixtures("cpu_with_bfloat16")
def test_bfloat16_on_a_cpu_that_supports_it_is_not_refused() -> None:
    check_dtype("bfloat16", "model.dtype", on_cpu=True)
