"""What the compiler made of a cell, for people: graphs, breaks, guards, recompiles. Kept as ``explain.txt``.

It resets TorchDynamo, so it runs at the very end of a trial, outside everything that is timed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinydit_ray.config import CellConfig
from tinydit_ray.flow import interpolate
from tinydit_ray.train import FastTrainer

EXPLAIN_FILE = "explain.txt"


def explain_text(cell: CellConfig, trainer: FastTrainer, batch: tuple[Tensor, Tensor, Tensor]) -> str:
    """Compilations of this process so far, ``torch._dynamo.explain`` of what the cell compiles, and the
    compiler's own table of where its time went."""
    from torch._dynamo.utils import compile_times

    done, times = _compilations(), compile_times("str")  # before explaining adds to them
    return "\n".join([*done, "", *_explained(cell, trainer, batch), "", times, ""])


def _compilations() -> list[str]:
    from torch._dynamo.utils import get_compilation_metrics

    lines = ["compilations in this process (frame/times compiled: function, guards, seconds, why again)"]
    for found in get_compilation_metrics():
        if found.co_name:
            seconds = found.entire_frame_compile_time_s or found.backend_compile_time_s or 0.0
            why = found.recompile_reason or ""
            lines.append(f"  {found.compile_id}: {found.co_name}, {found.guard_count} guards, {seconds:.2f} s {why}")
    return lines


def _explained(cell: CellConfig, trainer: FastTrainer, batch: tuple[Tensor, Tensor, Tensor]) -> list[str]:
    forward, inputs = compiled_part(cell, trainer, batch)
    with trainer.autocast():
        found = torch._dynamo.explain(forward)(*inputs)
    what = "the model" if cell.compile_scope == "model" else "one block"
    return [f"torch._dynamo.explain of {what}, precision {cell.precision}", str(found)]


def compiled_part(
    cell: CellConfig, trainer: FastTrainer, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Any, tuple[Any, ...]]:
    """The function that the cell compiles (the model's forward or a block's), and inputs for it."""
    x, _ = interpolate(*batch)
    x, t = x.to(trainer.weight_dtype or x.dtype), batch[2]
    if cell.compile_scope == "model":
        return trainer.model.forward, (x, t)
    block: Any = next(trainer.model.get_submodule("blocks").children())
    seen: list[tuple[Any, ...]] = []
    hook = block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    try:
        with torch.no_grad(), trainer.autocast(), torch.compiler.set_stance("force_eager"):
            trainer.model(x, t)
    finally:
        hook.remove()
    return block.forward, seen[0]
