"""Evaluation as it must be for scores to compare: fp32, eager, eval mode, and nothing left changed behind."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

VelocityModel = Callable[[Tensor, Tensor], Tensor]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No autocast, no narrower kernels behind fp32 (TF32, bf16), no compiled code, no gradients."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        stack.enter_context(_plain_products())
        if "torch._dynamo" in sys.modules:  # where nothing was compiled, importing it would cost seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _plain_products() -> Iterator[None]:
    """IEEE fp32 in matmuls and convolutions of every backend.

    Set kind by kind where torch has that (2.9): the process-wide getter raises once any kind was set.
    """
    backends: Any = torch.backends
    if not hasattr(getattr(backends.cudnn, "conv", None), "fp32_precision"):
        with _plain_products_before_2_9():
            yield
        return
    kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, value in zip(kinds, before, strict=True):
            kind.fp32_precision = value


@contextlib.contextmanager
def _plain_products_before_2_9() -> Iterator[None]:
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextlib.contextmanager
def evaluating(model: VelocityModel) -> Iterator[tuple[VelocityModel, torch.device]]:
    """The model as scores see it, and its device: in eval mode, in fp32, never compiled.

    A model with 16-bit weights is evaluated as an fp32 copy. Each submodule's training mode and the
    global random state are put back at the end.
    """
    plain: Any = getattr(model, "_orig_mod", model)
    if isinstance(plain, nn.Module) and _has_narrow_weights(plain):
        plain = copy.deepcopy(plain).float()
    modules = list(plain.modules()) if isinstance(plain, nn.Module) else []
    modes = [module.training for module in modules]
    device = _device_of(plain)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), full_precision():
        try:
            for module in modules:
                module.training = False
            yield plain, device
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


def _has_narrow_weights(model: nn.Module) -> bool:
    return any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters())


def _device_of(model: Any) -> torch.device:
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    first = next(parameters, None)
    return torch.device("cpu") if first is None else first.device
