"""What a training run has seen so far, in plain types and tensors: it travels in the checkpoint."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STRIP_ROWS = 9  # of strip.png: the untrained model, and eight moments of training


@dataclass
class History:
    """Curves, times and pictures. Seconds accumulate over resumed sessions.

    ``train_s`` is spent in steps (making batches and compiling included), ``eval_s`` in evaluations.
    ``span_*`` and ``losses`` belong to the log entry that is being filled.
    """

    loss: list[list[float]] = field(default_factory=list)  # [step, mean loss since the entry before, train_s]
    velocity_mse: list[list[float]] = field(default_factory=list)  # [step, mse]
    velocity_mse_ema: list[list[float]] = field(default_factory=list)
    strip_steps: list[int] = field(default_factory=list)
    strip_images: list[Tensor] = field(default_factory=list)  # uint8 (8, 3, 32, 32) each
    step_ms: list[float] = field(default_factory=list)  # one per log entry, each session's first step left out
    train_s: float = 0.0
    eval_s: float = 0.0
    batch_s: float = 0.0
    first_step_s: float = 0.0
    sessions: int = 0
    iterations: int = 0
    span_s: float = 0.0
    span_iterations: int = 0
    losses: list[Tensor] = field(default_factory=list)  # fp32 scalars, on the device that trains

    def state_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        losses = torch.stack(self.losses).cpu() if self.losses else torch.empty(0)
        return {**values, "losses": losses}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: str) -> History:
        return cls(**{**state, "losses": list(state["losses"].to(device).unbind())})

    def count(self, seconds: float, batch_s: float, *, first: bool) -> None:
        """One step took ``seconds`` of wall time, ``batch_s`` of them making its batch."""
        self.train_s += seconds
        self.batch_s += batch_s
        self.iterations += 1
        if first:  # it compiles, and fills caches: not part of the pace
            self.first_step_s = self.first_step_s or seconds
        else:
            self.span_s += seconds
            self.span_iterations += 1

    def log(self, step: int) -> float:
        """Close the log entry at ``step``; its mean loss."""
        mean = torch.stack(self.losses).mean().item()
        self.loss.append([step, mean, self.train_s])
        if self.span_iterations:
            self.step_ms.append(1e3 * self.span_s / self.span_iterations)
        self.losses, self.span_s, self.span_iterations = [], 0.0, 0
        return mean

    @property
    def ms_per_step(self) -> float | None:
        """Median over log entries: one iteration, its batch included."""
        return statistics.median(self.step_ms) if self.step_ms else None

    @property
    def evaluated_at(self) -> int | None:
        return int(self.velocity_mse[-1][0]) if self.velocity_mse else None

    def strip(self) -> tuple[list[int], Tensor]:
        """(steps, images (rows · 8, 3, 32, 32)) of at most STRIP_ROWS moments, evenly spread, ends included."""
        last = len(self.strip_steps) - 1
        rows = min(STRIP_ROWS, last + 1)
        chosen = sorted({round(i * last / max(1, rows - 1)) for i in range(rows)})
        return [self.strip_steps[i] for i in chosen], torch.cat([self.strip_images[i] for i in chosen])
