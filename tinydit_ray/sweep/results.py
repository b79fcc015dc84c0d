"""``results.parquet``: the records with the numbers pooled over rounds, one row per cell and round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tinydit_ray.atomic import replacing
from tinydit_ray.bench.stats import Estimate, pooled_ms
from tinydit_ray.bench.verdict import Floor, pooled_speedups, verdict
from tinydit_ray.record import COLUMNS, POOLED, Record, last_attempts, undisturbed
from tinydit_ray.sweep.floor import load_floor
from tinydit_ray.sweep.kinds import by_kind
from tinydit_ray.sweep.seeds import quality_verdicts
from tinydit_ray.sweep.workers import scaling

_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64()}
RESULT_COLUMNS = COLUMNS | POOLED
SCHEMA = pa.schema([(name, _ARROW[kind]) for name, kind in RESULT_COLUMNS.items()])


def result_rows(records: Sequence[Record], floor: Floor | None = None) -> list[dict[str, Any]]:
    """The last attempt of each round, each row with its cell's pooled numbers and verdicts."""
    rows = last_attempts(records)
    pooled, quality = pool(rows, floor), quality_verdicts(rows)
    empty = dict.fromkeys(POOLED)
    whole = [
        {name: row.get(name) for name in COLUMNS}
        | pooled.get(row["cell_id"], empty)
        | {"quality_verdict": quality[row["cell_id"]].verdict if row["cell_id"] in quality else None}
        for row in rows
    ]
    found = scaling(whole)
    for row in whole:
        if row["cell_id"] in found:
            row["scaling_efficiency"], row["scaling_baseline"] = found[row["cell_id"]]
    return whole


def rows_of_kinds(records: Sequence[Record]) -> list[dict[str, Any]]:
    """``result_rows`` of each kind of node apart, with the noise floor of that kind: kinds are never compared, and one
    machine's noise is not another's."""
    groups = by_kind(last_attempts(records)).items()
    return [row for kind, group in groups for row in result_rows(group, load_floor(kind)[0])]


def pool(rows: Sequence[Record], floor: Floor | None = None) -> dict[str, dict[str, Any]]:
    """cell_id -> pooled columns, from the rounds that are ok. Node kinds are never pooled together: the kind
    is part of the cell's id."""
    ok: dict[str, list[Record]] = {}
    for row in rows:
        if row["status"] == "ok" and row["speedup_vs_control"]:
            ok.setdefault(row["cell_id"], []).append(row)
    ok = {cell_id: undisturbed(rounds) for cell_id, rounds in ok.items()}
    estimates = {cell_id: [Estimate.from_row(row) for row in rounds] for cell_id, rounds in ok.items()}
    result: dict[str, dict[str, Any]] = {}
    for cell_id, found in pooled_speedups(estimates, floor).items():
        result[cell_id] = {
            "ms_per_step_pooled": _pooled_ms([row["ms_per_step"] for row in ok[cell_id]]),
            "speedup_pooled": found.value,
            "speedup_pooled_ci_low": _known(found.ci_low),
            "speedup_pooled_ci_high": _known(found.ci_high),
            "verdict": verdict(found, floor),
        }
    return _alone(rows) | result


def _alone(rows: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Cells that no control was timed with (quality grids): their pace, without a speed-up and a verdict."""
    paces: dict[str, list[float]] = {}
    for row in rows:
        if row["status"] == "ok" and row["ms_per_step"] and not row["speedup_vs_control"]:
            paces.setdefault(row["cell_id"], []).append(row["ms_per_step"])
    return {key: {**dict.fromkeys(POOLED), "ms_per_step_pooled": _pooled_ms(found)} for key, found in paces.items()}


def _pooled_ms(times: Sequence[float | None]) -> float | None:
    """None for cells that time their sampler: they have no step."""
    known = [ms for ms in times if ms is not None]
    return pooled_ms(known) if known else None


def _known(value: float) -> float | None:
    return None if value != value else value


def write_results(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)
    with replacing(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)
