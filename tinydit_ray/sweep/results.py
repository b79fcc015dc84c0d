"""``results.parquet``: the records with the numbers pooled over rounds, one row per cell and round."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tinydit_ray.bench.stats import Estimate, pooled_ms
from tinydit_ray.bench.verdict import Floor, pooled_speedups, verdict
from tinydit_ray.record import COLUMNS, POOLED, Record, last_attempts

_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64()}
RESULT_COLUMNS = COLUMNS | POOLED
SCHEMA = pa.schema([(name, _ARROW[kind]) for name, kind in RESULT_COLUMNS.items()])


def result_rows(records: Sequence[Record], floor: Floor | None = None) -> list[dict[str, Any]]:
    """The last attempt of each round, each row with its cell's pooled numbers and verdict."""
    rows = last_attempts(records)
    pooled = pool(rows, floor)
    empty = dict.fromkeys(POOLED)
    return [{name: row.get(name) for name in COLUMNS} | pooled.get(row["cell_id"], empty) for row in rows]


def pool(rows: Sequence[Record], floor: Floor | None = None) -> dict[str, dict[str, Any]]:
    """cell_id -> pooled columns, from the rounds that are ok. Node kinds are never pooled together: the kind
    is part of the cell's id."""
    ok: dict[str, list[Record]] = {}
    for row in rows:
        if row["status"] == "ok" and row["speedup_vs_control"]:
            ok.setdefault(row["cell_id"], []).append(row)
    estimates = {cell_id: [_estimate(row) for row in rounds] for cell_id, rounds in ok.items()}
    result: dict[str, dict[str, Any]] = {}
    for cell_id, found in pooled_speedups(estimates, floor).items():
        result[cell_id] = {
            "ms_per_step_pooled": pooled_ms([row["ms_per_step"] for row in ok[cell_id]]),
            "speedup_pooled": found.value,
            "speedup_pooled_ci_low": _known(found.ci_low),
            "speedup_pooled_ci_high": _known(found.ci_high),
            "verdict": verdict(found, floor),
            "quality_verdict": None,
        }
    return result


def _estimate(row: Record) -> Estimate:
    return Estimate.from_columns(
        row["speedup_vs_control"], row["speedup_ci_low"], row["speedup_ci_high"], row["timed_steps"]
    )


def _known(value: float) -> float | None:
    return None if value != value else value


def write_results(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(table, temporary)
    os.replace(temporary, path)
