"""Averaged weights, and the plain model that scores are taken with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinydit_ray.model import TinyDiT, TinyDiTConfig


class Ema:
    """Exponential moving average of a model's weights, in fp32, under the plain module's names.

    After update n it is d·average + (1 − d)·weights with d = min(decay, (1 + n) / (10 + n)): the rise
    keeps the untrained weights from weighing on a short run (TensorFlow, ExponentialMovingAverage).
    decay 0 is the raw weights themselves. It reads the plain module, so compiled steps are followed too.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema {decay}: a decay is at least 0 and below 1")
        self.decay, self.updates = decay, 0
        self._live = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.weights = {name: tensor.float().clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights as they are now; once per optimiser step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        live = [tensor.float() for tensor in self._live.values()]
        torch._foreach_lerp_(list(self.weights.values()), live, 1 - decay)

    def state_dict(self) -> dict[str, object]:
        return {"weights": self.weights, "updates": self.updates, "decay": self.decay}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved average; its names must be the model's."""
        saved: Mapping[str, Tensor] = state["weights"]  # type: ignore[assignment]
        if saved.keys() != self.weights.keys():
            raise ValueError("the saved averaged weights are of another model")
        for name, tensor in self.weights.items():
            tensor.copy_(saved[name])
        self.updates = int(state["updates"])  # type: ignore[call-overload]


def plain_model(model: TinyDiT, weights: Mapping[str, Tensor] | None = None) -> TinyDiT:
    """``model``, or other weights of its size, in fp32, eager, with hand-written attention: what is scored."""
    cfg = model.cfg
    plain = TinyDiT(TinyDiTConfig(dim=cfg.dim, depth=cfg.depth, num_heads=cfg.num_heads, gelu=cfg.gelu))
    chosen = model.state_dict() if weights is None else weights
    plain.load_state_dict({name: tensor.float() for name, tensor in chosen.items()}, strict=True)
    return plain.to(next(model.parameters()).device)
