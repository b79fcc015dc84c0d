"""The command line of ``python -m tinydit_ray.train``, and the configuration it resolves to."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tinydit_ray.arguments import below_one, count
from tinydit_ray.bench.machine import granted_cpus
from tinydit_ray.config import CellConfig, check_key, from_mapping
from tinydit_ray.grid import parse_sets
from tinydit_ray.storage import Storage

# options that are short for --set AXIS=VALUE
AXIS_OPTIONS = {
    "amp": "precision",
    "compile": "compile",
    "attention": "attention",
    "batch_size": "batch_size",
    "lr": "lr",
    "seed": "seed",
    "device": "device",
    "threads": "cpus_per_worker",
}
SIZE_AXES = ("dim", "depth", "heads")
DEFAULT_MODEL = "base"
EVALUATIONS = 8  # by default: that many moments of training in the strip
_DECAY = below_one("a decay of at least 0 and below 1, such as 0.999")


class TrainError(ValueError):
    """What a person asked for cannot be done: one line, exit status 2."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a run was asked for. ``ema`` None is off; ``fd_n`` 0 is no probe-FD."""

    out: Path
    steps: int
    cell: CellConfig
    device_reason: str
    data: str
    classes: tuple[int, ...]
    ema: float | None
    sampler: str
    sample_steps: int
    samples: int
    fd_n: int
    eval_every: int
    save_every: int
    storage: Storage | None
    command: str

    @property
    def scoring(self) -> dict[str, Any]:
        """What decides the scores of trained weights: other values need only other scores, no training."""
        return {"sampler": self.sampler, "sample_steps": self.sample_steps, "samples": self.samples, "fd_n": self.fd_n}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TrainError(f"{message} (--help lists the options)")


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m tinydit_ray.train",
        allow_abbrev=False,
        description="Train one model and score it: one experiment, one command. The same command goes on after an"
        " interruption, to the same weights.",
    )
    what = p.add_argument_group("what to train")
    what.add_argument("--out", type=Path, required=True, help="folder of this run, such as runs/x")
    what.add_argument("--steps", type=count(1), default=4000, help="optimiser steps in all (default: 4000)")
    what.add_argument(
        "--set", dest="sets", metavar="AXIS=VALUE", action="append", default=[],
        help="any axis of a cell, such as dim=128 (default size: model=base)",
    )  # fmt: skip
    what.add_argument("--profile", type=Path, metavar="FILE.yaml", help="axis: value map that lies under --set")
    what.add_argument("--data", default="auto", help="auto, cifar10, shapes, or a folder (default: auto)")
    what.add_argument("--classes", default="", metavar="1,9", help="only these classes")
    how = p.add_argument_group("short for --set")
    how.add_argument("--amp", choices=("bf16", "fp16"), help="autocast dtype (default: fp32, no autocast)")
    how.add_argument("--compile", nargs="?", const="default", metavar="MODE", help="torch.compile (default: eager)")
    how.add_argument("--attention", help="attention kernel (default: manual)")
    how.add_argument("--batch-size", help="images per step (default: 128)")
    how.add_argument("--lr", help="AdamW learning rate (default: 3e-4)")
    how.add_argument("--seed", help="of weights, order, noise and times (default: 0)")
    how.add_argument("--device", help="cpu, cuda or auto (default: auto)")
    how.add_argument("--threads", type=count(1), help="CPU threads (default: torch's choice)")
    _add_scores(p.add_argument_group("scores and files"))
    return p


def _add_scores(group: Any) -> None:
    group.add_argument("--ema", type=_DECAY, metavar="DECAY", help="also average the weights and score the average")
    group.add_argument("--sampler", choices=("euler", "heun"), default="euler")
    group.add_argument("--sample-steps", type=count(1), default=20, help="steps of the sampler (default: 20)")
    group.add_argument("--samples", type=count(1), default=64, help="images in samples.png (default: 64)")
    group.add_argument("--fd-n", type=count(0), default=1000, help="images of probe-FD; 0: none (default: 1000)")
    group.add_argument(
        "--eval-every",
        type=count(1),
        metavar="N",
        help="velocity MSE and a row of strip.png each N steps (default: 8 times)",
    )
    group.add_argument(
        "--storage",
        metavar="URI",
        help="copy each checkpoint to a folder or s3://bucket/prefix, and begin with that copy where --out has none",
    )
    group.add_argument("--save-every", type=count(1), default=500, metavar="N", help="checkpoint (default: 500)")


