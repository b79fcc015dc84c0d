"""What really ran: seen by the profiler, by counters and by a look into the step, never echoed from the config."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tinydit_ray.bench.capability import compute_dtype
from tinydit_ray.bench.machine import cpu_name
from tinydit_ray.config import NETWORK, CellConfig
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
# as the profiler writes C++ types
_DTYPE_WORDS = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}


@dataclass(frozen=True)
class OpTrace:
    """Names and counts of the ops that were dispatched."""

    ops: dict[str, int]

    @property
    def attention_op(self) -> str:
        for part, name in ATTENTION_OPS:
            if self.count(part):
                return name
        return "manual" if self.count("aten::bmm") or self.count("aten::matmul") else "unknown"

    @property
    def compiled_regions(self) -> int:
        return self.count(COMPILED_REGION)

    @property
    def int8_matmuls(self) -> int:
        return self.count("int_mm")

    def count(self, part: str) -> int:
        return _count(self.ops, part)


@dataclass(frozen=True)
class StepTrace(OpTrace):
    """What one training step dispatched, and the dtypes seen on the way."""

    autocast_dtype: str  # "off" where no autocast context was active
    matmul_dtype: str  # of the model's output, the result of its last matmul
    matmul_precision: str  # of fp32 matmuls while the model ran
    replay: dict[str, int] | None = None  # ops of a replayed step, where the step is captured as a whole
    host_syncs: int | None = None  # times the host waited for the device; None on the CPU
    attention_dtype: str = "unknown"  # of the inputs of the attention op (of the first bmm, where hand-written)

    @property
    def optimizer(self) -> str:
        return next((name for part, name in OPTIMIZER_OPS if self.count(part)), "adamw-single-tensor")

    @property
    def cuda_graph(self) -> str:
        """``whole step``: one launch and no matmul from the host; ``parts``: a compiler's own graphs."""
        ops = self.ops if self.replay is None else self.replay
        launches = _count(ops, "cudaGraphLaunch")
        if not launches:
            return "off"
        from_host = any(_count(ops, name) for name in ("aten::mm", "aten::addmm", "aten::bmm", COMPILED_REGION))
        return "whole step" if launches == 1 and not from_host else "parts"


def _count(ops: dict[str, int], part: str) -> int:
    return sum(n for name, n in ops.items() if part in name)


def trace_step(trainer: FastTrainer, batch: Any) -> StepTrace:
    """Run one training step under the profiler, looking at the dtypes in its forward pass.

    A step captured as a CUDA graph runs nothing of that kind: its replay is traced apart, and the very update
    that was captured is run once more from the host, for the names of its ops.
    """
    on_cuda = trainer.device_type == "cuda"
    replay = _op_counts(_profiled(lambda: trainer.train_step(batch), on_cuda)) if trainer.graph is not None else None
    step = trainer.train_step if trainer.graph is None else trainer.update
    with _spy_on_loss(trainer) as seen:
        profiler = _profiled(lambda: step(batch), on_cuda)
    syncs = count_host_syncs(lambda: trainer.train_step(batch)) if on_cuda else None
    ops, dtype = _op_counts(profiler), _attention_dtype(profiler.events() or [])
    return StepTrace(ops, seen["autocast"], seen["output"], seen["precision"], replay, syncs, dtype)


def trace_ops(action: Callable[[], Any], on_cuda: bool) -> OpTrace:
    """What ``action`` dispatches, by the profiler."""
    return OpTrace(_op_counts(_profiled(action, on_cuda)))


def _profiled(action: Callable[[], Any], on_cuda: bool) -> torch.profiler.profile:
    """The profile of all that ran, with the dtypes of each op's inputs."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if on_cuda else [kinds.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        action()
    return profiler


def _op_counts(profiler: torch.profiler.profile) -> dict[str, int]:
    return {event.key: event.count for event in profiler.key_averages()}


def count_host_syncs(action: Callable[[], Any]) -> int:
    """How often ``action`` makes the host wait for the CUDA device, by PyTorch's sync debug mode."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _attention_dtype(events: Iterable[Any]) -> str:
    """dtype of q in the first attention op of the step; SDPA in fp32 under autocast shows nowhere else."""
    for parts in ([part for part, _ in ATTENTION_OPS], ["aten::bmm"]):
        for event in events:
            given = [word for word in getattr(event, "input_dtypes", None) or [] if word in _DTYPE_WORDS]
            if given and any(part in event.name for part in parts):
                return _DTYPE_WORDS[given[0]]
    return "unknown"


