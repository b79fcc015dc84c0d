"""The peak that MFU is a share of: from a data sheet where the device is known, else from a matmul probe."""

from __future__ import annotations

import time
from typing import Any

import torch

from tinydit_ray.bench.capability import compute_dtype

# Dense TFLOP/s without sparsity, from NVIDIA's data sheets (A100 2020, H100 SXM 2022, H200 2023): 16-bit, TF32, FP32.
KNOWN_TFLOPS: dict[str, dict[str, float]] = {
    "A100": {"16-bit": 312.0, "tf32": 156.0, "fp32": 19.5},
    "H100": {"16-bit": 989.0, "tf32": 494.0, "fp32": 67.0},
    "H200": {"16-bit": 989.0, "tf32": 494.0, "fp32": 67.0},
}
PROBE_SIZE = 1536
PROBE_S = 0.4


def peak_tflops(precision: str, device: str) -> tuple[float, str]:
    """(peak in TFLOP/s for matmuls of this precision, "known" or "measured")."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        kind = {"fp32": "fp32", "fp32-medium": "tf32"}.get(precision, "16-bit")
        for card, peaks in KNOWN_TFLOPS.items():
            if card in name:
                return peaks[kind], "known"
    return measure_tflops(compute_dtype(precision), device), "measured"


def measure_tflops(dtype: torch.dtype, device: str, *, size: int = PROBE_SIZE, seconds: float = PROBE_S) -> float:
    """Best rate of square matmuls (2 size^3 FLOP each) seen in ``seconds``, after two to warm up."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(size, size, generator=generator).to(device=device, dtype=dtype)
    out = torch.empty_like(a)
    for _ in range(2):
        torch.mm(a, a, out=out)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _one(a, out))
    return 2 * size**3 / best / 1e12


def _one(a: Any, out: Any) -> float:
    if a.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    torch.mm(a, a, out=out)
    if a.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
