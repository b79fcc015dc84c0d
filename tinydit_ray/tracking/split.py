"""What of a record becomes a param, a metric or a tag of its MLflow run. Needs no MLflow.

Params are the settings asked for (``config.*``) and nothing else; metrics are the measured numbers; facts of
the run (what really ran, where, on which data, how it ended) are tags.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinydit_ray.record import COLUMNS, COST, MEMORY, POOLED, QUALITY, SPEED, Record
from tinydit_ray.tracking.files import loss_points
from tinydit_ray.tracking.uri import mask_text

PARENT_TAG = "mlflow.parentRunId"
KEY_TAG = "record_key"
LOSS_METRIC = "train_loss"
FIRST_METRICS = ("ms_per_step", "velocity_mse", "probe_fd")
_MEASURED = SPEED | MEMORY | QUALITY | COST
_FINISHED = ("ok", "unsupported", "skipped")  # the round came to the end it was meant to come to
_PHASES = ("import_s", "data_s", "build_s", "first_step_s", "window_s", "train_wall_s", "orchestration_s")

# Older servers take no longer values.
_PARAM_LENGTH, _TAG_LENGTH, _KEY_LENGTH = 500, 5000, 250
_ODD_IN_KEY = re.compile(r"[^\w\-. /]")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run as MLflow is to hold it; times in milliseconds since 1970."""

    name: str
    start_ms: int
    end_ms: int
    status: str  # FINISHED, FAILED or KILLED
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: list[tuple[str, float, int]] = field(default_factory=list)  # key, value, step
    dataset: tuple[str, str] = ("", "")  # source, digest

    @property
    def key(self) -> str:
        return self.tags[KEY_TAG]


def record_key(record: Mapping[str, Any]) -> str:
    """What makes a record unique within its sweep: ``cell_id/repeat/round/attempt``."""
    return "/".join(str(record.get(name) or 0) for name in ("cell_id", "repeat", "round", "attempt"))


def run_status(record: Mapping[str, Any]) -> str:
    if record.get("status") == "killed":
        return "KILLED"
    return "FINISHED" if record.get("status") in _FINISHED else "FAILED"


def run_name(record: Mapping[str, Any]) -> str:
    """The setup first: ``sdpa bf16 · round 1``, and what is out of the ordinary after it."""
    parts = [str(record.get("cell_name") or record.get("cell_id"))]
    if (record.get("repeat") or 0) > 0:
        parts.append(f"repeat {record['repeat']}")
    parts.append(f"round {record.get('round') or 0}")
    if (record.get("attempt") or 0) > 1:
        parts.append(f"attempt {record['attempt']}")
    if record.get("status") != "ok":
        parts.append(str(record.get("status")))
    return mask_text(" · ".join(parts))[:_KEY_LENGTH]


def run_of(record: Record, files: Mapping[str, Path]) -> RunData:
    """The run of one record; ``files`` may hold ``loss.csv``."""
    start = _start_ms(record)
    metrics = [(name, value, 0) for name, value in metrics_of(record)]
    metrics += [(LOSS_METRIC, loss, step) for step, loss in loss_points(files.get("loss.csv"))]
    return RunData(
        name=run_name(record),
        start_ms=start,
        end_ms=_end_ms(record, files, start),
        status=run_status(record),
        params=clean(dict(_columns(record, "config.")), _PARAM_LENGTH),
        tags=clean({**dict(_facts(record)), KEY_TAG: record_key(record)}, _TAG_LENGTH),
        metrics=metrics,
        dataset=(str(record.get("data_source") or ""), str(record.get("data_digest") or "")),
    )


def metrics_of(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The finite measured numbers, those that matter most first. A number that is not there is no metric."""
    names = dict.fromkeys((*FIRST_METRICS, *record))
    return [(name, rounded(record[name])) for name in names if _is_metric(name, record.get(name))]


def rounded(value: float) -> float:
    """Seven significant digits: the UI shows every digit it gets. The record keeps them all."""
    return float(value) if isinstance(value, int) else float(f"{value:.7g}")


def _is_metric(name: str, value: Any) -> bool:
    """Known measured columns, and numbers in columns of a newer schema than this one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    is_known = name in COLUMNS or name in POOLED or name.startswith(("config.", "effective."))
    return _MEASURED.get(name) in (int, float) or not is_known


def _columns(record: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name.startswith(prefix) and value is not None:
            yield name, value


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        is_number = _MEASURED.get(name) in (int, float) or _is_metric(name, value)
        if value is None or is_number or name.startswith("config."):
            continue
        yield name, value
    if record.get("status") != "ok" and record.get("reason"):
        yield "mlflow.note.content", f"**{record['status']}**: {record['reason']}"


def clean(values: Mapping[str, Any], length: int = _TAG_LENGTH) -> dict[str, str]:
    """Keys and values as MLflow takes them: words of bounded length, without passwords."""
    return {clean_key(key): _shorten(mask_text(as_word(value)), length) for key, value in values.items()}


def clean_key(key: str) -> str:
    return _ODD_IN_KEY.sub("_", key)[:_KEY_LENGTH]


def as_word(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and not any(isinstance(item, (dict, list, tuple)) for item in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False, default=str)


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps as one level, keys joined by dots; lists stay whole; what is None is left out."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def time_ms(stamp: Any) -> int | None:
    """Milliseconds since 1970 of an ISO time; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(str(stamp))
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _start_ms(record: Mapping[str, Any]) -> int:
    start = time_ms(record.get("started_at"))
    return start if start is not None and start > 0 else int(time.time() * 1000)


def _end_ms(record: Mapping[str, Any], files: Mapping[str, Path], start: int) -> int:
    """When the round ended: its last file was written then; without files, the sum of its phases."""
    written = [int(path.stat().st_mtime * 1000) for path in files.values() if path.exists()]
    if written and max(written) >= start:
        return max(written)
    return start + int(1000 * sum(record.get(name) or 0.0 for name in _PHASES))
