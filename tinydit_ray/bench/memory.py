"""Peak memory of a trial, and the limit it is held to."""

from __future__ import annotations

import re
from pathlib import Path

MB = 1e6
MEMORY_SHARE = 0.9  # of what is free, for all trials together


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


def page_faults() -> int:
    """Pages that this process has been given so far without a disk (man 2 getrusage, ru_minflt)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def available_mb() -> float | None:
    """Memory that could be allocated now without swapping, in MB (/proc/meminfo, MemAvailable)."""
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 / MB if match else None


def share_mb(trials: int) -> float:
    """What each of so many trials may take of the memory that is free now, in MB; 0 where nobody knows."""
    free = available_mb()
    return MEMORY_SHARE * free / trials if free else 0.0


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


# oneDNN names no cause; it is memory where the process stands at its limit (its kernels are a few pages of code)
VAGUE_SIGNS = ("could not create a primitive",)
AT_LIMIT_BYTES = 128 * MB  # malloc asks the system for 64 MB at a time (process.keep_freed_memory)
OOM_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad alloc", "not enough memory")


def is_oom(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or the device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, SystemError):  # the interpreter itself found no memory and set no exception
        return at_limit()
    text = str(error).lower().replace("_", " ")
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    vague = any(sign in text for sign in VAGUE_SIGNS) and at_limit()
    return vague or any(sign in text for sign in OOM_SIGNS)


def at_limit() -> bool:
    """Whether this process has a memory limit and has all but used it up."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return limit > 0 and limit - _private_bytes() < AT_LIMIT_BYTES
