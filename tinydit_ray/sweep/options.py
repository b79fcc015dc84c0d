"""The options that all sweep scripts share: from what was given (``sweep/parser.py``) to what is meant, checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinydit_ray.config import CellConfig
from tinydit_ray.grid import MANY_CELLS, Grid, GridError, load_grid, parse_sets
from tinydit_ray.record import Record
from tinydit_ray.storage import Storage, StorageError
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.repeat import grid_of, read_record

DEFAULT_ROUNDS = 3
DEFAULT_STEPS = 100
CELL_TIMEOUT_S = 600.0
QUICK_MODEL = "micro"
QUICK_BATCH = 64  # twice the steps in a short window, and training in half the time
QUICK_BUDGET_S = 200.0


@dataclass(kw_only=True)
class SweepOptions:
    """What a sweep was asked for. ``sets`` maps axes to values that win over the grid's."""

    grid: Grid
    grid_name: str
    sets: dict[str, list[Any]] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()  # names of cells, with * and ?; the others are left out
    spread: Callable[[CellConfig], list[CellConfig]] | None = None  # each cell of the grid as several (scaling grid)
    repeated: Record | None = None  # the record whose cell is measured once more
    rounds: int = DEFAULT_ROUNDS
    repeats: int = 1  # each cell this many times over, as cells of their own (null sweep)
    self_control: bool = False  # each cell is its own control (null sweep)
    time_s: float = 24.0
    ci: float = 0.0
    budget_s: float = 0.0
    steps: int = DEFAULT_STEPS
    fd_images: int = 250
    ema: float = 0.0  # decay of averaged weights that are scored beside the raw ones; 0: none
    times: str = ""  # what is timed; "" leaves it to the grid
    train_s: float = 0.0  # seconds that a cell of a quality grid trains for; 0: ``steps`` alone
    target: float = 0.0  # velocity MSE whose moment a quality grid looks for
    asha: bool = False  # trials that are behind are ended early (quality grids alone)
    trials: int = 0  # cells that a search runs; 0: no search
    seeds: int = 0  # of the control, trained and scored beside the cells
    data: str = "auto"
    classes: tuple[int, ...] = ()
    device: str = "cpu"
    cpus_per_worker: int | None = None
    gpus_per_worker: int | None = None
    cell_timeout_s: float = CELL_TIMEOUT_S
    memory_limit_gb: float | None = None
    wait_quiet_s: float = 0.0
    keep_larger: bool = False
    max_failures: int = 0  # how often a trial of several workers is started again because one of them died
    concurrent: int | str | None = None  # trials at a time; None: one per node; "per-gpu"
    on: str | None = None  # the kind of node that the sweep is pinned to
    placement: str = "one-kind"
    wait_nodes_s: float | None = None  # for nodes that are not there yet; None: where the cluster can add some
    address: str | None = None
    storage: str = ""  # URI of where trained weights go; "" for nowhere
    tracking_uri: str | None = None
    experiment: str = "tinydit"
    out: Path = Path("runs")
    name: str | None = None
    resume: bool = False
    allow_changed: bool = False
    ray: bool = True
    dry_run: bool = False
    cluster: Path | None = None  # with dry_run: the cluster file whose nodes the estimate is for
    report: bool = True
    system_metrics: bool = False
    command: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # options as given; what --resume starts from


