"""Small models and rows as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import LlamaForCausalLM

from learner import small
from outpace.types import GroupRecord, Row


@pytest.fixture
def make_llama() -> Callable[..., LlamaForCausalLM]:
    return small.make_llama


@pytest.fixture
def make_row() -> Callable[..., Row]:
    return small.make_row


@pytest.fixture
def make_rows() -> Callable[..., list[Row]]:
    return small.make_rows


@pytest.fixture
def records() -> list[GroupRecord]:
    return small.make_records()
