"""The fast trainer: the plain trainer plus switches, each off unless asked for.

With every switch off it does exactly what the plain trainer does (bit-equal weights; tested).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tinydit_ray.config import CellConfig
from tinydit_ray.flow import flow_matching_loss
from tinydit_ray.network import build_network
from tinydit_ray.train.graph import StepGraph
from tinydit_ray.train.group import ALONE, Group
from tinydit_ray.train.trainer import LossFn, Trainer

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-capturable": {"capturable": True},
}
# Named sets of Inductor options, merged over those of the compile mode.
INDUCTOR_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "coordinate-descent": {"coordinate_descent_tuning": True},
    # what follows a matmul goes into its loop; only into Inductor's own matmuls, which are off by default
    "epilogue-fusion": {"epilogue_fusion": True, "max_autotune_gemm": True},
    "conv-1x1-as-mm": {"conv_1x1_as_mm": True},
}
DYNAMIC = {"auto": None, "off": False, "on": True}


class FastTrainer(Trainer):
    """Trainer with mixed precision, compilation and other optimiser kernels.

    ``model`` stays the plain module (checkpoints, names); ``net`` is what the step calls.

    Args:
        amp_dtype: autocast dtype (bf16, fp16); None means no autocast context at all. Weights stay
            fp32. float16 adds a GradScaler: unscaled before clipping, a skipped step is not a step.
        weight_dtype: dtype the model itself is cast to (bf16 weights without an fp32 copy).
        compile: True or a torch.compile mode; False runs eager.
        compile_scope: "model", or "block" to compile only the repeated block.
        fullgraph, dynamic: as in torch.compile.
        inductor: name of an option set in ``INDUCTOR_OPTIONS``.
        duck_shapes: False gives each dynamic size a symbol of its own while compiling, equal or not.
        optimizer: "adamw" (PyTorch's own choice of kernel) or -foreach, -fused, -capturable.
        cuda_graph: capture the whole step as one CUDA graph; makes any optimiser capturable too. CUDA only,
            batches of one shape, no GradScaler (it asks the device in each step).
        memory_format: "channels-last" keeps images and convolution weights in that layout.
        matmul_precision: of fp32 matmuls, as in torch.set_float32_matmul_precision. It is a setting of
            the process, so every step sets it: two trainers in one process do not disturb each other.
        group: the workers that train together; each gives the step its share of the global batch, and
            gradients are averaged (DistributedDataParallel) before they are unscaled and clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn = flow_matching_loss,
        *,
        lr: float = 3e-4,
        max_grad_norm: float | None = 1.0,
        amp_dtype: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
        compile: bool | str = False,
        compile_scope: str = "model",
        fullgraph: bool = False,
        dynamic: bool | None = None,
        duck_shapes: bool = True,
        inductor: str = "none",
        optimizer: str = "adamw",
        cuda_graph: bool = False,
        memory_format: str = "contiguous",
        matmul_precision: str = "highest",
        group: Group = ALONE,
    ) -> None:
        self.matmul_precision, self.group = matmul_precision, group
        self.optimizer_name, self.amp_dtype, self.weight_dtype = optimizer, amp_dtype, weight_dtype
        self.device_type = next(model.parameters()).device.type
        self.cuda_graph, self.duck_shapes = cuda_graph, duck_shapes
        self.layout = torch.channels_last if memory_format == "channels-last" else None
        if weight_dtype is not None:
            model.to(weight_dtype)
        if self.layout is not None:
            model.to(memory_format=self.layout)
        super().__init__(model, loss_fn, lr=lr, max_grad_norm=max_grad_norm)
        self.scaler = torch.amp.GradScaler(self.device_type) if amp_dtype == torch.float16 else None
        self.graph = StepGraph(self.update, list(model.parameters()), self.optimizer) if cuda_graph else None
        if compile:
            mode = "default" if compile is True else compile
            self.net = compile_net(
                model, mode=mode, scope=compile_scope, fullgraph=fullgraph, dynamic=dynamic, inductor=inductor
            )
        # around the compiled net: one graph as for one worker; compiled from outside it breaks into three
        self.net = group.replicate(self.net)

    def make_optimizer(self) -> torch.optim.Optimizer:
        how = OPTIMIZERS[self.optimizer_name] | ({"capturable": True} if self.cuda_graph else {})
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr, **how)

    def autocast(self) -> AbstractContextManager[Any]:
        """No context for fp32: autocast to fp32 is not the same as none, and warns on the CPU."""
        if self.amp_dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.amp_dtype)

    def symbols(self) -> AbstractContextManager[Any]:
        """Duck shaping is a setting of the process that counts while a graph is being compiled."""
        if self.duck_shapes:
            return nullcontext()
        settings: Any = torch.fx.experimental._config
        return settings.patch(use_duck_shape=False)

    def loss(self, batch: Any) -> Tensor:
        torch.set_float32_matmul_precision(self.matmul_precision)
        converts = self.weight_dtype is not None or self.layout is not None
        with self.autocast(), self.symbols():
            return self.loss_fn(self._converted if converts else self.net, batch)

    def _converted(self, x: Tensor, t: Tensor) -> Tensor:
        if self.weight_dtype is not None:
            x = x.to(self.weight_dtype)
        if self.layout is not None:
            x = x.contiguous(memory_format=self.layout)
        return self.net(x, t)

    def train_step(self, batch: Any) -> Tensor:
        if self.graph is not None:
            loss = self.graph(batch)
            self.steps += 1
            return loss
        if self.scaler is None:
            return super().train_step(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.clip()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < before:  # the scaler found inf or NaN and left the weights alone
            self.skipped_steps += 1
        else:
            self.steps += 1
        return loss.detach()

    def mean_loss(self, losses: list[Tensor]) -> float:
        return self.group.mean(torch.stack(losses).mean()).item()

    def gradients(self, batch: Any) -> tuple[float, dict[str, Tensor]]:
        if self.scaler is None:
            loss_value, grads = super().gradients(batch)
            return self._over_workers(loss_value), grads
        scale = self.scaler.get_scale()
        while True:  # lower until the gradients fit into fp16, as training itself would
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(batch)
            (loss * scale).backward()
            grads = {n: p.grad.float() / scale for n, p in self.model.named_parameters() if p.grad is not None}
            if scale <= 1 or all(bool(grad.isfinite().all()) for grad in grads.values()):
                break
            scale /= 16
        self.optimizer.zero_grad(set_to_none=True)
        return self._over_workers(loss.item()), grads

    def _over_workers(self, loss: float) -> float:
        if self.group.size == 1:
            return loss
        return self.group.mean(torch.tensor(loss, device=self.device_type)).item()

    def extra_state(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict()} if self.scaler is not None else {}

    def load(self, path: Any) -> dict[str, Any]:
        state = super().load(path)
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        if self.graph is not None:
            self.graph.forget()
        return state

    def restart(self, weights: dict[str, Tensor]) -> None:
        """Back to step 0 from these weights, in place: compiled graphs and captured ones stay valid."""
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(weights[name])
        self.optimizer.zero_grad(set_to_none=True)
        if self.graph is not None:
            self.graph.reset_optimizer()
        else:
            self.optimizer.state.clear()
        if self.scaler is not None:
            self.scaler = torch.amp.GradScaler(self.device_type)
        self.steps = self.skipped_steps = 0


def compile_net(
    model: nn.Module,
    *,
    mode: str = "default",
    scope: str = "model",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    inductor: str = "none",
) -> Any:
    """``model`` compiled as asked; the module itself keeps its plain names."""
    how: dict[str, Any] = {"fullgraph": fullgraph, "dynamic": dynamic}
    if inductor == "none":
        how["mode"] = mode
    else:  # torch.compile takes a mode or options, not both: spell the mode out
        how["options"] = {**torch._inductor.list_mode_options(mode), **INDUCTOR_OPTIONS[inductor]}
    if scope == "model":
        return torch.compile(model, **how)
    for block in model.get_submodule("blocks").children():
        block.compile(**how)
    return model


def trainer_of(
    cell: CellConfig, *, device: str | torch.device | None = None, group: Group = ALONE
) -> FastTrainer:
    """A fresh trainer for a sweep's cell: seeded weights, every switch applied; ``group`` trains it together."""
    model = build_network(cell).to(device or cell.device)
    return FastTrainer(
        model,
        lr=cell.lr,
        max_grad_norm=cell.max_grad_norm or None,
        amp_dtype=AMP_DTYPES.get(cell.precision),
        weight_dtype=torch.bfloat16 if cell.precision == "bf16-weights" else None,
        compile=False if cell.compile == "off" else cell.compile,
        compile_scope=cell.compile_scope,
        fullgraph=cell.fullgraph == "on",
        dynamic=DYNAMIC[cell.dynamic],
        duck_shapes=cell.duck_shapes == "on",
        inductor=cell.inductor,
        optimizer=cell.optimizer,
        cuda_graph=cell.cuda_graph == "on",
        memory_format=cell.memory_format,
        # medium: bf16 or TF32 multiplications inside fp32 matmuls, whatever the hardware has for it
        matmul_precision="medium" if cell.precision == "fp32-medium" else "highest",
        group=group,
    )
