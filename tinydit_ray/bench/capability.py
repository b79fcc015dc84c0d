"""Can this machine run this cell at all? Asked before anything is built, so that a no costs seconds.

A cell that cannot run is ``unsupported`` with the reason. It never runs as something else.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinydit_ray.config import CellConfig

OPTIONAL_KERNELS = {"flash-attn": "flash_attn", "xformers": "xformers", "sage": "sageattention"}
OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # compile modes that capture CUDA graphs themselves


class Unsupported(Exception):
    """This machine cannot run this cell; the message says why."""


def check_capability(cell: CellConfig) -> None:
    """Raises Unsupported with the reason, or returns."""
    for check in (
        _device,
        _optional_kernel,
        _compiler,
        _optimizer,
        _cuda_only,
        _sampler,
        _attention,
        _precision,
        _medium,
    ):
        check(cell)


def check_group(cell: CellConfig, times: str) -> None:
    """What several workers cannot do together; raises Unsupported."""
    if cell.workers == 1:
        return
    if times == "sampler":
        raise Unsupported(f"workers {cell.workers}: a sampler is timed in one process")
    if times == "quality":
        raise Unsupported(f"workers {cell.workers}: a quality grid trains each cell in one process")
    if cell.cuda_graph == "on":
        raise Unsupported(f"cuda_graph on: a step that {cell.workers} workers take together is not captured")


def _device(cell: CellConfig) -> None:
    import torch

    if cell.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported("device cuda: this machine has no usable CUDA device")


def _optional_kernel(cell: CellConfig) -> None:
    package = OPTIONAL_KERNELS.get(cell.attention)
    if package and importlib.util.find_spec(package) is None:
        raise Unsupported(f"attention {cell.attention}: the package {package} is not installed")
    if package and cell.device != "cuda":
        raise Unsupported(f"attention {cell.attention}: its kernels exist for CUDA only, not for {cell.device}")


def _compiler(cell: CellConfig) -> None:
    if (cell.compile != "off" or cell.attention == "flex") and cell.device == "cpu":
        problem = cxx_problem(os.environ.get("CXX", ""))
        if problem:
            raise Unsupported(f"compile {cell.compile}: {problem}")


@lru_cache
def cxx_problem(cxx: str) -> str:
    """ "" where the C++ compiler that Inductor would use builds a shared library; else what is wrong."""
    command = cxx or next((name for name in ("g++", "clang++") if shutil.which(name)), "")
    if not command:
        return "no C++ compiler: neither g++ nor clang++ is on PATH, and CXX is not set"
    if not shutil.which(command):
        return f"the C++ compiler CXX={command} does not exist"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(
            '#include <cmath>\n#include <vector>\nextern "C" double f(double x) { return std::exp(x); }\n'
        )
        build = [command, "-shared", "-fPIC", "-o", str(Path(folder, "probe.so")), str(source)]
        try:
            done = subprocess.run(build, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the C++ compiler {command} does not run: {error}"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return "" if done.returncode == 0 else f"the C++ compiler {command} cannot build a shared library: {last}"


def _optimizer(cell: CellConfig) -> None:
    if cell.optimizer == "adamw-capturable" and cell.device != "cuda":
        raise Unsupported("optimizer adamw-capturable: PyTorch runs capturable AdamW on CUDA only")


def _cuda_only(cell: CellConfig) -> None:
    if cell.cuda_graph == "on" and cell.device != "cuda":
        raise Unsupported(f"cuda_graph on: needs a CUDA device, the cell asks for {cell.device}")
    if cell.cuda_graph == "on" and cell.precision == "fp16":
        raise Unsupported("cuda_graph on: fp16's loss scaler asks the device in each step, which no graph can hold")
    if cell.cuda_graph == "on" and cell.compile in OWN_GRAPHS:
        raise Unsupported(f"cuda_graph on: compile {cell.compile} captures graphs of its own, and they do not nest")
    if cell.compile == "reduce-overhead" and cell.device == "cpu":
        raise Unsupported("compile reduce-overhead: CUDA graphs are its only difference, and there are none on the CPU")


def _sampler(cell: CellConfig) -> None:
    if cell.sampler == "compiled" and cell.device == "cpu" and (problem := cxx_problem(os.environ.get("CXX", ""))):
        raise Unsupported(f"sampler compiled: {problem}")
    if cell.sampler == "bf16" and (problem := _try(lambda: _small_layer(cell.replace(precision="bf16-weights")))):
        raise Unsupported(f"sampler bf16 on {cell.device}: {problem}")
    if cell.sampler == "int8":
        if importlib.util.find_spec("torchao") is None:
            raise Unsupported("sampler int8: the package torchao is not installed (pip install 'tinydit-ray[int8]')")
        if problem := _try(lambda: _small_sampler(cell)):
            raise Unsupported(f"sampler int8 on {cell.device}: {problem}")


def _small_sampler(cell: CellConfig) -> None:
    import torch

    from tinydit_ray.model import TinyDiTConfig, build_model
    from tinydit_ray.sampler import Sampler

    model = build_model(TinyDiTConfig.of(cell.replace(depth=1)), cell.seed).to(cell.device)
    x = torch.zeros(2, 3, 32, 32, device=cell.device)
    Sampler(model, cell.sampler).velocity(x, torch.zeros(2, device=cell.device))


def _attention(cell: CellConfig) -> None:
    """Runs the kernel forward and backward on a few tokens of the cell's head width and dtype."""
    if cell.attention == "sdpa-math" and cell.compile != "off":
        raise Unsupported("attention sdpa-math with compile: the compiler takes the math form apart and fuses it")
    if cell.attention != "manual":
        problem = _try(lambda: _small_attention(cell))
        if problem:
            raise Unsupported(f"attention {cell.attention} in {cell.precision} on {cell.device}: {problem}")


