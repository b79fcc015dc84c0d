"""The record: one flat row per cell, round and attempt. The sweep folder's ``records.jsonl`` is the truth.

A record is a plain dict with the columns of ``COLUMNS``; a value that was not measured is None.
Rows are appended the moment a round ends, one JSON line each, flushed to the disk.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tinydit_ray.config import AXES

SCHEMA_VERSION = 1
SEAL = "crc32"  # the last key of each line of records.jsonl: a checksum, no column

STATUSES = ("ok", "oom", "timeout", "unsupported", "diverged", "failed", "skipped")
NODE_LOST_FLAG = "node-lost"
RESTARTED_FLAG = "restarted"
DISTURBED = frozenset({"foreign-load", "foreign-gpu"})  # flags
FLAGS = {  # what the flags of a row mean
    "few-steps": "fewer steps were timed than the protocol asks for, so the interval is wide",
    "foreign-load": "other programs took over 10 % of the CPUs while it was timed",
    "foreign-gpu": "another process was on the GPU",
    "throttled": "the GPU held its clock down",
    "concurrent": "timed beside other trials",
    "nice": "timed at a niceness that is not 0",
    "host-sync": "the step waits for the device",
    "ci-reached": "timed until the interval of --ci was reached",
    "ci-not-reached": "the interval of --ci was not reached in its time",
    "not-trained": "too slow to be trained in its share of the time",
    "training-pace": "ms/step is the pace of training, not of a timed window",
    NODE_LOST_FLAG: "its node was lost while it ran; it is run again elsewhere",
    RESTARTED_FLAG: "a worker of it died and it was started again; its training went on from the last checkpoint",
    "stopped-early": "ended by the scheduler",
    "fd-n-below-width": "too few images for a probe-FD that ranks",
}
BAD_STATUSES = ("oom", "timeout", "diverged", "failed")  # a sweep with one of these exits with 3

Record = dict[str, Any]


def _columns(kind: type, names: str, prefix: str = "") -> dict[str, type]:
    return {prefix + name: kind for name in names.split()}


IDENTITY = {
    **_columns(int, "schema_version"),
    **_columns(str, "sweep_id config_id cell_id cell_name"),
    **_columns(int, "repeat round seed attempt"),
    **_columns(str, "status reason started_at product_version git_commit node_id node_ip node_kind"),
    **_columns(str, "data_source data_digest batch_hash"),
}
ASKED = {
    f"config.{name}": (str if "values" in axis.metadata else type(axis.default)) for name, axis in AXES.items()
} | {"config.model": str}
EFFECTIVE = {
    **_columns(str, "attention_op attention_dtype autocast_dtype matmul_dtype weight_dtype", "effective."),
    **_columns(int, "graphs graph_breaks recompiles", "effective."),
    **_columns(str, "compiled_in_window optimizer", "effective."),
    **_columns(int, "threads nice pid", "effective."),
    **_columns(str, "fresh_process device python torch ray cpu_capability", "effective."),
    **_columns(str, "deterministic matmul_precision cuda_graph malloc", "effective."),
    **_columns(int, "host_syncs", "effective."),  # of one step; CUDA only
    **_columns(int, "workers", "effective."),
    **_columns(str, "backend", "effective."),  # of several workers: gloo, nccl
}
SPEED = {
    **_columns(float, "import_s data_s build_s first_step_s compile_s"),
    **_columns(float, "ms_per_step ms_per_step_iqr ms_per_step_p10 ms_per_step_p90"),
    **_columns(int, "timed_steps"),
    **_columns(float, "images_per_s model_gflops_per_step tflops_per_s mfu control_ms_per_step"),
    **_columns(float, "speedup_vs_control speedup_ci_low speedup_ci_high foreign_cpu_pct"),
    **_columns(int, "concurrent_trials"),
    **_columns(str, "compile_cache flags"),
    **_columns(str, "scaling_baseline"),  # strong or weak: what scaling_efficiency is over (sweep/workers.py)
    **_columns(float, "scaling_efficiency sample_ms_per_image break_even_steps"),
    **_columns(int, "skipped_optimizer_steps"),
    **_columns(float, "batch_ms window_s peak_tflops"),
    **_columns(float, "model_gbytes_per_step memory_gbytes_per_s"),  # the roofline's: bench/traffic.py, bench/peak.py
    **_columns(str, "peak_source"),  # of mfu: known (data sheet) or measured (a matmul probe in the trial)
    **_columns(float, "control_sample_ms_per_image page_faults_per_step"),
    **_columns(float, "ray_cpu_s"),  # CPU seconds of Ray's own processes during the window
    **_columns(int, "foreign_gpu_processes"),
    **_columns(str, "gpu_throttle"),  # reasons that held the GPU's clock down, with their share of the window
}
MEMORY = _columns(float, "peak_rss_mb peak_device_mb")
QUALITY = {
    **_columns(float, "velocity_mse velocity_mse_ema probe_fd_ema time_to_quality_s probe_fd"),
    **_columns(int, "probe_fd_n"),
    **_columns(str, "probe_id"),
    **_columns(float, "train_loss_last"),
    **_columns(int, "steps_trained"),
    **_columns(float, "train_wall_s"),
    **_columns(float, "ema_decay"),  # of the averaged weights behind velocity_mse_ema and probe_fd_ema
    **_columns(str, "weights_uri"),  # of the trained weights, where the sweep has a storage
    **_columns(float, "sample_velocity_mse"),  # of the net as it samples; velocity_mse is fp32 and eager
}
COST = _columns(float, "queued_s start_s orchestration_s")
POOLED = {
    **_columns(float, "ms_per_step_pooled speedup_pooled speedup_pooled_ci_low speedup_pooled_ci_high"),
    **_columns(str, "verdict quality_verdict"),
}

ABOVE_ZERO = frozenset(
    _columns(float, "ms_per_step control_ms_per_step sample_ms_per_image control_sample_ms_per_image")
    | _columns(float, "speedup_vs_control speedup_ci_low speedup_ci_high config.batch_size config.workers")
)

# What a round measures itself; results.parquet adds POOLED.
COLUMNS: dict[str, type] = IDENTITY | ASKED | EFFECTIVE | SPEED | MEMORY | QUALITY | COST


def new_record(**values: Any) -> Record:
    """A row with every column, None where nothing is given. Unknown columns are refused."""
    record: Record = dict.fromkeys(COLUMNS)
    record["schema_version"] = SCHEMA_VERSION
    update(record, values)
    return record


def update(record: Record, values: Mapping[str, Any]) -> None:
    """Set columns, each with its own type. A non-finite number has no place in a record and becomes None."""
    for name, value in values.items():
        if name not in COLUMNS:
            raise KeyError(f"no column {name!r} in a record")
        record[name] = _typed(COLUMNS[name], value)


def _typed(kind: type, value: Any) -> Any:
    if value is None:
        return None
    if kind is str:
        return str(value)
    return kind(value) if math.isfinite(value) else None


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one row and flush it to the disk before returning.

    A line ends in its own checksum (``"crc32"``, of the bytes before it), so that a damaged digit is noticed. A line
    torn by a kill is closed first, so that the new row is never glued to it; one that a full disk would tear is
    taken back.
    """
    line = _sealed(json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode())
    with open(path, "ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        try:
            written = file.write(line)
            while written < len(line):  # the disk took a part: the next call says why
                written += file.write(line[written:])
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(end)
            raise OSError(error.errno, error.strerror, str(path)) from None


def _sealed(row: bytes) -> bytes:
    """A line of the file: the JSON object with its checksum as the last key."""
    return row[:-1] + b', "%s": "%08x"}\n' % (SEAL.encode(), zlib.crc32(row))


def read_records(path: Path) -> list[Record]:
    """All whole rows, in order. A torn line (the process died while writing) and a damaged one are left out; older
    rows get the columns they lack as None."""
    return [row for row in map(_row, _lines(path)) if row is not None]


def damaged_lines(path: Path) -> int:
    """How many lines of the file are no rows: torn by a kill, or damaged."""
    return sum(_row(line) is None for line in _lines(path))


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines() if line.strip()] if path.exists() else []


