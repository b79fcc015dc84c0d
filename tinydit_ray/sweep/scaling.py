"""The scaling grid: each setup with 1, 2, 4 … workers, sharing one batch (strong) and with a batch each (weak)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from tinydit_ray.bench.machine import granted_cpus
from tinydit_ray.bench.stats import Estimate, t_quantile
from tinydit_ray.bench.verdict import Pooled, pooled_speedups
from tinydit_ray.config import CellConfig
from tinydit_ray.record import last_attempts, undisturbed
from tinydit_ray.sweep.driver import Sweep
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions, options_from
from tinydit_ray.sweep.table import Column, number, print_columns, print_table
from tinydit_ray.sweep.workers import baselines

KINDS = ("strong", "weak")
QUICK_ROUNDS = 2  # one round alone says nothing of how the machine changes between two cells
IQR_SDS = 1.349  # interquartile range of a normal distribution, in standard deviations
MEDIAN_SE = 1.2533  # standard error of a median over that of a mean, normal distribution
# sd between processes of times that no control is paired with, before the rounds have told: a machine's step times
# move by a few per cent from minute to minute, by 20 % on a bad day
UNPAIRED_SD = 0.05
Row = Mapping[str, Any]


def scaling_options(args: argparse.Namespace, command: list[str]) -> SweepOptions:
    """Checked options of a scaling grid. Raises UsageError."""
    if args.steps is None:
        args.steps = 0  # nothing is trained: the timing is in question
    if args.quick and args.rounds is None:
        args.rounds = QUICK_ROUNDS
    options = options_from(args, default_grid="scaling", command=command)
    if "workers" not in options.sets:
        options.sets["workers"] = _workers_that_fit(options)
    options.sets["workers"] = sorted({1, *options.sets["workers"]})
    if options.sets["workers"] == [1]:
        raise UsageError("scaling: one worker alone has nothing to be compared with; give --workers 1,2")
    options.spread = Spread(args.scaling)
    return options


def _workers_that_fit(options: SweepOptions) -> list[int]:
    """1, 2, 4 … as many as this machine has CPUs for, or GPUs."""
    if options.address:
        raise UsageError("--address: say how many workers the cluster has room for, such as --workers 1,2,4")
    if options.device == "cuda":
        import torch

        fit = torch.cuda.device_count() // max(1, options.gpus_per_worker or 1)
    else:
        fit = granted_cpus() // (options.cpus_per_worker or 1)
    if fit < 2:
        raise UsageError(f"scaling: only {fit} worker fits on this machine (CPUs, or GPUs with --device cuda)")
    return [2**n for n in range(fit.bit_length())]


@dataclass(frozen=True)
class Spread:
    """A cell of the grid, whose batch all its workers share, as the cells that are timed."""

    kinds: str  # one of KINDS, or "both"

    def __call__(self, config: CellConfig) -> list[CellConfig]:
        workers = config.workers
        if workers == 1 or self.kinds == "strong":
            return [config]
        weak = config.replace(batch_size=config.batch_size * workers)
        return [weak] if self.kinds == "weak" else [config, weak]


class ScalingSweep(Sweep):
    """Below the usual table it prints how well the workers scale."""

    def print_table(self, console: Console, rows: Sequence[dict[str, Any]]) -> None:  # type: ignore[override]
        print_table(console, rows)
        print_scaling(console, rows)


# --- the table --------------------------------------------------------------------------------------------


def print_scaling(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One row per worker count and kind of scaling, below its baseline."""
    pairs = baselines(rows)
    if not pairs:
        console.print("no scaling can be told: no cell of several workers and its baseline are both ok")
        return
    found = efficiencies(rows)
    shown: list[tuple[Row, str, Pooled | None]] = []
    for kind in KINDS:
        for cell, base in sorted(_pairs_of(pairs, kind), key=lambda pair: (_name(pair[1]), pair[0]["config.workers"])):
            if (base, kind, None) not in shown:
                shown.append((base, kind, None))
            shown.append((cell, kind, found[cell["cell_id"], kind]))
    title = "scaling: images/s over those of as many workers, each as fast as one alone"
    print_columns(console, title, _columns(shown))
    console.print(_footnote(rows), highlight=False, soft_wrap=True)


def _pairs_of(pairs: Sequence[tuple[Row, Row, str]], kind: str) -> list[tuple[Row, Row]]:
    return [(cell, base) for cell, base, of_kind in pairs if of_kind == kind]


def _name(row: Row) -> str:
    return str(row["cell_name"])


