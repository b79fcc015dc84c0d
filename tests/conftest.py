"""What tests of several files share."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from tinydit_ray.bench.machine import granted_cpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The core tests need neither of the two, and importing them to find out costs seconds."""
    for package in ("ray", "mlflow"):
        if importlib.util.find_spec(package) is None:
            missing = pytest.mark.skip(reason=f"{package} is not installed")
            for item in items:
                if item.get_closest_marker(package):
                    item.add_marker(missing)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collections in every timed window need not look through it again."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Processes of `pytest -n` share the CPUs: with a thread for each CPU in every one all wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(max(1, granted_cpus() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))


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