@contextmanager
def _spy_on_loss(trainer: FastTrainer) -> Iterator[dict[str, str]]:
    """Notes the autocast state and the model's output dtype during the loss; the net itself is untouched,
    so that nothing is recompiled."""
    seen = {"autocast": "off", "output": "unknown", "precision": "unknown"}
    loss_fn, device = trainer.loss_fn, trainer.device_type

    def spying_loss(net: Any, batch: Any) -> torch.Tensor:
        seen["precision"] = torch.get_float32_matmul_precision()
        if torch.is_autocast_enabled(device):
            seen["autocast"] = dtype_name(torch.get_autocast_dtype(device))

        def spied(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            out = net(x, t)
            seen["output"] = dtype_name(out.dtype)
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
        "effective.attention_dtype": trace.attention_dtype,
        "effective.autocast_dtype": trace.autocast_dtype,
        "effective.matmul_dtype": trace.matmul_dtype,
        "effective.weight_dtype": dtype_name(weight_dtype),
        "effective.optimizer": trace.optimizer,
        "effective.graphs": counts.graphs,
        "effective.graph_breaks": counts.graph_breaks,
        "effective.recompiles": counts.recompiles,
        "effective.matmul_precision": trace.matmul_precision,
        "effective.cuda_graph": trace.cuda_graph,
        "effective.host_syncs": trace.host_syncs,
    }


def mismatches(cell: CellConfig, facts: dict[str, Any], threads: int) -> list[str]:
    """Each way in which what ran is not what was asked, in words; a cell with any is not ok."""
    checks = (
        ("attention", cell.attention, facts["effective.attention_op"], _attention_fits(cell, facts)),
        ("attention", cell.attention, f"on {facts['effective.attention_dtype']}", _attention_dtype_fits(cell, facts)),
        ("precision", cell.precision, _precision_seen(facts), _dtype_fits(cell, facts)),
        ("optimizer", cell.optimizer, facts["effective.optimizer"], _optimizer_fits(cell, facts)),
        ("compile", cell.compile, facts["effective.compiled_in_window"], _compile_fits(cell, facts)),
        ("cuda_graph", cell.cuda_graph, facts["effective.cuda_graph"],
         (cell.cuda_graph == "on") == (facts["effective.cuda_graph"] == "whole step")),
        ("threads", threads, facts["effective.threads"], threads == facts["effective.threads"]),
        ("fullgraph", cell.fullgraph, f"{facts['effective.graph_breaks']} graph breaks",
         cell.fullgraph == "off" or not facts["effective.graph_breaks"]),
    )  # fmt: skip
    return [f"{name}: asked {asked}, ran {ran}" for name, asked, ran, fits in checks if not fits]


def _attention_fits(cell: CellConfig, facts: dict[str, Any]) -> bool:
    ran = facts["effective.attention_op"]
    if cell.network != NETWORK and cell.attention == "manual":
        return True  # another net's own attention, if it has any: nothing was asked of it
    if cell.attention in ("sdpa", "sdpa-upcast"):
        return ran.startswith("sdpa-")
    return ran == cell.attention


def _attention_dtype_fits(cell: CellConfig, facts: dict[str, Any]) -> bool:
    """Of SDPA kernels alone: sdpa-upcast differs from sdpa in nothing but the dtype that reaches the kernel."""
    if not (cell.attention.startswith("sdpa") and facts["effective.attention_op"].startswith("sdpa-")):
        return True
    wanted = "float32" if cell.attention == "sdpa-upcast" else dtype_name(compute_dtype(cell.precision))
    return facts["effective.attention_dtype"] == wanted


def _dtype_fits(cell: CellConfig, facts: dict[str, Any]) -> bool:
    wanted = dtype_name(compute_dtype(cell.precision))
    autocast = wanted if cell.precision in ("bf16", "fp16") else "off"
    weights = wanted if cell.precision == "bf16-weights" else "float32"
    seen = (facts["effective.matmul_dtype"], facts["effective.autocast_dtype"], facts["effective.weight_dtype"])
    if cell.network != NETWORK:  # what another net returns may be of any dtype
        seen, wanted = ("", *seen[1:]), ""
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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
