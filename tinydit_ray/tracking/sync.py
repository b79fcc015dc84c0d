"""Sending what MLflow missed of a sweep: records while a server was away, runs a killed driver left open."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinydit_ray.record import read_records
from tinydit_ray.tracking.files import summary_files
from tinydit_ray.tracking.runs import is_ended
from tinydit_ray.tracking.split import record_key
from tinydit_ray.tracking.store import translated
from tinydit_ray.tracking.tracker import Tracker
from tinydit_ray.tracking.uri import TrackingError

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_EXPERIMENT = "tinydit"


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What a sync found and did."""

    uri: str
    records: int
    sent: int
    missing: int
    status: str  # of the sweep's own run
    warnings: list[str]


def sync(sweep_dir: Path, uri: str | None = None) -> Synced:
    """Send the records of a sweep folder that MLflow does not have. Running it twice changes nothing.

    ``uri`` None means the store named in ``sweep.json``. Raises TrackingError.
    """
    sweep = read_sweep(sweep_dir)
    tracking = sweep.get("tracking") or {}
    tracker = Tracker.attach(
        uri=uri or tracking.get("uri"),
        experiment=tracking.get("experiment") or DEFAULT_EXPERIMENT,
        sweep=sweep,
        sweep_dir=sweep_dir,
    )
    try:
        records = read_records(sweep_dir / "records.jsonl")
        sent = tracker.send_missing(records)
        with translated(tracker.uri):
            status, end_ms = _end_of(tracker, sweep_dir)
        files, pooled = summary_files(sweep_dir), _pooled(sweep_dir)
        tracker.finish(status=status, summary=files, pooled=pooled, end_ms=end_ms)
    finally:
        tracker.close()
    keys = {record_key(record) for record in records}
    return Synced(
        uri=tracker.uri,
        records=len(keys),
        sent=sent,
        missing=tracker.unsent,
        status=status,
        warnings=tracker.warnings,
    )


def read_sweep(sweep_dir: Path) -> dict[str, Any]:
    """The content of ``sweep.json``; TrackingError where the folder is no sweep's."""
    path = sweep_dir / "sweep.json"
    try:
        sweep = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise TrackingError(f"{sweep_dir}: no sweep folder (it has no sweep.json)") from error
    except (OSError, ValueError) as error:
        raise TrackingError(f"{path}: cannot be read ({error})") from error
    if not isinstance(sweep, dict) or not sweep.get("sweep_id") or not sweep.get("name"):
        raise TrackingError(f"{path}: holds no sweep_id and name")
    return sweep


def _end_of(tracker: Tracker, sweep_dir: Path) -> tuple[str, int]:
    """State and end of the sweep's run: as it ended in MLflow; else, by its folder, it came to its end
    (``results.parquet`` is younger than the last record) or was killed."""
    run = tracker.run()
    if is_ended(run):
        return run.info.status, run.info.end_time
    records, results = (_written_ms(sweep_dir / name) for name in ("records.jsonl", "results.parquet"))
    if results and results >= records:
        return "FINISHED", results
    return "KILLED", records or int(time.time() * 1000)


def _written_ms(path: Path) -> int:
    return int(path.stat().st_mtime * 1000) if path.exists() else 0


def _pooled(sweep_dir: Path) -> pd.DataFrame | None:
    path = sweep_dir / "results.parquet"
    if not path.exists():
        return None
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise TrackingError(f"{path}: cannot be read ({error})") from error
