"""The process of a trial, made ready before torch is imported: threads, caches, memory limit, time limit, log.

Nothing here imports torch. Settings are of the process, and each cell has a process of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinydit_ray.bench.memory import limit_memory

PR_SET_PDEATHSIG = 1  # man 2 prctl
USED = "TINYDIT_USED_BY"  # the process that runs, or ran, a cell
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def thread_environment(cpus: int) -> dict[str, str]:
    """Variables that OpenMP and BLAS read once, when torch is imported."""
    return dict.fromkeys(THREAD_VARIABLES, str(cpus))


def started_fresh(*, grouped: bool = False) -> bool:
    """Whether no cell ran in this process before and left settings behind: torch has not been imported yet. Ray
    Train imports it itself in the workers of a group (``grouped``), before it has them meet."""
    used = os.environ.get(USED) == str(os.getpid())
    os.environ[USED] = str(os.getpid())
    return not used and (grouped or "torch" not in sys.modules)


def process_start_time() -> float:
    """When this process started, seconds since the epoch (/proc/self/stat field 22, man 5 proc)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def set_environment(cpus: int, compile_cache: Path) -> None:
    """Threads and compile caches of this process and its children; before torch is imported."""
    os.environ.update(thread_environment(cpus))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compile_cache)
    os.environ["TRITON_CACHE_DIR"] = str(compile_cache / "triton")


# man 3 mallopt: parameter -> (its number, a value under which freed memory stays with the process)
MALLOC_KEEPS = {"M_TRIM_THRESHOLD": (-1, -1), "M_MMAP_MAX": (-4, 0), "M_TOP_PAD": (-2, 64 << 20)}


def keep_freed_memory() -> str:
    """Let malloc keep what is freed, so that a step finds the pages of its activations mapped already.

    By default glibc gives large blocks back to the system, or not, as the heap happens to lie: one process took
    no page fault in a step, the next one 32,000 of the same cell. What follows hits cell and control at random.
    Returns what ``effective.malloc`` says. Nothing is done where malloc is not glibc's.
    """
    if platform.libc_ver()[0] != "glibc":
        return "default"
    libc = ctypes.CDLL(None)
    kept = all(libc.mallopt(number, value) == 1 for number, value in MALLOC_KEEPS.values())
    return "keeps freed memory" if kept else "default"


@contextmanager
def cell_process(*, log: Path, memory_limit_mb: float, timeout_s: float) -> Iterator[None]:
    """Run the block with output in ``log`` and limits of memory (0: none) and time (0: none).

    Past ``timeout_s`` the stacks of all threads are written to the log and the process ends at once;
    the watchdog is a thread in C, so that not even a call that holds the GIL can outlast it.
    """
    with open(log, "ab", buffering=0) as file, _output_to(file.fileno()):
        if timeout_s > 0:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=file.fileno())
        if memory_limit_mb:
            limit_memory(memory_limit_mb)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def _output_to(descriptor: int) -> Iterator[None]:
    """stdout and stderr of this process and its children go to ``descriptor``."""
    saved = [(number, os.dup(number)) for number in (1, 2)]
    sys.stdout.flush(), sys.stderr.flush()
    try:
        for number, _ in saved:
            os.dup2(descriptor, number)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for number, old in saved:
            os.dup2(old, number)
            os.close(old)


def end_with_parent() -> None:
    """Have the kernel end this process when its driver dies, however it dies: a trial without a driver would go on
    using the CPUs that the resumed sweep measures on. Linux alone; elsewhere a trial ends by its time limit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