def _columns(shown: Sequence[tuple[Row, str, Pooled | None]]) -> list[Column]:
    rows = [row for row, _, _ in shown]
    times = [row["ms_per_step_pooled"] for row in rows]
    batches = [row["config.batch_size"] for row in rows]
    return [
        Column("setup", [Text(_name(row)) for row in rows], right=False, wraps=True),
        Column("scaling", [Text(kind) for _, kind, _ in shown], right=False),
        Column("workers", [Text(str(row["config.workers"])) for row in rows]),
        Column("batch", [Text(str(batch)) for batch in batches], rank=1),
        Column("ms/step, slowest rank", [number(ms, ".1f") for ms in times], rank=2),
        Column("images/s", [number(1e3 * batch / ms, ".0f") for batch, ms in zip(batches, times, strict=True)]),
        Column("efficiency", [number(1.0 if found is None else found.value, ".3f") for _, _, found in shown]),
        Column("95 % interval", [Text(_interval(found)) for _, _, found in shown]),
    ]


def _interval(found: Pooled | None) -> str:
    if found is None:
        return "baseline"
    return "–" if math.isnan(found.ci_low) else f"{found.ci_low:.3f} – {found.ci_high:.3f}"


def _footnote(rows: Sequence[Row]) -> str:
    cpus, gpus = rows[0]["config.cpus_per_worker"], rows[0]["config.gpus_per_worker"]
    size = f"{cpus} CPU{'s' * (cpus > 1)}" + (f" and {gpus} GPU{'s' * (gpus > 1)}" if gpus else "")
    once = "; one round has no interval: give --rounds" if max(row["round"] or 1 for row in rows) < 2 else ""
    return (
        f"every worker has {size}; strong: the workers share one batch, weak: each has the baseline's batch;"
        f" rounds are compared with the baseline's of the same number{once}"
    )


def efficiencies(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Pooled]:
    """(cell_id, kind) -> pooled efficiency over rounds, as ``bench/verdict.py`` pools speed-ups.

    The n-th round of a cell is compared with the n-th round of its baseline, which ran near it in time. The cells
    run in processes of their own, not in alternation, so drift of the machine between them is noise here; it shows
    in the spread over rounds. With a single round nothing shows it and the interval is (nan, nan).
    """
    rounds = _rounds_by_cell(rows)
    logs: dict[tuple[str, str], list[Estimate]] = {}
    for cell, base, kind in baselines(rows):
        mine, others = rounds[cell["cell_id"]], rounds[base["cell_id"]]
        pairs = [(mine[n], others[n]) for n in sorted(mine.keys() & others.keys())]
        logs[cell["cell_id"], kind] = [_efficiency(*pair) for pair in pairs]
    keys = {f"{cell_id} {kind}": (cell_id, kind) for cell_id, kind in logs}
    pooled = pooled_speedups({name: logs[key] for name, key in keys.items()}, UNPAIRED_SD)
    return {key: _withheld(pooled[name]) if name in pooled else _unknown(rows, key) for name, key in keys.items()}


def _withheld(found: Pooled) -> Pooled:
    if found.rounds > 1:
        return found
    return Pooled(
        value=found.value, ci_low=math.nan, ci_high=math.nan, se_log=math.nan, df=0.0, rounds=found.rounds
    )


def _unknown(rows: Sequence[Row], key: tuple[str, str]) -> Pooled:
    """No round of both has the same number: the pooled times alone."""
    cell, base, _ = next(pair for pair in baselines(rows) if (pair[0]["cell_id"], pair[2]) == key)
    value = _images_per_ms(cell, "ms_per_step_pooled") / _images_per_ms(base, "ms_per_step_pooled")
    value /= cell["config.workers"]
    return Pooled(value=value, ci_low=math.nan, ci_high=math.nan, se_log=math.nan, df=0.0, rounds=0)


def _rounds_by_cell(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, Row]]:
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in last_attempts(rows):
        if row["ms_per_step"]:
            cells.setdefault(row["cell_id"], []).append(row)
    return {key: {row["round"]: row for row in undisturbed(found)} for key, found in cells.items()}


def _efficiency(cell: Row, base: Row) -> Estimate:
    """Of one round, with the interval that the spread of the steps within both processes gives."""
    value = _images_per_ms(cell, "ms_per_step") / _images_per_ms(base, "ms_per_step") / cell["config.workers"]
    steps = max(2, min(cell["timed_steps"], base["timed_steps"]))
    half = t_quantile(steps - 1) * math.hypot(_se_log(cell), _se_log(base))
    return Estimate(value, value * math.exp(-half), value * math.exp(half), steps)


def _images_per_ms(row: Row, column: str) -> float:
    return float(row["config.batch_size"] / row[column])


def _se_log(row: Row) -> float:
    """Standard error of the log of a median step time, from its interquartile range."""
    spread = (row["ms_per_step_iqr"] or 0.0) / row["ms_per_step"]
    return MEDIAN_SE * spread / IQR_SDS / math.sqrt(max(1, row["timed_steps"]))
