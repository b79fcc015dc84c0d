"""What a trial goes on from where a worker of it died: rank 0 keeps a checkpoint of its training."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from tinydit_ray.train.group import Group
from tinydit_ray.train.trainer import Trainer

EVERY_S = 10.0  # of training between checkpoints


class TrialCheckpoint:
    """In ``folder``, on the node of rank 0. A group whose rank 0 has come to another node finds none there."""

    def __init__(self, folder: Path, group: Group, every_s: float = EVERY_S) -> None:
        self.path, self.group, self.every_s = folder / "checkpoint.pt", group, every_s
        self._last = time.monotonic()

    def save_when_due(self, trainer: Trainer, **extra: Any) -> None:
        """By rank 0, between two steps; ``extra`` are plain types and tensors."""
        if self.group.rank == 0 and time.monotonic() - self._last >= self.every_s:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trainer.save(self.path, **extra)
            self._last = time.monotonic()

    def load(self, trainer: Trainer) -> dict[str, Any] | None:
        """Rank 0's last checkpoint into the trainer of every rank; None where there is none."""
        mine = self.path.read_bytes() if self.group.rank == 0 and self.path.exists() else None
        content = self.group.objects(mine)[0]
        return None if content is None else trainer.load(io.BytesIO(content))

    def remove(self) -> None:
        if self.group.rank == 0 and self.path.exists():
            self.path.unlink()
            self.path.parent.rmdir()
