"""Every setting of a cell: its values, its default, its meaning. The one place where a setting exists.

The defaults are the plain trainer's (hand-written attention, fp32, eager): a cell with nothing
set is its own control.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Scalar = str | int | float

# name -> (dim, depth, heads); "S" and "B" follow the sizes of the DiT paper (arXiv:2212.09748, table 1).
PRESETS: dict[str, tuple[int, int, int]] = {
    "micro": (64, 2, 4),
    "tiny": (128, 4, 4),
    "base": (256, 6, 4),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
}

COMPILE_ONLY = ("compile_scope", "fullgraph", "dynamic", "duck_shapes", "inductor")
# Axes that came after records existed: at its default such an axis is not hashed, so that older ids still match.
ADDED_LATER = ("network", "duck_shapes", "residual")
AUTOCAST = ("bf16", "fp16")  # precisions under autocast, over fp32 weights
SIZE_AXES = ("dim", "depth", "heads")  # what a preset resolves to
NETWORK = "tinydit"  # the net of this package; another is named package.module:function
IMAGE_SIZE = 32
CHANNELS = 3
PATCH_SIZE = 4


def _words(*values: str, help: str) -> Any:
    """An axis of words; the first is the default."""
    return field(default=values[0], metadata={"values": values, "help": help})


def _number(default: float, *, low: float, help: str) -> Any:
    """An axis of numbers (ints stay ints), each at least ``low``."""
    return field(default=default, metadata={"low": low, "help": help})


@dataclass(frozen=True, kw_only=True)
class CellConfig:
    """One resolved configuration: everything that decides what a cell computes and on what."""

    attention: str = _words(
        "manual", "sdpa", "sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-upcast", "flex",
        "flash-attn", "xformers", "sage", help="attention kernel",
    )  # fmt: skip
    precision: str = _words("fp32", "fp32-medium", "bf16", "fp16", "bf16-weights", help="number format")
    residual: str = _words(
        "fp32", "autocast", help="dtype of the tokens between blocks, under autocast: fp32, or the autocast dtype"
    )
    compile: str = _words(
        "off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
        help="torch.compile mode",
    )  # fmt: skip
    compile_scope: str = _words("model", "block", help="what is compiled: all, or the repeated block")
    fullgraph: str = _words("off", "on", help="refuse graph breaks")
    dynamic: str = _words("auto", "off", "on", help="dynamic shapes in compiled graphs")
    duck_shapes: str = _words(
        "on", "off", help="whether sizes that are equal while compiling share one symbol (with dynamic on)"
    )
    inductor: str = _words(
        "none", "coordinate-descent", "epilogue-fusion", "conv-1x1-as-mm",
        help="named set of Inductor options",
    )  # fmt: skip
    network: str = field(
        default=NETWORK,
        metadata={
            "pattern": r"tinydit|[A-Za-z_][\w.]*:[A-Za-z_]\w*",
            "like": "tinydit or package.module:function",
            "help": "the net: TinyDiT, or a function that makes another (--model package.module:function)",
        },
    )
    dim: int = _number(128, low=2, help="model width D")
    depth: int = _number(4, low=1, help="number of blocks")
    heads: int = _number(4, low=1, help="attention heads; must divide dim")
    qkv: str = _words("fused", "separate", help="one projection for q, k, v or three")
    gelu: str = _words(
        "exact", "tanh", "tanh-sigmoid",
        help="GELU form; tanh changes the function a little, tanh-sigmoid is the same written with a sigmoid",
    )  # fmt: skip
    adaln: str = _words("per-block", "merged", help="adaLN projections: one per block, or one matmul for all")
    patches: str = _words("conv", "linear", help="patch embedding: strided convolution, or reshape + Linear")
    memory_format: str = _words("contiguous", "channels-last", help="layout of image tensors")
    optimizer: str = _words("adamw", "adamw-foreach", "adamw-fused", "adamw-capturable", help="AdamW implementation")
    cuda_graph: str = _words("off", "on", help="capture the whole training step as one CUDA graph")
    sampler: str = _words("eager", "compiled", "bf16", "int8", help="how the sampler runs")
    batch_size: int = _number(128, low=1, help="global batch, images per optimiser step")
    workers: int = _number(1, low=1, help="data-parallel workers per trial")
    cpus_per_worker: int = _number(1, low=1, help="CPUs, and so threads, of each worker")
    gpus_per_worker: int = _number(0, low=0, help="GPUs of each worker")
    device: str = _words("cpu", "cuda", help="device that trains")
    lr: float = _number(3e-4, low=0.0, help="AdamW learning rate")
    max_grad_norm: float = _number(1.0, low=0.0, help="gradient-norm clip; 0 turns it off")
    seed: int = _number(0, low=0, help="seed of weights, order, noise and times")

    def __post_init__(self) -> None:
        for axis in dataclasses.fields(self):
            check_value(axis, getattr(self, axis.name))
        check_size(self.dim, self.depth, self.heads)
        if self.compile == "off":
            for name in COMPILE_ONLY:
                if getattr(self, name) != AXES[name].default:
                    raise ValueError(f"{name}: {getattr(self, name)!r} has no effect while compile is off")
        if self.residual == "autocast" and self.precision not in AUTOCAST:
            raise ValueError(f"residual: 'autocast' has no effect in precision {self.precision}: there is no autocast")
        if self.duck_shapes == "off" and self.dynamic != "on":
            raise ValueError("duck_shapes: 'off' has no effect while dynamic is not on: no size has a symbol")
        if self.batch_size % self.workers:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by workers {self.workers}: each worker takes"
                " an equal share of the global batch"
            )

    @property
    def model(self) -> str:
        """Preset name of the size, or ``dim/depth/heads`` where no preset has it."""
        size = (self.dim, self.depth, self.heads)
        if self.network != NETWORK:
            own = tuple(AXES[name].default for name in SIZE_AXES)
            return self.network if size == own else f"{self.network} {'/'.join(map(str, size))}"
        names = [name for name, preset in PRESETS.items() if preset == size]
        return names[0] if names else "/".join(map(str, size))

    @property
    def config_id(self) -> str:
        """Hash of the resolved config alone: what ``compare`` matches on."""
        return short_hash(self.identity())

    def identity(self) -> dict[str, Scalar]:
        """The axis values that a hash is taken of."""
        values = self.asdict()
        return {k: v for k, v in values.items() if k not in ADDED_LATER or v != AXES[k].default}

    def columns(self) -> dict[str, Scalar]:
        """The ``config.*`` columns of a record."""
        row: dict[str, Scalar] = {f"config.{name}": value for name, value in self.asdict().items()}
        return {**row, "config.model": self.model}

    def asdict(self) -> dict[str, Scalar]:
        return dict(vars(self))  # plain values alone: dataclasses.asdict would copy each, 30 times as slow

    def replace(self, **changes: Scalar) -> CellConfig:
        """A copy with other values; a ``model`` among them replaces the whole size."""
        kept = self.asdict()
        if "model" in changes:
            kept = {name: value for name, value in kept.items() if name not in (*SIZE_AXES, "network")}
        return from_mapping({**kept, **changes})


AXES: dict[str, dataclasses.Field[Any]] = {axis.name: axis for axis in dataclasses.fields(CellConfig)}
AXIS_NAMES = (*AXES, "model")
# The measured kernels behind these settings differ by design; everything else of the control is the cell's.
CONTROL_DEFAULTS: dict[str, Any] = {
    name: AXES[name].default
    for name in (
        "attention", "precision", "residual", "compile", "compile_scope", "fullgraph", "dynamic", "duck_shapes",
        "inductor", "qkv", "gelu", "adaln", "patches", "memory_format", "optimizer", "cuda_graph", "sampler",
    )
}  # fmt: skip


def control_of(cell: CellConfig, choice: Mapping[str, Scalar] | None = None) -> CellConfig:
    """The configuration a cell is paired with: same size, batch, device and seed; eager, hand-written
    attention, fp32, unless ``choice`` (``--control``) says otherwise."""
    return cell.replace(**{**CONTROL_DEFAULTS, **(choice or {})})


def from_mapping(values: Mapping[str, Any]) -> CellConfig:
    """Resolve axis values into a config. ``model`` names a preset; dim, depth and heads refine it.

    Raises ValueError naming the setting, what was given and what is possible.
    """
    values = dict(values)
    for key in values:
        check_key(key)
    resolved: dict[str, Any] = {}
    if isinstance(model := values.get("model"), str) and ":" in model:  # a net of the user's own, and its size
        resolved["network"], _, size = str(values.pop("model")).partition(" ")
        resolved.update(zip(SIZE_AXES, preset_size(size), strict=True) if size else ())
    elif "model" in values:
        resolved.update(zip(SIZE_AXES, preset_size(values.pop("model")), strict=True))
    for key, value in values.items():
        resolved[key] = coerce(key, value)
    return CellConfig(**resolved)


def preset_size(name: Any) -> tuple[int, int, int]:
    """(dim, depth, heads) of a preset, or of the form ``128/4/4``."""
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    parts = str(name).split("/")
    if len(parts) == 3 and all(part.isdigit() for part in parts):
        dim, depth, heads = map(int, parts)
        return dim, depth, heads
    raise ValueError(f"model: {name!r} is not one of {', '.join(PRESETS)}, nor dim/depth/heads such as 128/4/4")


def check_key(key: Any) -> None:
    if key not in AXIS_NAMES:
        raise ValueError(f"unknown axis {key!r}{nearest(str(key), AXIS_NAMES)}; known: {', '.join(sorted(AXIS_NAMES))}")


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known word, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def coerce(key: str, value: Any) -> Scalar:
    """The value with the axis's own type; words of numbers (from ``--set``) become numbers."""
    axis = AXES[key]
    if "values" in axis.metadata:
        if not isinstance(value, str):
            raise ValueError(f"{key}: {value!r} is not a word; possible: {', '.join(axis.metadata['values'])}")
        return value
    if "pattern" in axis.metadata:
        return str(value)
    if key == "max_grad_norm" and value == "off":
        return 0.0
    wanted: type[Any] = type(axis.default)
    try:
        if isinstance(value, bool):
            raise ValueError
        return _whole(value) if wanted is int else float(value)
    except (TypeError, ValueError, OverflowError):
        kind = "whole number" if wanted is int else "number"
        raise ValueError(f"{key}: {value!r} is not a {kind}") from None


