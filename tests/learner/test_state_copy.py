from __future__ import annotations

import torch

from outpace.learner.state import StateCopies, Tensors


def files(value: float, size: int = 5) -> dict[str, Tensors]:
    return {
        "model": {"a": torch.full((size, 3), value), "b": torch.full((size,), value, dtype=torch.bfloat16)},
        "optimizer": {"a": torch.tensor(value), "rng": torch.arange(7, dtype=torch.uint8)},
    }


def test_a_state_copy_is_independent_of_later_changes() -> None:
    live = files(1.0)
    copied = StateCopies().make(live, {}, {"small": b"text"})
    for tensors in live.values():
        for tensor in tensors.values():
            tensor.zero_()
    for file, tensors in files(1.0).items():
        assert copied.files[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(copied.files[file][name].local, tensor)
            assert copied.files[file][name].local.dtype == tensor.dtype
    assert copied.small_files == {"small": b"text"}


def test_constant_tensors_are_not_copied() -> None:
    reference = torch.ones(3)
    copied = StateCopies().make(files(1.0), {"reference": {"a": reference}}, {})
    assert copied.files["reference"]["a"].local.data_ptr() == reference.data_ptr()


def test_released_memory_is_reused() -> None:
    copies = StateCopies()
    first = copies.make(files(1.0), {}, {})
    address = first.files["model"]["a"].local.data_ptr()
    copies.release(first)
    second = copies.make(files(2.0), {}, {})
    assert second.files["model"]["a"].local.data_ptr() == address
    assert second.files["model"]["a"].local.unique().tolist() == [2.0]


def test_a_copy_in_use_is_not_overwritten_by_the_next() -> None:
    copies = StateCopies()
    first, second = copies.make(files(1.0), {}, {}), copies.make(files(2.0), {}, {})
    assert first.files["model"]["a"].local.unique().tolist() == [1.0]
    copies.release(first)
    copies.release(second)
    third, fourth = copies.make(files(3.0), {}, {}), copies.make(files(4.0), {}, {})
    assert [c.files["optimizer"]["a"].local.item() for c in (third, fourth)] == [3.0, 4.0]


def test_a_state_with_other_shapes_gets_new_memory() -> None:
    copies = StateCopies()
    copies.release(copies.make(files(1.0), {}, {}))
    assert copies.make(files(2.0, size=9), {}, {}).files["model"]["a"].local.shape == (9, 3)
