"""What really ran: seen by the profiler, by counters and by a look into the step, never echoed from the config."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tinydit_ray.bench.capability import compute_dtype
from tinydit_ray.bench.machine import cpu_name
from tinydit_ray.config import CellConfig
from tinydit_ray.train import FastTrainer

# A dispatched attention op, as part of its profiler name -> what is recorded. First match counts.
ATTENTION_OPS = (
    ("_scaled_dot_product_flash_attention", "sdpa-flash"),
    ("_scaled_dot_product_efficient_attention", "sdpa-efficient"),
    ("_scaled_dot_product_cudnn_attention", "sdpa-cudnn"),
    ("_scaled_dot_product_attention_math", "sdpa-math"),
    ("_scaled_dot_product_fused_attention_overrideable", "sdpa-overrideable"),
    ("flex_attention", "flex"),
    ("flash_attn", "flash-attn"),
    ("xformers", "xformers"),
    ("sage", "sage"),
)
# clipping uses foreach kernels too; only the optimiser divides
OPTIMIZER_OPS = (("_fused_adamw_", "adamw-fused"), ("_foreach_addcdiv_", "adamw-foreach"))
COMPILED_REGION = "Torch-Compiled Region"


@dataclass(frozen=True)
class StepTrace:
    """Names and counts of what one training step dispatched, and the dtypes seen on the way."""

    ops: dict[str, int]
    autocast_dtype: str  # "off" where no autocast context was active
    matmul_dtype: str  # of the model's output, the result of its last matmul
    matmul_precision: str  # of fp32 matmuls while the model ran

    @property
    def attention_op(self) -> str:
        for part, name in ATTENTION_OPS:
            if self.count(part):
                return name
        return "manual" if self.count("aten::bmm") or self.count("aten::matmul") else "unknown"

    @property
    def optimizer(self) -> str:
        return next((name for part, name in OPTIMIZER_OPS if self.count(part)), "adamw-single-tensor")

    @property
    def compiled_regions(self) -> int:
        return self.count(COMPILED_REGION)

    def count(self, part: str) -> int:
        return sum(n for name, n in self.ops.items() if part in name)


def trace_step(trainer: FastTrainer, batch: Any) -> StepTrace:
    """Run one training step under the profiler, looking at the dtypes in its forward pass."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if trainer.device_type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with _spy_on_loss(trainer) as seen, torch.profiler.profile(activities=activities) as profiler:
        trainer.train_step(batch)
    ops = {event.key: event.count for event in profiler.key_averages()}
    return StepTrace(ops, seen["autocast"], seen["output"], seen["precision"])


@contextmanager
def _spy_on_loss(trainer: FastTrainer) -> Iterator[dict[str, str]]:
    """Notes the autocast state and the model's output dtype during the loss; the net itself is untouched,
    so that nothing is recompiled."""
    seen = {"autocast": "off", "output": "unknown", "precision": "unknown"}
    loss_fn, device = trainer.loss_fn, trainer.device_type

    def spying_loss(net: Any, batch: Any) -> torch.Tensor:
        seen["precision"] = torch.get_float32_matmul_precision()
        if torch.is_autocast_enabled(device):
            seen["autocast"] = _name(torch.get_autocast_dtype(device))

        def spied(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            out = net(x, t)
            seen["output"] = _name(out.dtype)
            return out

        return loss_fn(spied, batch)

    trainer.loss_fn = spying_loss
    try:
        yield seen
    finally:
        trainer.loss_fn = loss_fn


@dataclass(frozen=True)
class CompileCounts:
    """Counted by TorchDynamo since the process started."""

    graphs: int
    graph_breaks: int
    recompiles: int
    cache: str  # off | cold | warm | mixed


def compile_counts() -> CompileCounts:
    from torch._dynamo.utils import counters, get_compilation_metrics

    again = [m for m in get_compilation_metrics() if _frame_compile_id(m) > 0]
    hits = counters["inductor"]["fxgraph_cache_hit"]
    misses = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]
    loaded = counters["aot_autograd"]["autograd_cache_hit"]
    hits += loaded
    cache = "off" if not hits + misses else "cold" if not hits else "warm" if not misses else "mixed"
    return CompileCounts(
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        recompiles=len(again),
        cache=cache,
    )


def _frame_compile_id(metrics: Any) -> int:
    """The k of a compile id "frame/k": above 0 when the same code was compiled again."""
    text = str(metrics.compile_id or "0/0").strip("[]")
    return int(text.split("/")[-1].split("_")[0])


