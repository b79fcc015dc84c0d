"""The options that all sweep scripts share."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinydit_ray.grid import MANY_CELLS, Grid, GridError, load_grid, parse_sets
from tinydit_ray.sweep.errors import UsageError

DEFAULT_ROUNDS = 3
QUICK_MODEL = "micro"
PUBLISHED_BUDGET_S = 660.0


@dataclass(kw_only=True)
class SweepOptions:
    """What a sweep was asked for. ``sets`` maps axes to values that win over the grid's."""

    grid: Grid
    grid_name: str
    sets: dict[str, list[Any]] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    rounds: int = DEFAULT_ROUNDS
    repeats: int = 1  # each cell this many times over, as cells of their own (null sweep)
    self_control: bool = False  # each cell is its own control (null sweep)
    time_s: float = 24.0
    ci: float = 0.0
    budget_s: float = 0.0
    steps: int = 100
    fd_images: int = 250
    data: str = "auto"
    classes: tuple[int, ...] = ()
    device: str = "cpu"
    cpus_per_worker: int | None = None
    cell_timeout_s: float = 600.0
    memory_limit_gb: float | None = None
    wait_quiet_s: float = 0.0
    keep_larger: bool = False
    concurrent: int = 1
    address: str | None = None
    tracking_uri: str | None = None
    experiment: str = "tinydit"
    out: Path = Path("runs")
    name: str | None = None
    resume: bool = False
    ray: bool = True
    dry_run: bool = False
    command: list[str] = field(default_factory=list)


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of a sweep script with all shared options."""
    p = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    _what_to_measure(p.add_argument_group("what to measure"))
    _how_to_measure(p.add_argument_group("how to measure"))
    _where_to_run(p.add_argument_group("where to run"))
    _what_comes_out(p.add_argument_group("what comes out"))
    return p


def _what_to_measure(what: argparse._ArgumentGroup) -> None:
    what.add_argument("--grid", metavar="FILE", help="grid file, or the name of one that comes with the product")
    what.add_argument(
        "--set",
        dest="sets",
        metavar="AXIS=V1,V2",
        action="append",
        default=[],
        help="axis values; several are multiplied (without --grid they are the whole grid)",
    )
    what.add_argument("--quick", action="store_true", help="a smaller model, one round, a shorter window")
    what.add_argument("--control", metavar="AXIS=VALUE,…", help="what cells are paired with (default: plain fp32)")
    what.add_argument("--data", default="auto", help="auto, cifar10, shapes, or a folder (default: auto)")
    what.add_argument("--classes", default="", metavar="1,9", help="only these classes")


def _how_to_measure(how: argparse._ArgumentGroup) -> None:
    how.add_argument("--rounds", type=count(1), help="processes each cell is timed in (default: 3)")
    how.add_argument(
        "--time", dest="time_s", type=_positive, help="seconds of timing per cell, all rounds (default: 24)"
    )
    how.add_argument(
        "--ci",
        type=_fraction,
        default=0.0,
        help="go on until the half-width of a round's interval is this, such as 0.02",
    )
    how.add_argument(
        "--budget",
        dest="budget_s",
        type=_duration,
        metavar="30m",
        help="for the whole sweep: windows are shortened, then rounds after the first are skipped"
        " (default: 11m for the published grid, else none)",
    )
    how.add_argument("--steps", type=count(0), help="training steps before scoring, in round 1 (default: 100; 0: none)")
    how.add_argument(
        "--cell-timeout",
        dest="cell_timeout_s",
        type=_duration,
        default=600.0,
        metavar="10m",
        help="end a cell's round after this long (default: 10m)",
    )
    how.add_argument(
        "--memory-limit",
        dest="memory_limit_gb",
        type=_positive,
        metavar="GB",
        help="memory of one trial; beyond it the cell is oom (default: 90 %% of what is free)",
    )
    how.add_argument(
        "--wait-quiet",
        dest="wait_quiet_s",
        type=_positive,
        default=0.0,
        metavar="S",
        help="before a window wait up to S seconds until other processes use under 10 %% of the CPUs",
    )
    how.add_argument(
        "--keep-larger", action="store_true", help="run larger cells also after a smaller one ran out of memory"
    )
    how.add_argument(
        "--fd-n",
        dest="fd_images",
        type=count(0),
        default=250,
        metavar="N",
        help="images sampled for probe-FD after training (default: 250; 0: none)",
    )


def _where_to_run(where: argparse._ArgumentGroup) -> None:
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    where.add_argument("--cpus-per-worker", type=count(1), help="CPUs and threads of a trial (default: all of a node)")
    where.add_argument(
        "--no-ray", dest="ray", action="store_false", help="cells one after another in subprocesses, no Ray"
    )
    where.add_argument("--address", help="an existing Ray cluster (default: start one here)")


def _what_comes_out(out: argparse._ArgumentGroup) -> None:
    out.add_argument("--out", type=Path, default=Path("runs"), help="folder that holds the sweeps (default: runs)")
    out.add_argument("--name", help="name of this sweep's folder (default: grid and date)")
    out.add_argument("--resume", metavar="NAME", help="go on with this sweep: run what is missing or not ok")
    out.add_argument("--tracking-uri", help="MLflow store (default: sqlite:///mlflow.db here)")
    out.add_argument("--experiment", default="tinydit", help="MLflow experiment (default: tinydit)")
    out.add_argument("--dry-run", action="store_true", help="print the cells and the estimated time, run nothing")
    out.add_argument("--yes", action="store_true", help=f"run a grid of more than {MANY_CELLS:,} cells")


def options_from(args: argparse.Namespace, *, default_grid: str, command: list[str]) -> SweepOptions:
    """Checked options. Raises UsageError, one line."""
    try:
        grid, name = _grid_of(args, default_grid)
        sets = parse_sets(args.sets)
        if (cells := grid.count_with(sets)) > MANY_CELLS and not args.yes:
            raise GridError(f"the grid has {cells:,} cells; --yes runs more than {MANY_CELLS:,}")
        control = {key: values[0] for key, values in parse_sets(_control_parts(args.control)).items()}
        classes = _classes(args.classes)
    except GridError as error:
        raise UsageError(str(error)) from None
    if args.name and args.resume:
        raise UsageError("--name and --resume: --resume NAME already names the sweep")
    quick = args.quick
    if quick and not {"model", "dim", "depth", "heads"} & sets.keys():
        sets["model"] = [QUICK_MODEL]
    return SweepOptions(
        grid=grid, grid_name=name, sets=sets, control={**grid.control, **control},
        rounds=args.rounds or (1 if quick else grid.rounds or DEFAULT_ROUNDS),
        time_s=args.time_s or (8.0 if quick else 24.0), ci=args.ci, budget_s=_budget(args, name),
        steps=args.steps if args.steps is not None else grid.steps if grid.steps is not None else 100,
        fd_images=args.fd_images, data=args.data, classes=classes, device=args.device,
        cpus_per_worker=args.cpus_per_worker,
        cell_timeout_s=args.cell_timeout_s, memory_limit_gb=args.memory_limit_gb, wait_quiet_s=args.wait_quiet_s,
        keep_larger=args.keep_larger, address=args.address, tracking_uri=args.tracking_uri,
        experiment=args.experiment, out=args.out, name=args.resume or args.name, resume=bool(args.resume),
        ray=args.ray, dry_run=args.dry_run, command=command,
    )  # fmt: skip


def _budget(args: argparse.Namespace, grid: str) -> float:
    """The published comparison is to end in 12 minutes on two cores, however slow these are today."""
    as_published = grid == "published" and not (args.sets or args.rounds or args.time_s or args.ci)
    return args.budget_s or (PUBLISHED_BUDGET_S if as_published else 0.0)


def _grid_of(args: argparse.Namespace, default_grid: str) -> tuple[Grid, str]:
    if args.grid is None and args.sets:
        return Grid(), "set"
    name = args.grid or default_grid
    path = named_grid(name)
    return load_grid(path), path.stem


def named_grid(name: str) -> Path:
    """A grid file by path, or by the name of one that comes with the product."""
    if Path(name).suffix in (".yaml", ".yml") or "/" in name:
        return Path(name)
    for folder in grid_folders():
        if (folder / f"{name}.yaml").exists():
            return folder / f"{name}.yaml"
    known = sorted({path.stem for folder in grid_folders() for path in folder.glob("*.yaml")})
    raise GridError(f"--grid {name}: neither a .yaml file nor one of {', '.join(known)}")


def grid_folders() -> list[Path]:
    """Where named grids lie: in a checkout, and in an installed package."""
    package = Path(__file__).resolve().parent.parent
    return [folder for folder in (package.parent / "sweeps" / "grids", package / "grids") if folder.is_dir()]


def _control_parts(text: str | None) -> list[str]:
    return [part for part in (text or "").split(",") if part]


def _classes(text: str) -> tuple[int, ...]:
    from tinydit_ray.data import DataError, parse_classes

    try:
        return parse_classes(text)
    except DataError as error:
        raise UsageError(f"--classes {text}: {error}") from None


def count(low: int) -> Any:
    """Argparse type: a whole number of at least ``low``."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _fraction(text: str) -> float:
    value = _positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction below 1, such as 0.02")
    return value


def _duration(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``2h`` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
