"""Train, check and measure a probe.

    python -m tinydit_ray.quality.probe train --data data/cifar10 --out probes/cifar10.safetensors
    python -m tinydit_ray.quality.probe evaluate --data data/cifar10
    python -m tinydit_ray.quality.probe bias --data data/cifar10
    python -m tinydit_ray.quality.probe anchors --data data/cifar10

Training on CIFAR-10 takes about 12 minutes on two cores with bf16 instructions and reaches 88 %; on
``shapes`` a minute and a half, 99 %. docs/quality.md holds the tables that the last two commands print.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tinydit_ray.quality.bias import halves_bias, reference_bias
from tinydit_ray.quality.card import write_card
from tinydit_ray.quality.classifier import Probe, load_probe, new_probe, probe_features, save_probe
from tinydit_ray.quality.net import CLASSES
from tinydit_ray.quality.scores import NOT_FID, anchors, probe_for, reference_for
from tinydit_ray.quality.training import ProbeRecipe, Report, accuracy, train_net

if TYPE_CHECKING:
    from tinydit_ray.data import ImageSet

EPOCHS = {"shapes": 8}


def load_split(data: str, split: Literal["train", "test"]) -> ImageSet:
    """One decoded split of what ``--data`` names."""
    from tinydit_ray.data import load, prepare, resolve

    spec, reason = resolve(data)
    Console(stderr=True).print(f"[dim]{reason}[/dim]", highlight=False)
    return load(prepare(spec), split)


def train(args: argparse.Namespace) -> None:
    """``train``: weights, statistics of the test images, file and card."""
    train_set, test_set = load_split(args.data, "train"), load_split(args.data, "test")
    _check_labels(train_set, test_set)
    name = "shapes" if train_set.source == "shapes" else "cifar10"
    epochs = args.epochs or EPOCHS.get(name, ProbeRecipe.epochs)
    recipe = ProbeRecipe(epochs=epochs, seed=args.seed, minutes=args.minutes, amp=not args.fp32)
    start = time.perf_counter()
    with _progress("probe") as report:
        net = train_net(train_set.images, train_set.labels, recipe, report)
    minutes = (time.perf_counter() - start) / 60
    probe = finished_probe(name, net, recipe, train_set, test_set, minutes, machine())
    save_probe(probe, args.out)
    write_card(probe, Path(args.out))
    _print_probe(load_probe(args.out), Path(args.out))
    print(f"accuracy {float(probe.meta['accuracy']):.4f}")


def finished_probe(
    name: str,
    net: torch.nn.Module,
    recipe: ProbeRecipe,
    train_set: ImageSet,
    test_set: ImageSet,
    minutes: float,
    machine: str,
) -> Probe:
    """A trained network as a probe: rounded, measured on the test images, and with its history in words."""
    meta = {
        "source": str(train_set.source),
        "train_digest": train_set.digest,
        "train_n": str(len(train_set.images)),
        "recipe": json.dumps(dataclasses.asdict(recipe)),
        "minutes": f"{minutes:.1f}",
        "machine": machine,
        "torch": torch.__version__.partition("+")[0],
        "command": _command(name, recipe),
    }
    probe = new_probe(name, net, test_set.images, test_set.digest, meta)  # type: ignore[arg-type]
    share = accuracy(probe.net, test_set.images, test_set.labels)
    measured = {"accuracy": f"{share:.6f}", "accuracy_n": str(len(test_set.images))}
    return dataclasses.replace(probe, meta=meta | measured)


def evaluate(args: argparse.Namespace) -> None:
    """``evaluate``: digest, id and accuracy of a probe on a test split."""
    test_set = load_split(args.data, "test")
    probe = load_probe(args.probe) if args.probe else probe_for(test_set.source)
    _check_labels(test_set)
    _print_probe(probe, None)
    print(f"{len(test_set.images)} test images of {test_set.source}")
    print(f"probe_id {probe.id_for(test_set.digest)}")
    print(f"accuracy {accuracy(probe.net, test_set.images, test_set.labels):.4f}")


def bias(args: argparse.Namespace) -> None:
    """``bias``: distances between real images and real images, which would be 0 for endless images."""
    train_set, test_set = load_split(args.data, "train"), load_split(args.data, "test")
    probe = load_probe(args.probe) if args.probe else probe_for(test_set.source)
    reference = reference_for(probe, test_set)
    halves = halves_bias(probe_features(probe, test_set.images)[0], draws=args.draws)
    order = torch.randperm(len(train_set.images), generator=torch.Generator().manual_seed(0))
    real = reference_bias(
        probe_features(probe, train_set.images[order[:20000]])[0], reference.stats, draws=args.draws
    )
    table = Table(title=f"probe-FD of real images, mean ± sd of {args.draws} draws")
    for column in ("n", "two disjoint sets of n test images", "n training images to all test images"):
        table.add_column(column, justify="right")
    for row in real:
        other = [half for half in halves if half.n == row.n]
        text = f"{other[0].mean:.3f} ± {other[0].sd:.3f}" if other else "-"
        table.add_row(f"{row.n:,}", text, f"{row.mean:.3f} ± {row.sd:.3f}")
    print(f"probe_id {reference.probe_id}; {NOT_FID}")
    Console().print(table)


def print_anchors(args: argparse.Namespace) -> None:
    """``anchors``: what real training images and pure noise score."""
    train_set, test_set = load_split(args.data, "train"), load_split(args.data, "test")
    probe = load_probe(args.probe) if args.probe else probe_for(test_set.source)
    reference = reference_for(probe, test_set)
    print(f"probe_id {reference.probe_id}; {NOT_FID}")
    for name, row in anchors(probe, reference, train_set.images, n=args.n).items():
        counts = " ".join(map(str, row["class_counts"]))
        print(f"{name:<6} probe_fd {row['probe_fd']:.2f}  n {row['probe_fd_n']}  classes {counts}")


def machine() -> str:
    """Cores and kind of the machine, for a card."""
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{torch.get_num_threads()} threads, {platform.machine()}, {kernels}"


def _command(name: str, recipe: ProbeRecipe) -> str:
    data = "shapes" if name == "shapes" else "PATH"
    words = f"python -m tinydit_ray.quality.probe train --data {data} --out {name}.safetensors"
    return f"{words} --epochs {recipe.epochs} --seed {recipe.seed}{'' if recipe.amp else ' --fp32'}"


def _print_probe(probe: Probe, path: Path | None) -> None:
    if path is not None:
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, card {path.with_suffix('.md').name}")
    print(f"probe {probe.name}, {probe.feature_width} features, statistics of {probe.stats.n} images")
    print(f"digest {probe.digest}")


def _check_labels(*sets: ImageSet) -> None:
    for split in sets:
        if not len(split.labels) or int(split.labels.min()) < 0 or int(split.labels.max()) >= CLASSES:
            raise ValueError(f"{split.source}: a probe needs images labelled 0 to {CLASSES - 1}")


@contextmanager
def _progress(title: str) -> Iterator[Report]:
    """A bar with time left on a terminal; elsewhere a line every 30 s."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = last = time.monotonic()
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(title, total=None)

        def report(done: int, total: int, loss: float) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total, description=f"{title} loss {loss:.3f}")
            now = time.monotonic()
            if not console.is_terminal and (now - last > 30 or done == total):
                left = f"{(now - start) / done * (total - done):.0f} s left"
                console.print(f"{title} step {done}/{total} loss {loss:.3f}, {left}", highlight=False)
                last = now

        yield report


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    top = argparse.ArgumentParser(
        prog="python -m tinydit_ray.quality.probe",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, run in (("train", train), ("evaluate", evaluate), ("bias", bias), ("anchors", print_anchors)):
        sub = commands.add_parser(name, help=(run.__doc__ or "").partition(": ")[2])
        sub.set_defaults(run=run)
        sub.add_argument("--data", default="auto", help="a folder, cifar10, shapes, or auto (default)")
        sub.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
        if name == "train":
            sub.add_argument("--out", required=True, help="file to write, NAME.safetensors")
            sub.add_argument("--epochs", type=int, help="default 14; shapes 8")
            sub.add_argument(
                "--minutes", type=float, default=ProbeRecipe.minutes, help="ceiling: fewer epochs"
            )
            sub.add_argument("--seed", type=int, default=0)
            sub.add_argument("--fp32", action="store_true", help="train in fp32 instead of bf16 autocast")
        else:
            sub.add_argument("--probe", help="shipped name or file (default: the one for the data)")
        if name == "bias":
            sub.add_argument("--draws", type=int, default=10)
        if name == "anchors":
            sub.add_argument("--n", type=int, default=1000)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        args.run(args)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
