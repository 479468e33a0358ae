from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from outpace.errors import CorruptData
from outpace.learner.state import load_tensors, write_tensors


def test_tensors_round_trip_through_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),  # an odd length first: later tensors must still be aligned
        "wide": torch.randn(3, 4, dtype=torch.float64),
        "turned": torch.randn(4, 6).t(),
        "brain": torch.randn(7).bfloat16(),
        "half": torch.randn(3).half(),
        "counter": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "long": torch.tensor([-1, 2**40]),
        "not finite": torch.tensor([float("nan"), float("inf")]),
    }
    write_tensors(tmp_path / "file", tensors)
    loaded = load_tensors(tmp_path / "file")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(loaded[name].nan_to_num(), tensor.nan_to_num()), name
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_damaged_file_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match="missing"):
        load_tensors(tmp_path / "missing")
    write_tensors(tmp_path / "cut", {"a": torch.zeros(100)})
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-1])
    with pytest.raises(CorruptData, match="cut"):
        load_tensors(tmp_path / "cut")


def test_a_full_disk_raises_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(100_000)})
