"""One training step against the public code that a user would pick instead: timm's layers, diffusers' DiT.

    pip install timm diffusers                       # for this comparison alone; the product needs neither
    python docs/benchmarks/public_dit.py             # about 12 minutes on 2 cores; --profile best.yaml adds a cell

Same size, batch and machine. Each contender is timed in pairs (A B B A, the product's engine) with the published
rule for CPUs (SDPA, fp32, eager, stock AdamW = 1.00), in fresh processes, in a random order per round. The public
models keep what they are: six modulations per block with gates (adaLN-Zero), where TinyDiT has four, and in
diffusers a time embedding in each block and class labels; so their step does a little more work.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from tinydit_ray.bench import stats
from tinydit_ray.bench.machine import cpu_name, granted_cpus
from tinydit_ray.bench.timing import CudaStopwatch, HostStopwatch, time_pairs, warm_up
from tinydit_ray.bench.verdict import pooled_speedups, verdict
from tinydit_ray.config import CellConfig, from_mapping
from tinydit_ray.model import modulate, sinusoidal_embedding, unpatchify
from tinydit_ray.process import keep_freed_memory
from tinydit_ray.train import FastTrainer, trainer_of

CONTROL = {"attention": "sdpa"}
OURS = {
    "precision": "bf16", "residual": "autocast", "adaln": "merged", "patches": "linear", "optimizer": "adamw-fused",
}  # fmt: skip
FAST = {"amp_dtype": torch.bfloat16, "optimizer": "adamw-fused"}
HOWS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": FAST, "bf16 compile": {**FAST, "compile": True}}


class TimmBlock(nn.Module):
    """A DiT block (arXiv:2212.09748, figure 3) around timm's attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        from timm.layers import Mlp
        from timm.models.vision_transformer import Attention

        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim, num_heads=heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim, act_layer=lambda: nn.GELU(approximate="tanh"))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).chunk(6, dim=-1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class TimmDiT(nn.Module):
    """DiT from timm's parts: x_t (N, 3, 32, 32), t (N,) -> velocity (N, 3, 32, 32)."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        from timm.layers import PatchEmbed

        super().__init__()
        self.embed = PatchEmbed(32, 4, 3, dim)
        self.pos = nn.Parameter(torch.randn(1, 64, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(TimmBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.out = nn.Linear(dim, 48)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c = self.time(sinusoidal_embedding(t))
        x = self.embed(x) + self.pos
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.ada(c).chunk(2, dim=-1)
        return unpatchify(self.out(modulate(self.norm(x), shift, scale)))


class DiffusersDiT(nn.Module):
    """diffusers' DiTTransformer2DModel under the same call: whole time steps and one class."""

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        from diffusers import DiTTransformer2DModel

        super().__init__()
        self.net = DiTTransformer2DModel(
            num_attention_heads=heads, attention_head_dim=dim // heads, num_layers=depth, in_channels=3,
            out_channels=3, sample_size=32, patch_size=4, num_embeds_ada_norm=1000,
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        steps = (999 * t).long()
        return self.net(x, timestep=steps, class_labels=torch.zeros_like(steps)).sample


PUBLIC: dict[str, Callable[[int, int, int], nn.Module]] = {"timm": TimmDiT, "diffusers": DiffusersDiT}


def contenders(size: dict[str, Any], profile: Path | None) -> dict[str, Callable[[], FastTrainer]]:
    """Name -> a fresh trainer. ``size`` is model, batch, device, threads, as axis values."""
    cell = from_mapping(size)

    def public(kind: str, how: dict[str, Any]) -> FastTrainer:
        torch.manual_seed(cell.seed)
        model = PUBLIC[kind](cell.dim, cell.depth, cell.heads).to(cell.device)
        return FastTrainer(model, lr=cell.lr, max_grad_norm=cell.max_grad_norm or None, **how)

    found: dict[str, Callable[[], FastTrainer]] = {
        f"{kind} {name}": lambda kind=kind, how=how: public(kind, how) for kind in PUBLIC for name, how in HOWS.items()
    }
    ours: dict[str, dict[str, Any]] = {
        "TinyDiT, the control itself": CONTROL,
        "TinyDiT bf16, hand-written attention": {"precision": "bf16", "optimizer": "adamw-fused"},
        "TinyDiT bf16, all switches": OURS,
        "TinyDiT bf16, all switches, compiled": {**OURS, "compile": "default"},
    }
    if profile:
        ours[f"TinyDiT {profile.name}"] = yaml.load(profile.read_text(), Loader=yaml.BaseLoader)
    return found | {name: lambda axes=axes: trainer_of(from_mapping({**size, **axes})) for name, axes in ours.items()}


def batches(cell: CellConfig, count: int = 8) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(cell.seed)
    shape = (cell.batch_size, 3, 32, 32)
    made = [
        (
            torch.rand(shape, generator=generator) * 2 - 1,
            torch.randn(shape, generator=generator),
            torch.rand(cell.batch_size, generator=generator),
        )
        for _ in range(count)
    ]
    return [tuple(tensor.to(cell.device) for tensor in batch) for batch in made]  # type: ignore[misc]


def time_one(name: str, size: dict[str, Any], profile: Path | None, seconds: float) -> dict[str, Any]:
    """One contender against the control, in this process."""
    cell = from_mapping(size)
    keep_freed_memory()  # as in a sweep's trials
    torch.set_num_threads(cell.cpus_per_worker)
    data = batches(cell)
    contender, control = contenders(size, profile)[name](), trainer_of(from_mapping({**size, **CONTROL}))
    for trainer in (contender, control):
        warm_up(trainer.train_step, data, 5)
    watch = CudaStopwatch() if cell.device == "cuda" else HostStopwatch()
    window = time_pairs(contender.train_step, control.train_step, data, seconds=seconds, stopwatch=watch)
    found = stats.round_speedup(stats.abba_ratios(window.cell_ms, window.control_ms))
    return {
        "speedup": [found.value, found.ci_low, found.ci_high, len(window.cell_ms)],
        "ms": stats.summarise(window.cell_ms).ms_per_step,
        "parameters": sum(p.numel() for p in contender.model.parameters()),
    }


def run_one(name: str, arguments: list[str], cache: str) -> dict[str, Any]:
    """``time_one`` in a fresh process."""
    import os

    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--one", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(names: list[str], rounds: int, arguments: list[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(rounds):
            for name in random.Random(number).sample(names, len(names)):
                found[name].append(run_one(name, arguments, cache))
                print(f"round {number + 1}  {name:<40} ×{found[name][-1]['speedup'][0]:.3f}", file=sys.stderr)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Markdown rows, pooled over the rounds as in a sweep."""
    estimates = {
        name: [stats.Estimate.from_columns(*one["speedup"]) for one in rounds] for name, rounds in found.items()
    }
    lines = ["| step | parameters | ms/step | speed-up | 95 % interval | verdict |", "|---|---:|---:|---:|---|---|"]
    for name, pooled in pooled_speedups(estimates).items():
        ms = stats.pooled_ms([one["ms"] for one in found[name]])
        interval = f"{pooled.ci_low:.3f} – {pooled.ci_high:.3f}"
        count = f"{found[name][0]['parameters']:,}"
        lines.append(f"| {name} | {count} | {ms:.0f} | {pooled.value:.3f} | {interval} | {verdict(pooled)} |")
    return lines


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="tiny", help="size (default: tiny, 128/4/4)")
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--rounds", type=int, default=3, help="fresh processes per contender (default: 3)")
    p.add_argument("--time", type=float, default=8.0, help="seconds of timing per round (default: 8)")
    p.add_argument("--profile", type=Path, help="best.yaml of a sweep, as a contender")
    p.add_argument("--only", action="append", help="contender, by name (default: all)")
    p.add_argument("--one", help=argparse.SUPPRESS)
    args = p.parse_args()
    size = {"model": args.model, "batch_size": args.batch_size, "device": args.device}
    size["cpus_per_worker"] = granted_cpus()
    if args.one:
        print(json.dumps(time_one(args.one, size, args.profile, args.time)))
        return
    names = args.only or list(contenders(size, args.profile))
    passed = ["--model", args.model, "--batch-size", str(args.batch_size), "--device", args.device]
    passed += ["--time", str(args.time)] + (["--profile", str(args.profile)] if args.profile else [])
    found = compare(names, args.rounds, passed)
    print("\n".join(table(found)))
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{granted_cpus()} cores of {cpu_name()}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "diffusers"))
    print(f"\n{args.model}, batch {args.batch_size}, {where}; {versions}; {args.rounds} rounds of {args.time:g} s")


if __name__ == "__main__":
    main()
