"""How the sampler runs (axis ``sampler``): eager, compiled, in bf16, or with int8 matmuls.

Each form is a copy of a model's weights at one moment; training goes on in the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinydit_ray.flow import euler_sample
from tinydit_ray.model import TinyDiT

SAMPLE_STEPS = 20  # Euler steps of one image


class Sampler:
    """Samples from a copy of ``model`` in a form of the ``sampler`` axis.

    The copy computes as the model's switches say (attention kernel, adaLN, …). Noise, velocities and images are
    fp32 in every form; ``bf16`` has weights and activations in bf16 inside the net, ``int8`` dynamic int8
    quantisation of the blocks' Linear layers by torchao (per-token activations, per-channel weights).
    """

    def __init__(self, model: TinyDiT, form: str) -> None:
        plain = TinyDiT(model.cfg).to(next(model.parameters()).device)
        plain.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()}, strict=True)
        plain.eval().requires_grad_(False)
        self.form, self.dtype = form, torch.bfloat16 if form == "bf16" else torch.float32
        self.net: Any = plain.to(self.dtype)
        if form == "int8":
            self.net = int8_copy(self.net)
        if form == "compiled":
            self.net = torch.compile(self.net)

    @torch.no_grad()
    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity (N, 3, 32, 32) in fp32."""
        return self.net(x.to(self.dtype), t).float()

    def sample(self, noise: Tensor) -> Tensor:
        """Images (N, 3, 32, 32) from noise in ``SAMPLE_STEPS`` Euler steps."""
        return euler_sample(self.velocity, noise, SAMPLE_STEPS)


def int8_copy(model: TinyDiT) -> TinyDiT:
    """``model`` with the Linear layers of its blocks in int8, in place. A layer whose weight is used apart from
    the layer itself (merged adaLN, separate q, k, v) stays as it is."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    apart = [".adaLN.1"] if model.cfg.adaln == "merged" else []
    apart += [".attn.qkv"] if model.cfg.qkv == "separate" else []

    def is_chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.startswith("blocks.") and not name.endswith(tuple(apart))

    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=is_chosen)
    return model
