"""Sweeps as rows and as one frame, equal whether they come from sweep folders or from MLflow.

    from analysis.load import load, frame_of
    df = frame_of(load(["runs/published-20261202-091910"]))         # a folder, or a folder of sweeps
    df = frame_of(load(["tinydit"], uri="sqlite:///mlflow.db"))     # an experiment, a sweep's run, or its name

One row per cell and round (its last attempt), with the columns of ``tinydit_ray.record`` and their types. What was
not measured is None in a row and missing in the frame; NaN and infinity are no measurements either. A setting is
never missing (it has the word "off"), so grouping by settings loses no row; other columns need ``dropna=False``.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tinydit_ray.record import last_attempts, read_records
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.results import RESULT_COLUMNS, SCHEMA, rows_of_kinds
from tinydit_ray.tracking.files import files_of

Row = dict[str, Any]
_DTYPES = {pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype()}
_KEY = ("cell_id", "repeat", "round", "attempt")


@dataclass(frozen=True)
class Curve:
    """A loss curve; ``seconds`` of training at each step, None where only the steps are known."""

    steps: list[int]
    losses: list[float]
    seconds: list[float] | None


class RoundFiles(Protocol):
    """What a round left besides its row; fetched only when asked for."""

    def curve(self, row: Mapping[str, Any]) -> Curve | None: ...

    def samples(self, row: Mapping[str, Any]) -> bytes | None: ...


@dataclass(frozen=True)
class SweepData:
    """One sweep: the content of its ``sweep.json``, and its rows in the order of the grid."""

    content: dict[str, Any]
    rows: list[Row]
    origin: str  # path of the folder, or the run in MLflow
    files: RoundFiles = field(repr=False)
    folder: Path | None = None
    tags: Mapping[str, str] = field(default_factory=dict, repr=False)  # of its run, where it comes from MLflow
    run_status: str = ""  # of that run: RUNNING, FINISHED, FAILED or KILLED

    @property
    def name(self) -> str:
        return str(self.content.get("name") or self.origin)

    @property
    def sweep_id(self) -> str:
        return str(self.content.get("sweep_id") or "")


def load(targets: Iterable[str | Path], uri: str | None = None) -> list[SweepData]:
    """Every sweep that is named, oldest first, each once. Raises UsageError.

    A target is a sweep folder or a folder of sweep folders; else it is looked up in the MLflow store at ``uri`` (by
    default ``$MLFLOW_TRACKING_URI``, else mlflow.db here): a run id, an experiment, or the name of a sweep.
    """
    found: dict[str, SweepData] = {}
    for target in targets:
        path = Path(target).expanduser()
        if path.is_dir():
            sweeps = [from_folder(folder) for folder in sweep_folders(path)]
        else:
            from analysis.store import from_store

            sweeps = from_store(str(target), uri)
        for sweep in sweeps:
            found.setdefault(sweep.sweep_id or sweep.origin, sweep)
    return sorted(found.values(), key=lambda sweep: str(sweep.content.get("created_at") or ""))


def frame_of(sweeps: Iterable[SweepData]) -> pd.DataFrame:
    """One frame of all rows: int columns are Int64, words are string, numbers float64 (NaN: not measured)."""
    rows = [row for sweep in sweeps for row in sweep.rows]
    return table_of(rows).to_pandas(types_mapper=_DTYPES.get)


def table_of(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def sweep_folders(path: Path) -> list[Path]:
    """The folder itself where it is a sweep's, else those directly inside that are. Raises UsageError."""
    if (path / "sweep.json").exists():
        return [path]
    inside = sorted(child.parent for child in path.glob("*/sweep.json"))
    if not inside:
        raise UsageError(f"{path}: no sweep folder, and none inside (a sweep folder has a sweep.json)")
    return inside


def from_folder(path: Path) -> SweepData:
    """A sweep folder. Its rows are those of ``results.parquet`` where that is complete, else they are made from the
    records, as for a sweep that still runs."""
    content = read_content(path)
    records = read_records(path / "records.jsonl")
    rows = _results(path / "results.parquet")
    if records and _keys(rows) != _keys(last_attempts(records)):
        rows = rows_of_kinds([typed(record) for record in records])
    rows = in_grid_order([typed(row) for row in rows], content)
    return SweepData(content, rows, str(path), FolderFiles(path), path)


def read_content(path: Path) -> dict[str, Any]:
    """``sweep.json`` of a folder. Raises UsageError."""
    try:
        content = json.loads((path / "sweep.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path / 'sweep.json'}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path / 'sweep.json'}: holds no map")
    return content


def _results(path: Path) -> list[Row]:
    try:
        table = pq.read_table(path, page_checksum_verification=True) if path.exists() else pa.table({})
        known = set(table.column_names) <= RESULT_COLUMNS.keys()  # no checksum is over the names
        return table.to_pylist() if known else []
    except (OSError, pa.ArrowException, ValueError):
        return []  # the records are the truth


def _keys(rows: Iterable[Mapping[str, Any]]) -> set[tuple[Any, ...]]:
    return {tuple(row.get(name) or 0 for name in _KEY) for row in rows}


def in_grid_order(rows: Iterable[Row], content: Mapping[str, Any]) -> list[Row]:
    """Cells in the order of the grid, those that it no longer has behind them, rounds in order."""
    cells = (content.get("grid") or {}).get("cells") or []
    order = {cell.get("cell_id"): i for i, cell in reversed(list(enumerate(cells)))}

    def place(row: Row) -> tuple[Any, ...]:
        where = order.get(row["cell_id"], len(order))
        return where, row["cell_name"] or "", row["cell_id"] or "", row["repeat"] or 0, row["round"] or 0

    return sorted(rows, key=place)


def typed(row: Mapping[str, Any]) -> Row:
    """The row with every column of the record, each of its own type. Raises UsageError for a value that has no such
    type."""
    return {name: _typed(name, kind, row.get(name)) for name, kind in RESULT_COLUMNS.items()}


def _typed(name: str, kind: type, value: Any) -> Any:
    if value is None or (kind is not str and value == ""):
        return None
    try:
        if kind is str:
            return str(value)
        number = float(value)
        if not math.isfinite(number) or abs(number) > 1e308:  # MLflow stores infinity as the largest float
            return None
        return int(value if isinstance(value, int) else number) if kind is int else number
    except (TypeError, ValueError):
        raise UsageError(f"column {name}: {value!r} is no {kind.__name__}") from None


class FolderFiles:
    """Files of the rounds of a sweep folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def curve(self, row: Mapping[str, Any]) -> Curve | None:
        path = files_of(self._folder, dict(row)).get("loss.csv")
        return read_curve(path.read_text("utf-8", errors="replace")) if path else None

    def samples(self, row: Mapping[str, Any]) -> bytes | None:
        path = files_of(self._folder, dict(row)).get("samples.png")
        return path.read_bytes() if path else None


def read_curve(text: str) -> Curve | None:
    """The curve of a ``loss.csv`` (columns step, loss, and seconds where recorded); non-finite losses are left out."""
    points = []
    for line in csv.DictReader(io.StringIO(text)):
        try:
            step, loss, second = int(line["step"]), float(line["loss"]), float(line.get("seconds") or "nan")
        except (KeyError, TypeError, ValueError):
            continue
        if math.isfinite(loss):
            points.append((step, loss, second))
    if not points:
        return None
    steps, losses, seconds = (list(column) for column in zip(*points, strict=True))
    return Curve(steps, losses, None if any(math.isnan(second) for second in seconds) else seconds)
