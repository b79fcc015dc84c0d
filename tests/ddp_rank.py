"""What each worker of a small DDP run does; ``tests/test_ddp.py`` starts several, or one alone, and compares.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python ddp_rank.py OUT
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tinydit_ray.config import from_mapping
from tinydit_ray.data import BatchStream, FlowBatch
from tinydit_ray.train import trainer_of
from tinydit_ray.train.group import Group, current_group, join_from_environment

SIZE = {"model": "32/1/2", "batch_size": 16, "lr": 1e-3}
STEPS = 6
CLIP = 0.01  # far below the norm of these gradients
IMAGES = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def stream(group: Group) -> BatchStream:
    return BatchStream(IMAGES, 16, seed=5, rank=group.rank, world_size=group.size)


def train(group: Group, precision: str, clip: float) -> dict[str, Any]:
    """A few steps; gradients are those of the last one, as the optimiser took them."""
    trainer = trainer_of(from_mapping({**SIZE, "precision": precision, "max_grad_norm": clip}), group=group)
    batches = stream(group)
    losses = [trainer.train_step(next(batches)) for _ in range(STEPS)]
    return {
        "weights": dict(trainer.model.state_dict()),
        "gradients": {name: p.grad.clone() for name, p in trainer.model.named_parameters()},
        "loss": trainer.mean_loss(losses),
        "steps": trainer.steps,
        "skipped": trainer.skipped_steps,
    }


def overflow(group: Group) -> dict[str, Any]:
    """One batch with an infinity that the last rank alone sees, between good ones."""
    trainer = trainer_of(from_mapping({**SIZE, "precision": "fp16"}), group=group)
    batches = stream(group)
    trainer.train_step(next(batches))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    scale = trainer.scaler.get_scale()
    bad = next(batches)
    if group.rank == group.size - 1:
        bad = FlowBatch(bad.x0.clone().fill_(float("inf")), bad.noise, bad.t)
    trainer.train_step(bad)
    same = all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    found = {"skipped": trainer.skipped_steps, "scale": trainer.scaler.get_scale() / scale, "untouched": same}
    trainer.train_step(next(batches))
    return {**found, "steps": trainer.steps}


def exchanges(group: Group) -> dict[str, Any]:
    """What the workers tell each other."""
    rank = group.rank
    return {
        "mean": group.mean(torch.tensor(float(rank))).item(),
        "highest": group.highest([float(rank), -float(rank)]),
        "objects": group.objects(f"rank {rank}"),
        "whole": group.whole(torch.tensor([rank])).tolist(),
        "first": group.of_first(torch.tensor(rank + 7)).item(),
        "agree": group.agree(rank == 0),
        "batches": [next(batches).x0.flatten(1).sum(1) for batches in [stream(group)] for _ in range(4)],
    }


def main(out: str) -> None:
    torch.set_num_threads(1)
    join_from_environment("cpu")
    group = current_group("cpu")
    found = {
        "exchanges": exchanges(group),
        "plain": train(group, "fp32", 0.0),
        "clipped": train(group, "fp32", CLIP),
        "fp16": train(group, "fp16", CLIP),
        "overflow": overflow(group),
    }
    torch.save(found, out)
    if group.size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