def _whole(value: Any) -> int:
    """A whole number without a detour through float, which would round large ones; 128.0 and "1e3" are whole."""
    try:
        return int(value) if isinstance(value, int) else int(str(value), 10)
    except ValueError:
        number = float(value)
        if number != int(number):
            raise
        return int(number)


def check_value(axis: dataclasses.Field[Any], value: Any) -> None:
    """Raises ValueError naming the axis where the value is none of its values, or not in its range."""
    if "values" in axis.metadata:
        values = axis.metadata["values"]
        if value not in values:
            raise ValueError(
                f"{axis.name}: {value!r} is not possible{nearest(str(value), values)}; possible: {', '.join(values)}"
            )
    elif "pattern" in axis.metadata:
        if not re.fullmatch(axis.metadata["pattern"], str(value)):
            raise ValueError(f"{axis.name}: {value!r} is not possible; possible: {axis.metadata['like']}")
    elif not axis.metadata["low"] <= value < float("inf"):
        raise ValueError(f"{axis.name}: {value} is not possible; a number of at least {axis.metadata['low']}")


def check_size(dim: int, depth: int, heads: int, *, image: int = IMAGE_SIZE, patch: int = PATCH_SIZE) -> None:
    """Refuse sizes the model cannot have; the attention splits D over heads, the image into whole patches."""
    if min(dim, depth, heads, image, patch) < 1:
        raise ValueError(
            f"dim {dim}, depth {depth}, heads {heads}, image {image}, patch {patch}: all must be at least 1"
        )
    if dim % 2:
        raise ValueError(f"dim {dim} is odd; it must be even")
    if dim % heads:
        raise ValueError(f"dim {dim} is not divisible by heads {heads}")
    if image % patch:
        raise ValueError(f"image size {image} is not divisible by patch size {patch}")


def short_hash(value: Any, length: int = 12) -> str:
    """Hash of plain data that is equal on every machine and Python."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def cell_name(cell: CellConfig, varying: Iterable[str]) -> str:
    """The axis values that vary, joined by spaces: ``sdpa bf16 compile=default``.

    Words that say by themselves which axis they belong to stand alone; the rest are ``axis=value``.
    """
    plain = {"attention", "precision", "model"}
    columns = cell.columns()
    parts = []
    for axis in varying:
        value = columns[f"config.{axis}"]
        parts.append(str(value) if axis in plain else f"{axis}={value}")
    return " ".join(parts) or str(cell.model)