def _small_attention(cell: CellConfig) -> None:
    import torch

    from tinydit_ray.model.attention import kernel_of

    dtype = compute_dtype(cell.precision)
    q, k, v = (
        torch.randn(2, cell.heads, 64, cell.dim // cell.heads, device=cell.device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    kernel_of(cell.attention)(q, k, v).sum().backward()


def _precision(cell: CellConfig) -> None:
    """A small matmul, LayerNorm and GELU forward and backward in the dtype."""
    if not cell.precision.startswith("fp32"):
        problem = _try(lambda: _small_layer(cell))
        if problem:
            raise Unsupported(f"precision {cell.precision} on {cell.device}: {problem}")


def _medium(cell: CellConfig) -> None:
    """Medium fp32 matmuls must be less exact than fp32 here; where they are not, the switch does nothing."""
    if cell.precision == "fp32-medium" and not medium_matmul_rounds(cell.device):
        raise Unsupported(f"precision fp32-medium: fp32 matmuls on this {cell.device} stay exact fp32 under it")


def medium_matmul_rounds(device: str) -> bool:
    """Whether a medium-precision fp32 matmul really rounds its inputs: its error against float64 is
    1e-7 when exact and 1e-3 when the inputs are bf16 or TF32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 256, generator=generator).to(device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        error = ((a @ a).double() - a.double() @ a.double()).norm() / (a.double() @ a.double()).norm()
    finally:
        torch.set_float32_matmul_precision(before)
    return error.item() > 1e-5


def _small_layer(cell: CellConfig) -> None:
    import torch
    from torch import nn

    layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
    layer.to(device=cell.device, dtype=compute_dtype(cell.precision))
    x = torch.randn(4, 16, device=cell.device, dtype=compute_dtype(cell.precision))
    layer(x).float().sum().backward()


def compute_dtype(precision: str) -> Any:
    """dtype of the matmuls under a value of the ``precision`` axis."""
    import torch

    return {"bf16": torch.bfloat16, "bf16-weights": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def _try(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as error:  # whatever a kernel raises is the reason this cell cannot run
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""
