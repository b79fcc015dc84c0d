"""Arithmetic of one training step, counted by torch's own counter on the hand-written form of the model."""

from __future__ import annotations

from collections.abc import Callable

from tinydit_ray.config import CHANNELS, IMAGE_SIZE, NETWORK, CellConfig, control_of


def model_gflops_per_step(cell: CellConfig) -> float | None:
    """GFLOP (multiply and add count as two) of forward and backward at the cell's batch.

    Counted once on the meta device with hand-written attention, so that a kernel the counter does
    not know, or one that recomputes, does not change what the model needs. Matmuls and convolutions
    only, as in ``torch.utils.flop_counter``. None for a net of the user's own that does not run on that device.
    """
    return unless_own_net_fails(_counted, cell)


def unless_own_net_fails(count: Callable[[CellConfig], float], cell: CellConfig) -> float | None:
    """``count(cell)``; None where a net of the user's own does not run on tensors without data. Ours must."""
    try:
        return count(cell)
    except Exception:
        if cell.network == NETWORK:
            raise
        return None


def _counted(cell: CellConfig) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from tinydit_ray.flow import flow_matching_loss
    from tinydit_ray.network import build_network

    shape = (cell.batch_size, CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    with torch.device("meta"):
        model = build_network(control_of(cell))
        batch = (torch.empty(shape), torch.empty(shape), torch.empty(cell.batch_size))
        counter = FlopCounterMode(display=False)
        with counter:
            flow_matching_loss(model, batch).backward()
    return counter.get_total_flops() / 1e9


def closed_form_gflops(cell: CellConfig, *, tokens: int = 64, pixels: int = 48, features: int = 256) -> float:
    """The same count from the sizes: 2 FLOP per multiply-add, forward once, backward twice.

    The first layers have no gradient to their input (images and time features), so once less for those.
    """
    n, d, depth = cell.batch_size, cell.dim, cell.depth
    per_token = depth * (3 * d * d + d * d + 8 * d * d) + d * pixels
    scores = depth * 2 * tokens * d  # q k^T and (weights) v, per token
    per_image = d * d + depth * 4 * d * d + 2 * d * d
    full = n * (tokens * (per_token + scores) + per_image)
    first = n * (tokens * pixels * d + features * d)
    return (3 * full + 2 * first) * 2 / 1e9