@contextmanager
def no_recompiles() -> Iterator[None]:
    """Inside, compiled code that would have to be compiled again, or fall back to eager, raises instead."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def process_facts(cell: CellConfig) -> dict[str, Any]:
    """``effective.*`` of the process as it is now."""
    device = torch.cuda.get_device_name() if cell.device == "cuda" else cpu_name()
    deterministic = f"algorithms={torch.are_deterministic_algorithms_enabled()}"
    if cell.device == "cuda":
        deterministic += f",cudnn.benchmark={torch.backends.cudnn.benchmark}"
    return {
        "effective.threads": torch.get_num_threads(),
        "effective.nice": os.nice(0),
        "effective.pid": os.getpid(),
        "effective.device": device,
        "effective.python": platform.python_version(),
        "effective.torch": torch.__version__,
        "effective.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "effective.deterministic": deterministic,
    }


def trace_facts(trace: StepTrace, counts: CompileCounts, weight_dtype: torch.dtype) -> dict[str, Any]:
    """``effective.*`` of a traced step."""
    return {
        "effective.attention_op": trace.attention_op,
        "effective.autocast_dtype": trace.autocast_dtype,
        "effective.matmul_dtype": trace.matmul_dtype,
        "effective.weight_dtype": _name(weight_dtype),
        "effective.optimizer": trace.optimizer,
        "effective.graphs": counts.graphs,
        "effective.graph_breaks": counts.graph_breaks,
        "effective.recompiles": counts.recompiles,
        "effective.matmul_precision": trace.matmul_precision,
    }


def mismatches(cell: CellConfig, facts: dict[str, Any], threads: int) -> list[str]:
    """Each way in which what ran is not what was asked, in words; a cell with any is not ok."""
    checks = (
        ("attention", cell.attention, facts["effective.attention_op"], _attention_fits(cell, facts)),
        ("precision", cell.precision, _precision_seen(facts), _dtype_fits(cell, facts)),
        ("optimizer", cell.optimizer, facts["effective.optimizer"], _optimizer_fits(cell, facts)),
        ("compile", cell.compile, facts["effective.compiled_in_window"], _compile_fits(cell, facts)),
        ("threads", threads, facts["effective.threads"], threads == facts["effective.threads"]),
        ("fullgraph", cell.fullgraph, f"{facts['effective.graph_breaks']} graph breaks",
         cell.fullgraph == "off" or not facts["effective.graph_breaks"]),
    )  # fmt: skip
    return [f"{name}: asked {asked}, ran {ran}" for name, asked, ran, fits in checks if not fits]


def _attention_fits(cell: CellConfig, facts: dict[str, Any]) -> bool:
    ran = facts["effective.attention_op"]
    if cell.attention in ("sdpa", "sdpa-upcast"):
        return ran.startswith("sdpa-")
    return ran == cell.attention


def _dtype_fits(cell: CellConfig, facts: dict[str, Any]) -> bool:
    wanted = _name(compute_dtype(cell.precision))
    autocast = wanted if cell.precision in ("bf16", "fp16") else "off"
    weights = wanted if cell.precision == "bf16-weights" else "float32"
    seen = (facts["effective.matmul_dtype"], facts["effective.autocast_dtype"], facts["effective.weight_dtype"])
    medium = "medium" if cell.precision == "fp32-medium" else "highest"
    return seen == (wanted, autocast, weights) and facts["effective.matmul_precision"] == medium


def _precision_seen(facts: dict[str, Any]) -> str:
    return (
        f"{facts['effective.matmul_dtype']} matmuls (autocast {facts['effective.autocast_dtype']}, weights"
        f" {facts['effective.weight_dtype']}, fp32 matmul precision {facts['effective.matmul_precision']})"
    )


def _optimizer_fits(cell: CellConfig, facts: dict[str, Any]) -> bool:
    if cell.optimizer in ("adamw-fused", "adamw-foreach"):
        return facts["effective.optimizer"] == cell.optimizer
    return True  # plain AdamW is whatever kernel PyTorch takes; capturable has no op of its own


def _compile_fits(cell: CellConfig, facts: dict[str, Any]) -> bool:
    if cell.compile == "off" and cell.attention == "flex":
        return True  # its kernel exists only compiled, by itself, in an otherwise eager model
    return facts["effective.compiled_in_window"] == ("no" if cell.compile == "off" else "yes")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