def options_from(args: argparse.Namespace, *, default_grid: str, command: list[str]) -> SweepOptions:
    """Checked options. Raises UsageError, one line."""
    try:
        repeated = read_record(args.repeat) if args.repeat else None
        grid, name = (grid_of(repeated, args.repeat), "repeat") if repeated else _grid_of(args, default_grid)
        sets = parse_sets([*args.sets, *([f"workers={args.workers}"] if args.workers else [])])
        if args.model:
            sets.setdefault("model", []).append(_network(args.model))
        if (cells := grid.count_with(sets)) > MANY_CELLS and not args.yes:
            raise GridError(f"the grid has {cells:,} cells; --yes runs more than {MANY_CELLS:,}")
        control = {key: values[0] for key, values in parse_sets(_control_parts(args.control)).items()}
        classes = _classes(args.classes)
    except GridError as error:
        raise UsageError(str(error)) from None
    steps = args.steps if args.steps is not None else grid.steps if grid.steps is not None else DEFAULT_STEPS
    _check_together(args, steps)
    quick = args.quick
    if quick and not {"model", "dim", "depth", "heads"} & sets.keys():
        sets["model"] = [QUICK_MODEL]
    if quick and "batch_size" not in sets:
        sets["batch_size"] = [QUICK_BATCH]
    return SweepOptions(
        grid=grid, grid_name=name, sets=sets, control={**grid.control, **control},
        rounds=args.rounds or (1 if quick else grid.rounds or DEFAULT_ROUNDS),
        time_s=args.time_s or (8.0 if quick else 24.0), ci=args.ci, budget_s=_budget(args, grid),
        steps=steps,
        fd_images=args.fd_images, seeds=args.seeds, ema=args.ema, data=args.data, classes=classes, device=args.device,
        cpus_per_worker=args.cpus_per_worker, gpus_per_worker=args.gpus_per_worker,
        cell_timeout_s=args.cell_timeout_s or CELL_TIMEOUT_S,
        memory_limit_gb=args.memory_limit_gb, wait_quiet_s=args.wait_quiet_s,
        keep_larger=args.keep_larger, max_failures=args.max_failures,
        only=tuple(args.only), repeated=repeated, concurrent=args.concurrent,
        on=args.on, placement=args.placement or grid.placement or "one-kind", wait_nodes_s=args.wait_nodes_s,
        address=args.address or _ray_address(args), tracking_uri=args.tracking_uri,
        experiment=args.experiment, out=args.out, name=args.resume or args.name, resume=bool(args.resume),
        ray=args.ray, dry_run=args.dry_run, cluster=args.cluster, report=args.report,
        system_metrics=args.system_metrics, command=command,
        storage=_storage(args, steps), allow_changed=args.allow_changed, given=getattr(args, "given", {}),
    )  # fmt: skip


def _ray_address(args: argparse.Namespace) -> str | None:
    """As all of Ray's programs do; a sweep without Ray joins nothing."""
    return (os.environ.get("RAY_ADDRESS") or None) if args.ray else None


def _storage(args: argparse.Namespace, steps: int) -> str:
    """The URI of ``--storage``. Raises UsageError where it is none, or nothing would be kept there."""
    if not args.storage:
        return ""
    if steps == 0 and not getattr(args, "train_s", None):
        raise UsageError("--storage: nothing is trained with 0 steps; give --steps")
    try:
        return Storage.at(args.storage).uri
    except StorageError as error:
        raise UsageError(f"--storage: {error}") from None


def _network(name: str) -> str:
    """A net of the user's own by its function."""
    if ":" not in name:
        raise GridError(f"--model {name}: name a function, as package.module:function (a size is --set model={name})")
    return name


def _check_together(args: argparse.Namespace, steps: int) -> None:
    """Options that exclude each other. Raises UsageError."""
    if args.name and args.resume:
        raise UsageError("--name and --resume: --resume NAME already names the sweep")
    if args.allow_changed and not args.resume:
        raise UsageError("--allow-changed: only with --resume NAME")
    if args.repeat and args.grid:
        raise UsageError("--repeat and --grid: the record's cell is the grid")
    if args.ema and steps == 0:
        raise UsageError(f"--ema {args.ema:g}: nothing is trained with 0 steps; give --steps")
    if args.seeds and steps == 0:
        raise UsageError(f"--seeds {args.seeds}: nothing is trained with 0 steps; give --steps")
    if args.cluster and not args.dry_run:
        raise UsageError(f"--cluster {args.cluster}: only with --dry-run; a sweep joins a running one by --address")
    if args.concurrent not in (None, 1) and not args.ray:
        raise UsageError(f"--concurrent {args.concurrent} and --no-ray: without Ray cells run one after another")
    if args.max_failures and not args.ray:
        raise UsageError("--max-failures and --no-ray: without Ray a trial is not started again; --resume runs it anew")
    if args.wait_nodes_s and not args.address:
        raise UsageError("--wait-nodes: only with --address; this machine alone gets no more nodes")


def _budget(args: argparse.Namespace, grid: Grid) -> float:
    """A grid file's budget holds for the grid as it is written: with other cells or times it is another sweep.
    With --quick such a grid is to end in 4 minutes on two cores, however slow these are today."""
    as_written = not (args.sets or args.rounds or args.time_s or args.ci or args.seeds)
    usual = (grid.budget_s or 0.0) if as_written else 0.0
    return args.budget_s or (min(usual, QUICK_BUDGET_S) if args.quick else usual)


def _grid_of(args: argparse.Namespace, default_grid: str) -> tuple[Grid, str]:
    if args.grid is None and args.sets:
        return Grid(), "set"
    if args.grid is None and args.model:  # the switches that every net has
        return Grid(axes={"precision": ["fp32", "bf16"], "compile": ["off", "default"]}), "model"
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
