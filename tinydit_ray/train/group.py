"""The workers that train one cell together: who this one is, and what they tell each other.

One worker alone is a group too, whose every exchange is a no-op, so that measuring code has no branches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

COLLECTIVE_TIMEOUT_S = 1800.0  # others wait while rank 0 scores


class Group:
    """One worker alone."""

    rank, size = 0, 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all workers, on each."""
        return value

    def highest(self, values: Sequence[float]) -> list[float]:
        """The largest over all workers, place by place."""
        return list(values)

    def objects(self, value: Any) -> list[Any]:
        """What each worker gave, in rank order, on each."""
        return [value]

    def whole(self, share: Tensor) -> Tensor:
        """The shares of all workers, one after the other in rank order."""
        return share

    def of_first(self, value: Tensor) -> Tensor:
        """Rank 0's."""
        return value

    def agree(self, choice: bool) -> bool:
        """Rank 0's choice: loops that end by the clock end on the same turn everywhere."""
        return choice

    def align(self) -> None:
        """Wait until all workers are here; on CUDA only the devices wait."""

    def replicate(self, net: Any) -> Any:
        """What a training step calls."""
        return net


ALONE = Group()


class ProcessGroup(Group):
    """The default group of torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, device: str) -> None:
        import torch.distributed as dist

        self.dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        self.dist.all_reduce(total)
        return total / self.size

    def highest(self, values: Sequence[float]) -> list[float]:
        found = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return found.tolist()

    def objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        self.dist.all_gather_object(found, value)
        return found

    def whole(self, share: Tensor) -> Tensor:
        shares = [torch.empty_like(share) for _ in range(self.size)]
        self.dist.all_gather(shares, share.contiguous())
        return torch.cat(shares)

    def of_first(self, value: Tensor) -> Tensor:
        found = value.detach().clone()
        self.dist.broadcast(found, src=0)
        return found

    def agree(self, choice: bool) -> bool:
        return bool(self.of_first(torch.tensor(int(choice), device=self.device)).item())

    def align(self) -> None:
        self.dist.all_reduce(torch.zeros(1, device=self.device))

    def replicate(self, net: Any) -> Any:
        """DistributedDataParallel: gradients are averaged while the backward pass runs."""
        return nn.parallel.DistributedDataParallel(net)


def current_group(device: str) -> Group:
    """The group that this process belongs to; alone where none was joined."""
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessGroup(device) if joined else ALONE


def backend_of(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def join_from_environment(device: str) -> None:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, where they do."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group(backend_of(device), timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
