"""Cells of several workers: what a machine can give them, and how well they scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinydit_ray.bench.machine import granted_cpus
from tinydit_ray.config import CellConfig
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions


def default_cpus(options: SweepOptions) -> int:
    """CPUs of each worker where nobody says: this machine's, shared by the most workers that a cell has, so that
    all cells of a grid have workers of one size."""
    return max(1, granted_cpus() // most_workers(options))


def most_workers(options: SweepOptions) -> int:
    """The largest ``workers`` that the grid or ``--set`` names."""
    if "workers" in options.sets:
        return max(options.sets["workers"])
    grid = options.grid
    named = [grid.base, *grid.cells, *({"workers": n} for n in grid.axes.get("workers", ()))]
    return max((int(values["workers"]) for values in named if "workers" in values), default=1)


def check_workers(options: SweepOptions, configs: Iterable[CellConfig]) -> None:
    """Raises UsageError where this machine has fewer CPUs than a cell's workers hold together (a cluster is asked
    later), and where an option is for cells of several workers and there are none."""
    configs = list(configs)
    if options.max_failures and not any(config.workers > 1 for config in configs):
        raise UsageError(f"--max-failures {options.max_failures}: only for cells of several workers; give --workers 2")
    if options.address or options.cluster:
        return
    for config in configs:
        asked = config.workers * config.cpus_per_worker
        if config.workers > 1 and asked > granted_cpus():
            raise UsageError(
                f"workers {config.workers} of {config.cpus_per_worker} CPUs each: this machine has {granted_cpus()}"
                f" CPUs; possible: workers up to {granted_cpus() // config.cpus_per_worker}"
            )


def scaling(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, str]]:
    """cell_id -> (scaling efficiency, the kind of baseline) of cells of several workers; where the sweep has both
    baselines, the one with the same global batch."""
    found: dict[str, tuple[float, str]] = {}
    for cell, base, kind in baselines(rows):
        efficiency = _images_per_s(cell) / (cell["config.workers"] * _images_per_s(base))
        found.setdefault(cell["cell_id"], (efficiency, kind))
    return found


def baselines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any], str]]:
    """(cell of several workers, the cell of one worker that it is compared with, kind), one row of each cell.

    Efficiency is images per second over those of as many workers that each were as fast as one alone. One alone
    is the cell that is equal but for its workers: with the same global batch (``strong``: the work is shared), and
    with the same batch per worker (``weak``: the work grows).
    """
    cells = {row["cell_id"]: row for row in rows if row.get("ms_per_step_pooled")}
    alone = {_likeness(row): row for row in cells.values() if row["config.workers"] == 1}
    found = []
    for row in cells.values():
        workers, batch = row["config.workers"] or 1, row["config.batch_size"]
        for kind, base_batch in (("strong", batch), ("weak", batch // workers)) if workers > 1 else ():
            base = alone.get(_likeness(row, base_batch))
            if base is not None:
                found.append((row, base, kind))
    return found


def _likeness(row: Mapping[str, Any], batch: int | None = None) -> tuple[Any, ...]:
    """What two cells share that differ in nothing but their workers, and their batch where it is given."""
    own = ("config.workers", "config.batch_size")
    rest = tuple((name, row[name]) for name in sorted(row) if name.startswith("config.") and name not in own)
    batch = row["config.batch_size"] if batch is None else batch
    return (*rest, row["node_kind"], row["data_digest"], row["repeat"], batch)


def _images_per_s(row: Mapping[str, Any]) -> float:
    return 1e3 * row["config.batch_size"] / row["ms_per_step_pooled"]
