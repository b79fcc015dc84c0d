"""Bytes that a training step moves if no kernel is fused: the roofline's other axis (Williams, Waterman and Patterson
2009, doi:10.1145/1498765.1498785)."""

from __future__ import annotations

from typing import Any

from tinydit_ray.bench.flops import unless_own_net_fails
from tinydit_ray.config import CHANNELS, IMAGE_SIZE, CellConfig, control_of

# What decides how many tensors of which size there are; where an operation runs and what is fused does not.
_FORM = ("precision", "residual", "qkv", "gelu", "adaln", "patches")
ADAMW_PASSES = 7  # over arrays of the weights' size: all four (weight, gradient, two moments) read, three written


def gbytes_per_step(cell: CellConfig) -> float | None:
    """GB (1e9 bytes) of one step of the cell's batch, each operation of the eager, hand-written form reading its inputs
    and writing its outputs once, in the cell's precision.

    Compiled and fused kernels move less, and what fits into a cache never reaches the memory: it is what the *model*
    moves, as ``model_gflops_per_step`` is what it computes. Counted on fake tensors, so nothing runs. None for a net of
    the user's own that cannot be run so.
    """
    return unless_own_net_fails(_counted, cell)


def _counted(cell: CellConfig) -> float:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tinydit_ray.network import build_network
    from tinydit_ray.train.fast import AMP_DTYPES, FastTrainer

    form = control_of(cell, {axis: getattr(cell, axis) for axis in _FORM}).replace(
        device="cpu", workers=1, gpus_per_worker=0
    )
    shape = (form.batch_size, CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    with FakeTensorMode():
        model = build_network(form)
        if form.precision == "bf16-weights":
            _cast(model, torch.bfloat16)
        trainer = FastTrainer(model, amp_dtype=AMP_DTYPES.get(form.precision))
        trainer.weight_dtype = torch.bfloat16 if form.precision == "bf16-weights" else None
        batch = (torch.empty(shape), torch.empty(shape), torch.empty(form.batch_size))
        with _counter() as counted:
            trainer.loss(batch).backward()
        weights = sum(size_of(weight) for weight in trainer.model.parameters())
    return (counted.total + ADAMW_PASSES * weights) / 1e9


def _cast(model: Any, dtype: Any) -> None:
    """``model.to(dtype)``, which has no way with fake parameters."""
    import torch

    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(weight.detach().to(dtype))
        for name, tensor in module._buffers.items():
            if tensor is not None and tensor.is_floating_point():
                module._buffers[name] = tensor.to(dtype)


def size_of(tensor: Any) -> int:
    """Bytes behind a tensor, each once where it is broadcast."""
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _counter() -> Any:
    """A mode that adds up what every operation reads and writes; views move nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not getattr(func, "is_view", False) and func._schema.name not in _NO_TRAFFIC:
                leaves = [*tree_leaves(args), *tree_leaves(kwargs or {}), *tree_leaves(out)]
                self.total += sum(size_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
            return out

    return Counter()


_NO_TRAFFIC = ("aten::_unsafe_view", "aten::empty", "aten::empty_like", "aten::lift_fresh", "aten::detach")