def _row(line: bytes) -> Record | None:
    """The row of a line; None where it is none, or not as it was written."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or "cell_id" not in row:
        return None
    last = next(reversed(row))  # lines of older folders have no seal; one whose name is damaged is one all the same
    sealed = last not in COLUMNS and re.fullmatch(r"[0-9a-f]{8}", str(row[last]))
    row.pop(SEAL, None)
    if (sealed or last == SEAL) and line != _sealed(line[: line.rfind(b', "%s"' % SEAL.encode())] + b"}").rstrip(b"\n"):
        return None
    return as_record(row)


def as_record(row: Mapping[str, Any]) -> Record | None:
    """A row that was read from a file, with every column; None where a value is not of its column's type, or cannot
    have been measured."""
    record = {**dict.fromkeys(COLUMNS), **row}
    for name, kind in COLUMNS.items():
        value = record[name]
        if value is None or (kind is str and isinstance(value, str)):
            continue
        if kind is str or not _is_number(kind, value) or (name in ABOVE_ZERO and value <= 0):
            return None
        record[name] = kind(value)
    return record if isinstance(record["cell_id"], str) and isinstance(record["status"], str) else None


def _is_number(kind: type, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return kind is float or (value == int(value) and abs(value) < 2**63)


def last_attempts(records: Iterable[Record]) -> list[Record]:
    """The last attempt of each cell and round, in the order the rounds first appeared."""
    latest: dict[tuple[str, int, int], Record] = {}
    for row in records:
        key = (row["cell_id"], row["repeat"] or 0, row["round"] or 0)
        if key not in latest or (row["attempt"] or 0) >= (latest[key]["attempt"] or 0):
            latest[key] = row
    return list(latest.values())


def flags_of(row: Mapping[str, Any]) -> list[str]:
    return [flag for flag in (row["flags"] or "").split(",") if flag]


def add_flags(record: Record, flags: Iterable[str]) -> None:
    """Those that it has not yet, behind those that it has."""
    record["flags"] = ",".join(dict.fromkeys([*flags_of(record), *flags])) or None


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Whether other programs had a share in the round's times."""
    return not DISTURBED.isdisjoint(flags_of(row))


def undisturbed(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The rounds of one cell that are pooled, of those that are ok: disturbed ones only where there is no other. It is
    the load that decides, never the outcome, so that leaving them out biases nothing."""
    ok = [row for row in rows if row["status"] == "ok"]
    return [row for row in ok if not is_disturbed(row)] or ok