def parse(argv: Sequence[str]) -> TrainOptions:
    """Checked options. Raises TrainError or another ValueError of one line."""
    from tinydit_ray.data import parse_classes

    args = parser().parse_args(argv)
    cell, reason = _resolve_cell(args)
    return TrainOptions(
        out=args.out, steps=args.steps, cell=cell, device_reason=reason, data=args.data,
        classes=parse_classes(args.classes), ema=args.ema, sampler=args.sampler, sample_steps=args.sample_steps,
        samples=args.samples, fd_n=args.fd_n, eval_every=args.eval_every or -(-args.steps // EVALUATIONS),
        save_every=args.save_every, storage=Storage.at(args.storage) if args.storage else None,
        command=shlex.join(["python", "-m", "tinydit_ray.train", *argv]),
    )  # fmt: skip


def _resolve_cell(args: argparse.Namespace) -> tuple[CellConfig, str]:
    """The configuration, and why its device was chosen: defaults, then the profile, then what was asked."""
    from tinydit_ray.bench.capability import Unsupported, check_capability

    asked, profile = _asked(args), read_profile(args.profile)
    device, reason = _device_of(asked, profile)
    values: dict[str, Any] = {"model": DEFAULT_MODEL, "cpus_per_worker": _default_threads()}
    for layer in (profile, asked):
        if "model" in layer:  # a preset replaces the size that a layer below it gave
            values = {key: value for key, value in values.items() if key not in SIZE_AXES}
        values.update(layer)
    cell = from_mapping({**values, "device": device})
    if cell.workers > 1:
        raise TrainError(f"workers {cell.workers}: this command trains in one process; sweeps train in several")
    if cell.cpus_per_worker > granted_cpus():
        raise TrainError(f"--threads {cell.cpus_per_worker}: this machine has {granted_cpus()} CPUs")
    try:
        check_capability(cell)
    except Unsupported as error:
        raise TrainError(str(error)) from None
    return cell, reason


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Axis values of the options and of --set; one axis in both is refused."""
    given = {name: getattr(args, name) for name in AXIS_OPTIONS}
    asked = {AXIS_OPTIONS[name]: value for name, value in given.items() if value is not None}
    for key, values in parse_sets(args.sets).items():
        if len(values) > 1:
            raise TrainError(f"--set {key}={','.join(map(str, values))}: a run takes one value; sweeps take several")
        if key in asked:
            option = next(name for name, axis in AXIS_OPTIONS.items() if axis == key).replace("_", "-")
            raise TrainError(f"{key} is given twice: by --{option} and by --set")
        asked[key] = values[0]
    return asked


def read_profile(path: Path | None) -> dict[str, str]:
    """A YAML map of axis: value, every scalar as the word it is written as."""
    if path is None:
        return {}
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"--profile {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise TrainError(f"--profile {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise TrainError(f"--profile {path}: a map of axis: value is needed")
    try:
        for key in content:
            check_key(key)
    except ValueError as error:
        raise TrainError(f"--profile {path}: {error}") from None
    return content


def _device_of(asked: dict[str, Any], profile: dict[str, str]) -> tuple[str, str]:
    """The device and a word why: as asked, or the best that is there."""
    import torch

    device = asked.get("device", profile.get("device", "auto"))
    if device != "auto":
        return device, f"device: {device}, as {'asked' if 'device' in asked else 'the profile says'}"
    if torch.cuda.is_available():
        return "cuda", f"device: cuda, since there is {torch.cuda.get_device_name()}"
    return "cpu", "device: cpu, since no CUDA device was found"


def _default_threads() -> int:
    import torch

    return min(torch.get_num_threads(), granted_cpus())
