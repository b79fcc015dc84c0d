"""What machine this is: the facts that go into sweep.json, and the node kind that cells are matched on."""

from __future__ import annotations

import os
import platform
import re
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "ray", "mlflow", "numpy", "pandas", "pyarrow", "scipy")


def granted_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache
def cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


@lru_cache
def gpu_names() -> tuple[str, ...]:
    """Names of the CUDA devices, through torch."""
    import torch

    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def node_kind(device: str = "cpu") -> str:
    """A name for machines whose timings may be compared: processor and count of CPUs, and the GPU
    where the sweep runs on it. For example ``AMD-EPYC-9755-x16`` or ``NVIDIA-H200-x1``."""
    if device == "cuda" and gpu_names():
        return f"{_slug(gpu_names()[0])}-x{len(gpu_names())}"
    return f"{_slug(cpu_name())}-x{granted_cpus()}"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", re.sub(r"\((R|TM)\)|CPU|@.*", "", name)).strip("-")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where installed; without importing them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine_facts() -> dict[str, Any]:
    """The machine in plain types, for sweep.json. GPUs are listed only where torch is already loaded."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpus": granted_cpus(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }
    if "torch" in sys.modules:
        facts["gpus"] = list(gpu_names())
    return facts


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None
