"""From the rows of a sweep to its cells: one line each, in groups whose numbers may be compared."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.load import Row, SweepData
from tinydit_ray.bench.stats import Estimate
from tinydit_ray.bench.verdict import Pooled, pooled_speedups
from tinydit_ray.config import AXES, SIZE_AXES
from tinydit_ray.record import flags_of, undisturbed
from tinydit_ray.sweep.floor import load_floor
from tinydit_ray.sweep.seeds import is_seed_row

Cell = dict[str, Any]
# key of a cell -> column of the first of its ok rounds that has it
_FIRST = {
    "ms": "ms_per_step_pooled", "speedup": "speedup_pooled", "low": "speedup_pooled_ci_low",
    "high": "speedup_pooled_ci_high", "verdict": "verdict", "quality": "quality_verdict",
    "first_step": "first_step_s", "compile": "compile_s", "mse": "velocity_mse",
    "mse_ema": "velocity_mse_ema", "fd": "probe_fd", "fd_n": "probe_fd_n", "probe": "probe_id",
    "loss": "train_loss_last", "steps": "steps_trained", "wall": "train_wall_s", "peak": "peak_tflops",
    "peak_source": "peak_source", "gflops": "model_gflops_per_step", "gbytes": "model_gbytes_per_step",
    "bandwidth": "memory_gbytes_per_s",
}  # fmt: skip
_MEDIAN = {"tflops": "tflops_per_s", "mfu": "mfu", "sampling": "sample_ms_per_image",
           "sampling_control": "control_sample_ms_per_image", "images": "images_per_s"}
_MOST = {"device_mb": "peak_device_mb", "rss_mb": "peak_rss_mb"}


def groups_of(sweep: SweepData) -> list[dict[str, Any]]:
    """Rows that may be compared: of one sweep, one node kind, one data digest."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in sweep.rows:
        key = (row["node_kind"] or "", row["data_source"] or "", row["data_digest"] or "")
        found.setdefault(key, []).append(row)
    groups = [{"sweep": sweep, "key": key, "rows": rows, "missing": []} for key, rows in found.items()]
    groups = groups or [{"sweep": sweep, "key": ("", "", ""), "rows": [], "missing": []}]
    names = {row["cell_name"] for row in sweep.rows}
    cells = (sweep.content.get("grid") or {}).get("cells") or []
    groups[0]["missing"] = [str(cell.get("name")) for cell in cells if cell.get("name") not in names]
    return groups


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """The cells, numbered in the order of their rows. The control's other seeds say how far scores spread; they are
    no setups."""
    by_cell: dict[str, list[Row]] = {}
    for row in rows:
        if not is_seed_row(row):
            by_cell.setdefault(row["cell_id"] or row["cell_name"] or "", []).append(row)
    kind = next((str(row["node_kind"]) for row in rows if row["node_kind"]), "")
    pooled = pool(by_cell, kind)
    return [cell_of(place, found, pooled.get(key)) for place, (key, found) in enumerate(by_cell.items(), start=1)]


def pool(by_cell: Mapping[str, Sequence[Row]], node_kind: str) -> dict[str, Pooled]:
    """The pooled speed-up of each cell with its standard error, as the sweep itself pooled it."""
    floor, _ = load_floor(node_kind)
    estimates = {
        key: [Estimate.from_row(row) for row in undisturbed(rows) if row["speedup_vs_control"]]
        for key, rows in by_cell.items()
    }
    return pooled_speedups(estimates, floor)


def cell_of(place: int, rows: Sequence[Row], pooled: Pooled | None = None) -> Cell:
    """One line of the table: pooled numbers, and what its first round that measured it says of cost and quality."""
    good = [row for row in rows if row["status"] == "ok"]

    def known(name: str) -> list[Any]:
        return [row[name] for row in good if row[name] is not None]

    states = list(dict.fromkeys(str(row["status"]) for row in rows))
    flags = sorted({flag for row in good for flag in flags_of(row)})
    timed = sum(known("timed_steps"))
    found: Cell = {
        "number": place, "name": rows[0]["cell_name"] or rows[0]["cell_id"] or "?", "rounds": len(good),
        "status": ", ".join(states) + (f" ({', '.join(flags)})" if flags else ""), "rows": rows, "pooled": pooled,
        "timed": timed, "count": f"{len(good)} × {timed // max(1, len(good))} steps" if timed else "–",
        "setup": setup_of(rows[0]),
        **{key: next(iter(known(name)), None) for key, name in _FIRST.items()},
        **{key: statistics.median(values) if (values := known(name)) else None for key, name in _MEDIAN.items()},
        **{key: max((value for value in known(name) if value), default=None) for key, name in _MOST.items()},
    }  # fmt: skip
    return found | {"break_even": break_even_steps(found, found["speedup"])}


def break_even_steps(cell: Cell, speedup: float | None) -> float | None:
    """Steps of the setup after which its compile time is won back at this speed-up over its control; None where that is
    not above 1, and where nothing is compiled. From the pooled numbers: one round of a loaded machine misleads."""
    if cell["setup"].get("compile") == "off" or not cell["compile"] or not cell["ms"]:
        return None
    return float(1e3 * cell["compile"] / (cell["ms"] * (speedup - 1))) if speedup is not None and speedup > 1 else None


def setup_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Axis values, the size as one axis; what an older row lacks was at its default."""
    names = [name for name in AXES if name not in SIZE_AXES]
    values = {name: row.get(f"config.{name}") for name in names}
    found = {name: AXES[name].default if value is None else value for name, value in values.items()}
    return {"model": row.get("config.model"), **found}
