"""The plain trainer: AdamW, gradient clipping, nothing else. What every switch is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from tinydit_ray.atomic import replacing

LossFn = Callable[[Any, Any], Tensor]


NO_BATCH = "the loader gives no batch: fewer images than one batch?"
MAX_SKIPPED_IN_A_ROW = 30  # a loss scaler halves at each; 2^16 is used up after 16


class Diverged(RuntimeError):
    """Training lost its way: a loss that is not finite, or a loss scaler that refuses every step."""


class Trainer:
    """Trains ``model`` on ``loss_fn(model, batch)``.

    Args:
        model: the plain module; its device is where batches must be.
        loss_fn: (model, batch) -> scalar loss; the same function for every setting.
        lr: AdamW learning rate.
        max_grad_norm: clip of the total gradient norm; None turns it off.

    ``steps`` counts optimiser steps; ``skipped_steps`` those a loss scaler refused.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, *, lr: float = 3e-4, max_grad_norm: float | None = 1.0
    ) -> None:
        self.model, self.loss_fn, self.lr = model, loss_fn, lr
        self.max_grad_norm = max_grad_norm
        self.net: Callable[..., Any] = model
        self.optimizer: torch.optim.Optimizer = self.make_optimizer()
        self.steps = 0
        self.skipped_steps = 0

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def loss(self, batch: Any) -> Tensor:
        """The training loss, as the step computes it."""
        return self.loss_fn(self.net, batch)

    def train_step(self, batch: Any) -> Tensor:
        """One optimiser step; the loss before it, detached, so that no step waits for the device."""
        loss = self.update(batch)
        self.steps += 1
        return loss

    def update(self, batch: Any) -> Tensor:
        """What the device does in a step: forward, backward, clip, optimiser. Counts nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        self.clip()
        self.optimizer.step()
        return loss.detach()

    def clip(self) -> None:
        if self.max_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)

    def gradients(self, batch: Any) -> tuple[float, dict[str, Tensor]]:
        """(loss, gradient of every parameter in fp32) on one batch, without a step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        grads = {name: p.grad.float().clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), grads

    def fit(
        self,
        loader: Iterable[Any],
        max_steps: int,
        log_every: int = 100,
        on_log: Callable[[int, float], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[tuple[int, float]]:
        """Train for ``max_steps`` optimiser steps, going round the loader as often as that takes.

        ``on_step`` is called after each step that was taken, and not after one that a loss scaler refused.
        Raises Diverged when a logged loss is not finite, or no step of many in a row is taken.
        Returns [(step, mean loss since the last entry)], one entry each ``log_every`` steps and one at
        the end. The loss is fetched from the device only then.
        """
        history: list[tuple[int, float]] = []
        losses: list[Tensor] = []
        batches = _endless(loader)
        refused = self.skipped_steps
        while self.steps < max_steps:
            before = self.steps
            losses.append(self.train_step(next(batches)))
            if self.steps == before:
                self.check_progress(refused)
                continue
            refused = self.skipped_steps
            if on_step:
                on_step()
            if self.steps % log_every == 0 or self.steps == max_steps:
                history.append((self.steps, self.mean_loss(losses)))
                losses.clear()
                if not math.isfinite(history[-1][1]):
                    raise Diverged(f"the loss is {history[-1][1]} after {self.steps} steps")
                if on_log:
                    on_log(*history[-1])
        return history

    def mean_loss(self, losses: list[Tensor]) -> float:
        """Mean over steps, and over workers where several train together."""
        return torch.stack(losses).mean().item()

    def check_progress(self, refused: int) -> None:
        """Raises Diverged after too many skipped steps in a row; ``refused`` is their count at the last step taken."""
        if self.skipped_steps - refused >= MAX_SKIPPED_IN_A_ROW:
            raise Diverged(f"the loss scaler refused {MAX_SKIPPED_IN_A_ROW} steps in a row: gradients are never finite")

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any]) -> float:
        """Mean loss over the batches of a loader, in eval mode."""
        training = self.model.training
        self.model.eval()
        try:
            losses = [self.loss(batch).item() for batch in loader]
        finally:
            self.model.train(training)
        if not losses:
            raise ValueError(NO_BATCH)
        return sum(losses) / len(losses)

    def save(self, path: str | Path, config: Any = None, **extra: Any) -> None:
        """Write a checkpoint with the keys ``model`` and ``config``, only tensors and plain types.

        A kill leaves the old file or the new one, never half of one.
        """
        plain = vars(config) if config is not None and not isinstance(config, Mapping) else config
        state = {
            "model": self.model.state_dict(),
            "config": dict(plain) if plain is not None else None,
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            **self.extra_state(),
            **extra,
        }
        with replacing(Path(path)) as temporary:
            torch.save(state, temporary)

    def extra_state(self) -> dict[str, Any]:
        """More state of a subclass that a resumed training needs."""
        return {}

    def load(self, path: str | Path | IO[bytes]) -> dict[str, Any]:
        """Take over a checkpoint's weights, optimiser and counts, strictly; returns the whole checkpoint."""
        state = load_checkpoint(path)
        self.model.load_state_dict(state["model"], strict=True)
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state.get("steps", 0)
        self.skipped_steps = state.get("skipped_steps", 0)
        return state


def load_checkpoint(path: str | Path | IO[bytes]) -> dict[str, Any]:
    """A checkpoint's content: tensors and plain types only, nothing in it is executed."""
    device = "cpu" if not torch.cuda.is_available() else None
    return torch.load(path, weights_only=True, map_location=device)


def _endless(loader: Iterable[Any]) -> Any:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError(NO_BATCH)
