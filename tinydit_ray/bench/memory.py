"""Peak memory of a trial, and the limit it is held to."""

from __future__ import annotations

import re
from pathlib import Path

MB = 1e6


def peak_rss_mb() -> float | None:
    """Peak resident memory of this process since it started (or since ``reset_peak_rss``), in MB (1e6 B)."""
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 / MB if match else None


def peak_device_mb(device: str) -> float | None:
    """Peak memory allocated on a CUDA device in MB; None on the CPU."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated() / MB


def available_mb() -> float | None:
    """Memory that could be allocated now without swapping, in MB (/proc/meminfo, MemAvailable)."""
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 / MB if match else None


def limit_memory(limit_mb: float) -> None:
    """Make allocations fail once this process has taken ``limit_mb`` more than it has now, instead of waking
    the kernel's OOM killer.

    RLIMIT_DATA counts private writable memory (man 2 setrlimit). RLIMIT_AS would count address space,
    of which CUDA builds reserve far more than they use. What is there already (thread stacks, the arenas
    of Ray's core worker) is reserved rather than used, and does not count.
    """
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = int(limit_mb * MB) + _private_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _private_bytes() -> int:
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


OOM_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad alloc", "not enough memory")


def is_oom(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or the device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower().replace("_", " ")
    return isinstance(error, (RuntimeError, OSError)) and any(sign in text for sign in OOM_SIGNS)
