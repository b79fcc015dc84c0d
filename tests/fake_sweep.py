"""A sweep folder as a driver leaves it, with invented numbers: for tests of what reads such folders."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from tinydit_ray.config import CellConfig, cell_name, control_of, from_mapping, short_hash
from tinydit_ray.record import Record, append_record, last_attempts, new_record

SETUPS: tuple[dict[str, Any], ...] = (
    {},
    {"attention": "sdpa"},
    {"attention": "sdpa", "precision": "bf16"},
    {"attention": "sdpa", "compile": "default"},
    {"attention": "sdpa", "precision": "bf16", "compile": "default"},
)
VARYING = ("attention", "precision", "compile")
START = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
FACTOR = {"sdpa": 0.97, "bf16": 0.6, "default": 1.4}


def make_sweep(
    folder: Path, *, rounds: int = 2, setups: Sequence[dict[str, Any]] = SETUPS, **tracking: Any
) -> list[Record]:
    """Write ``sweep.json``, ``records.jsonl`` and the cells' files; the records, one per cell and round."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(sweep_of(folder, **tracking), ensure_ascii=False), "utf-8")
    records = []
    for round_ in range(1, rounds + 1):
        for number, setup in enumerate(setups):
            records.append(
                record_of(from_mapping(setup), round_=round_, number=len(records), sweep_id=_id(folder))
            )
            if number == 3 and round_ == 1:
                records[-1] |= {
                    "status": "failed",
                    "reason": "CppCompileError: no <omp.h>",
                    "ms_per_step": None,
                }
            write_files(folder, records[-1])
            append_record(folder / "records.jsonl", records[-1])
    return records


def _id(folder: Path) -> str:
    return short_hash(str(folder))


def sweep_of(folder: Path, **tracking: Any) -> dict[str, Any]:
    return {
        "sweep_id": _id(folder),
        "name": folder.name,
        "created_at": START.isoformat(),
        "product_version": "0.1.0",
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "machine": {"cpu": "a processor", "cores": 2, "memory_gb": 8.0, "gpus": []},
        "versions": {"python": "3.11.7", "torch": "2.9.0", "ray": "2.50.0"},
        "grid": {
            "base": {"model": "tiny", "batch_size": 128},
            "axes": {"attention": ["manual", "sdpa"], "precision": ["fp32", "bf16"]},
            "rounds": 2,
            "steps": 100,
        },
        "data": {"source": "shapes", "digest": "sha256:0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d"},
        "command": ["python", "sweeps/speed_grid.py", "--tracking-uri", "http://ann:s3cret@example.org:5000"],
        "tracking": {"uri": None, "experiment": "speed", **tracking},
    }


def record_of(
    cell: CellConfig, *, sweep_id: str, round_: int = 1, attempt: int = 1, number: int = 0
) -> Record:
    rng = random.Random(number)
    speed = 1.0
    for word in (cell.attention, cell.precision, cell.compile):
        speed *= FACTOR.get(word, 1.0)
    ms = 75.0 * speed * rng.uniform(0.98, 1.02)
    return new_record(
        sweep_id=sweep_id,
        config_id=cell.config_id,
        cell_id=short_hash([cell.config_id, "cpu", "data"]),
        cell_name=cell_name(cell, VARYING),
        repeat=0,
        round=round_,
        seed=0,
        attempt=attempt,
        status="ok",
        started_at=(START + timedelta(minutes=5 * number)).isoformat(),
        product_version="0.1.0",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        node_id="n1",
        node_kind="cpu",
        data_source="shapes",
        data_digest="sha256:0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d",
        **cell.columns(),
        **{"effective.threads": 2, "effective.graph_breaks": 0, "effective.autocast_dtype": "bfloat16"},
        ms_per_step=ms,
        ms_per_step_iqr=1.5,
        timed_steps=45,
        control_ms_per_step=75.0,
        speedup_vs_control=75.0 / ms,
        speedup_ci_low=74.0 / ms,
        speedup_ci_high=76.0 / ms,
        first_step_s=8.0 if control_of(cell).compile != cell.compile else 0.1,
        window_s=6.0,
        flags="few-steps",
        peak_rss_mb=900.0 + number,
        velocity_mse=0.55 + 0.001 * number if round_ == 1 else None,
        train_loss_last=0.56 if round_ == 1 else None,
        orchestration_s=7.2,
    )


def write_files(folder: Path, record: Record) -> Path:
    """Log, loss curve, raw step times and samples of one round, as the driver lays them down."""
    name = f"{record['cell_name'].replace(' ', '_')}-{record['cell_id']}"
    place = folder / "cells" / name / f"r{record['round']}-a{record['attempt']}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "log.txt").write_text("ready\n", "utf-8")
    (place / "record.json").write_text(json.dumps(record), "utf-8")
    (place / "steps.npz").write_bytes(b"raw step times")
    if record["round"] == 1:
        rows = "".join(f"{step},{1.5 / (1 + step / 20):.4f}\n" for step in range(0, 101, 5))
        (place / "loss.csv").write_text("step,loss\n" + rows, "utf-8")
        Image.effect_noise((64, 64), 60).save(place / "samples.png")
    return place


def pooled_of(records: Sequence[Record]) -> pd.DataFrame:
    """``results.parquet`` of the records: the last attempts with the pooled numbers on each row."""
    table = pd.DataFrame(last_attempts(records))
    ok = table[table["status"] == "ok"]
    for column, source in (("ms_per_step_pooled", "ms_per_step"), ("speedup_pooled", "speedup_vs_control")):
        table[column] = table["cell_id"].map(ok.groupby("cell_id")[source].median())
    table["verdict"] = [
        ("faster" if speedup > 1.1 else "within noise") for speedup in table["speedup_pooled"].fillna(0)
    ]
    return table


def summarise(folder: Path, records: Sequence[Record]) -> pd.DataFrame:
    """Write ``results.parquet`` and a summary; returns the table."""
    table = pooled_of(records)
    table.to_parquet(folder / "results.parquet")
    rows = "".join(f"| {row.cell_name} | {row.ms_per_step} | {row.verdict} |\n" for row in table.itertuples())
    (folder / "summary.md").write_text("| setup | ms/step | verdict |\n|---|---|---|\n" + rows, "utf-8")
    return table
