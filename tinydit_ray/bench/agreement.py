"""Correct before fast: a cell's loss and every gradient agree with a reference before it is timed.

The tolerance is on ‖g - g_ref‖ / ‖g_ref‖ per parameter tensor (L2). Its sizes, from the unit
round-off u of the formats (fp32 2^-24, fp16 2^-11, bf16 2^-8):

* fp32: other kernels only change the order of sums. Differences seen are 2e-7 to 1e-6 (some u);
  1e-4 leaves room for another kernel's blocking, and a wrong scale or a missing term is 1e-2 and more.
* 16-bit: every matmul input is rounded to u, and errors of chained layers add up like the root of
  their number. Seen at 128/4/4: fp16 1.2e-3 (2.5 u), bf16 7e-3 (1.8 u), bf16 weights the same.
  Four times that is allowed, so that 24 blocks still pass and a wrong kernel does not.
* medium fp32 matmuls round inputs as bf16 or TF32 do, so at most as bf16.

Tensors whose gradient is nearly zero against the others (a key bias has none at all, since softmax
ignores it) are measured against a floor of the total gradient norm instead of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tinydit_ray.config import CellConfig, control_of
from tinydit_ray.train.group import Group

# precision -> (relative tolerance of the loss, of each gradient tensor)
TOLERANCES: dict[str, tuple[float, float]] = {
    "fp32": (1e-5, 1e-4),
    "fp32-medium": (2e-3, 3e-2),
    "bf16": (2e-3, 3e-2),
    "fp16": (5e-4, 5e-3),
    "bf16-weights": (2e-3, 3e-2),
}
NORM_FLOOR = 1e-2  # of the total norm, shared evenly among the tensors


class HasGradients(Protocol):
    def gradients(self, batch: Any) -> tuple[float, dict[str, Tensor]]: ...


@dataclass(frozen=True)
class Averaged:
    """Loss and gradients of a trainer that knows nothing of other workers, averaged over them by hand: what
    DistributedDataParallel's averaging is compared with."""

    trainer: HasGradients
    group: Group

    def gradients(self, batch: Any) -> tuple[float, dict[str, Tensor]]:
        loss, grads = self.trainer.gradients(batch)
        device = next(iter(grads.values())).device
        mean = self.group.mean(torch.tensor(loss, device=device)).item()
        return mean, {name: self.group.mean(grad) for name, grad in grads.items()}


@dataclass(frozen=True)
class Agreement:
    """How far a cell is from its reference on one batch, and whether that is near enough."""

    loss: float
    reference_loss: float
    worst_tensor: str
    worst_error: float
    problem: str  # "" where they agree

    @property
    def ok(self) -> bool:
        return not self.problem


def reference_of(cell: CellConfig) -> CellConfig:
    """The plain cell that computes the same function: both forms of the tanh GELU are compared with PyTorch's."""
    return control_of(cell, {"gelu": "exact" if cell.gelu == "exact" else "tanh"})


def compare(cell: HasGradients, reference: HasGradients, batch: Any, precision: str) -> Agreement:
    """Loss and gradients of both on one batch, from equal weights."""
    loss, grads = cell.gradients(batch)
    ref_loss, ref_grads = reference.gradients(batch)
    worst, error = worst_gradient(grads, ref_grads)
    return Agreement(loss, ref_loss, worst, error, _problem(loss, ref_loss, worst, error, precision))


def worst_gradient(grads: dict[str, Tensor], ref_grads: dict[str, Tensor]) -> tuple[str, float]:
    """(name, relative L2 error) of the tensor that differs most; inf where one is missing or not finite."""
    missing = grads.keys() ^ ref_grads.keys()
    if missing:
        return sorted(missing)[0], math.inf
    total = math.sqrt(sum(g.double().square().sum().item() for g in ref_grads.values()))
    floor = NORM_FLOOR * total / math.sqrt(len(ref_grads))
    errors = {}
    for name, ref in ref_grads.items():
        error = (grads[name].double() - ref.double()).norm().item() / max(ref.double().norm().item(), floor, 1e-30)
        errors[name] = error if math.isfinite(error) else math.inf
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value - reference‖ / ‖reference‖ (L2) in float64; inf where it is not finite."""
    error = ((value.double() - reference.double()).norm() / reference.double().norm()).item()
    return error if math.isfinite(error) else math.inf


def _problem(loss: float, ref_loss: float, worst: str, error: float, precision: str) -> str:
    loss_tolerance, grad_tolerance = TOLERANCES[precision]
    if not (math.isfinite(loss) and math.isfinite(ref_loss)):
        return f"loss is {loss} on the first batch, where the reference has {ref_loss}"
    if abs(loss - ref_loss) > loss_tolerance * abs(ref_loss):
        return f"loss {loss:.6f} differs from the reference's {ref_loss:.6f} by more than {loss_tolerance:g}"
    if not error <= grad_tolerance:
        return f"gradient of {worst} differs from the reference's by {error:.2g} (L2), more than {grad_tolerance:g}"
    return ""
