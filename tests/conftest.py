"""What tests of several files share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collections in every timed window need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and lose much where other processes want the CPUs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def default_matmul_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
