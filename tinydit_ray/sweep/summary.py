"""One row per cell, from its rounds: what tables show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tinydit_ray.record import flags_of
from tinydit_ray.sweep.seeds import is_seed_row


def summary_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell: pooled numbers, the first round's training and scores, the worst status. The control's other
    seeds are no cells of the grid; one that went wrong is shown all the same."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not is_seed_row(row) or row["status"] != "ok":
            cells.setdefault(row["cell_id"], []).append(row)
    return [_cell_summary(rounds) for rounds in cells.values()]


def _cell_summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    ok = [row for row in rounds if row["status"] == "ok"]
    bad = sorted((row for row in rounds if row["status"] != "ok"), key=lambda row: row["status"] == "skipped")
    if ok and all(row["status"] == "skipped" for row in bad):  # fewer rounds than asked, by a budget: a wider interval
        bad = []
    notes = [row["reason"] for row in ok if row["reason"]]
    scored = next((row for row in rounds if row["velocity_mse"] is not None), rounds[0])
    spreads = [row["ms_per_step_iqr"] for row in rounds if row["ms_per_step_iqr"] is not None]
    cold = [row["first_step_s"] for row in rounds if row["first_step_s"] is not None]
    sampling = [row["sample_ms_per_image"] for row in rounds if row["sample_ms_per_image"] is not None]
    return {
        **rounds[0],
        "status": bad[0]["status"] if bad else "ok",
        "reason": bad[0]["reason"] if bad else next(iter(notes), None),
        "rounds": len(rounds),
        "rounds_ok": len(ok),
        "ms_per_step_iqr": statistics.median(spreads) if spreads else None,
        "first_step_s": cold[0] if cold else None,
        "train_loss_last": scored["train_loss_last"],
        "velocity_mse": scored["velocity_mse"],
        "sample_velocity_mse": scored["sample_velocity_mse"],
        "sample_ms_per_image": statistics.median(sampling) if sampling else None,
        "probe_fd": scored["probe_fd"],
        "velocity_mse_ema": scored["velocity_mse_ema"],
        "probe_fd_ema": scored["probe_fd_ema"],
        "flags": ",".join(sorted({flag for row in rounds for flag in flags_of(row)})),
    }


