"""The two roofs of a roofline: the arithmetic peak that MFU is a share of, from a data sheet where the device is known,
else from a matmul probe; and the memory's bandwidth, always measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tinydit_ray.bench.capability import compute_dtype
from tinydit_ray.bench.memory import available_mb

# Dense TFLOP/s without sparsity, from NVIDIA's data sheets (A100 2020, H100 SXM 2022, H200 2023): 16-bit, TF32, FP32.
KNOWN_TFLOPS: dict[str, dict[str, float]] = {
    "A100": {"16-bit": 312.0, "tf32": 156.0, "fp32": 19.5},
    "H100": {"16-bit": 989.0, "tf32": 494.0, "fp32": 67.0},
    "H200": {"16-bit": 989.0, "tf32": 494.0, "fp32": 67.0},
}
PROBE_SIZES = (192, 384, 768, 1536)
PROBE_S = 0.4
STREAM_MB = {"cpu": 128, "cuda": 512}  # of each of three arrays: four times the last cache, as STREAM asks


def peak_tflops(precision: str, device: str) -> tuple[float, str]:
    """(peak in TFLOP/s for matmuls of this precision, "known" or "measured")."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        kind = {"fp32": "fp32", "fp32-medium": "tf32"}.get(precision, "16-bit")
        for card, peaks in KNOWN_TFLOPS.items():
            if card in name:
                return peaks[kind], "known"
    return measure_tflops(compute_dtype(precision), device), "measured"


def measure_tflops(dtype: torch.dtype, device: str, *, seconds: float = PROBE_S) -> float:
    """Best rate of square matmuls (2 size^3 FLOP each) seen in ``seconds``. They grow while the next one, eight times
    as long, would fit: a processor without 16-bit arithmetic takes seconds for a large one, and the trial's time limit
    would end it with its timing already done."""
    for size in PROBE_SIZES:
        work = _matmul(size, dtype, device)
        took_s = _best_s(work, device, seconds / 40)
        if 8 * took_s > seconds:
            break
    return 2 * size**3 / min(took_s, _best_s(work, device, seconds)) / 1e12


def _matmul(size: int, dtype: torch.dtype, device: str) -> Callable[[], Any]:
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def measure_gbytes_per_s(device: str, *, megabytes: int = 0, seconds: float = PROBE_S) -> float | None:
    """Best rate, in GB/s (1e9 bytes), of adding two arrays into a third: the *Add* of STREAM (McCalpin 1995), which
    counts three arrays of traffic and not the reads that a cache makes before it writes. None where the memory that is
    free is too small for arrays that no cache holds.
    """
    megabytes = megabytes or STREAM_MB[device]
    free = available_mb() if device == "cpu" else torch.cuda.mem_get_info()[0] / 1e6
    if free is not None and free < 4 * megabytes:
        return None
    try:
        a, b, out = (torch.ones(megabytes * 250_000, device=device) for _ in range(3))
    except RuntimeError:  # --memory-limit: a probe may not end the cell that it belongs to
        return None
    torch.add(a, b, out=out)
    return 3e-3 * megabytes / _best_s(lambda: torch.add(a, b, out=out), device, seconds)


def _best_s(work: Callable[[], Any], device: str, seconds: float) -> float:
    """The shortest time of the work, repeated for ``seconds``."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
