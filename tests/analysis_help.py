"""Sweep folders for the tests of ``analysis/``: invented numbers, real files; and the same sweep in MLflow."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from fake_sweep import record_of, sweep_of, write_files
from sweep_help import run_here

from tinydit_ray.config import CellConfig, cell_name, control_of, from_mapping, short_hash
from tinydit_ray.grid import varying_axes
from tinydit_ray.record import Record, append_record
from tinydit_ray.sweep.results import result_rows, write_results

ROOT = Path(__file__).parent.parent
CONTROL_MS = 75.0


def product(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Axis values multiplied: one map per cell."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def bf16_needs_compile(cell: CellConfig) -> float:
    """An invented truth: bf16 alone buys nothing, compile 10 %, both together twice the speed; SDPA 5 %."""
    factor = 1.05 if cell.attention == "sdpa" else 1.0
    pair = (cell.precision == "bf16", cell.compile != "off")
    return factor * {(False, False): 1.0, (True, False): 1.0, (False, True): 1.1, (True, True): 2.0}[pair]


def make_grid_sweep(
    folder: Path,
    cells: Sequence[dict[str, Any]],
    *,
    speed: Callable[[CellConfig], float] = bf16_needs_compile,
    rounds: int = 3,
    change: Callable[[Record], dict[str, Any]] = lambda record: {},
    content: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A complete sweep folder whose cells have the given true speed-ups; ``change`` alters records. The rows."""
    configs = [from_mapping(cell) for cell in cells]
    varying = varying_axes(configs)
    folder.mkdir(parents=True)
    sweep = sweep_of(folder) | {"node_kind": "cpu"} | (content or {})
    records = [
        _record(config, speed(config), round_, varying, sweep, number=number)
        for round_ in range(1, rounds + 1)
        for number, config in enumerate(configs)
    ]
    records = [record | change(record) for record in records]
    sweep["grid"] = {
        "rounds": rounds,
        "control": sweep["grid"].get("control", {}),
        "cells": [
            {"name": record["cell_name"], "cell_id": record["cell_id"], **config.asdict()}
            for record, config in zip(records, configs, strict=False)
        ],
    }
    (folder / "sweep.json").write_text(json.dumps(sweep, ensure_ascii=False), "utf-8")
    for record in records:
        write_files(folder, record)
        append_record(folder / "records.jsonl", record)
    rows = result_rows(records)
    write_results(folder / "results.parquet", rows)
    return rows


def _record(
    config: CellConfig, speed: float, round_: int, varying: Sequence[str], sweep: dict[str, Any], *, number: int
) -> Record:
    rng = random.Random(f"{config.config_id}/{round_}")
    speed *= math.exp(rng.gauss(0, 0.004))
    control_ms = CONTROL_MS * rng.uniform(0.97, 1.03)
    ms = control_ms / speed
    compiled = config.compile != "off"
    record = record_of(config, sweep_id=sweep["sweep_id"], round_=round_, number=number)
    first = round_ == 1
    return record | {
        "cell_id": short_hash([config.config_id, record["node_kind"], record["data_digest"]]),
        "cell_name": cell_name(config, varying),
        "git_commit": sweep["git_commit"], "product_version": sweep["product_version"],
        "ms_per_step": ms, "control_ms_per_step": control_ms, "timed_steps": 60, "flags": "",
        "speedup_vs_control": speed, "speedup_ci_low": speed / 1.01, "speedup_ci_high": speed * 1.01,
        "first_step_s": 20.0 if compiled and first else 0.1, "compile_s": 20.0 if compiled and first else 0.02,
        "compile_cache": ("cold" if first else "warm") if compiled else "off",
        "tflops_per_s": 40.0 / ms, "peak_tflops": 1.2 if config.precision == "bf16" else 0.8,
        "mfu": 40.0 / ms / (1.2 if config.precision == "bf16" else 0.8), "peak_source": "measured",
        "model_gflops_per_step": 40.0, "memory_gbytes_per_s": 20.0,
        "model_gbytes_per_step": 1.0 if config.precision == "bf16" else 1.5,
        "velocity_mse": 0.39 + 0.0005 * number if first else None, "probe_fd": 20.5 + 0.1 * number if first else None,
        "probe_id": "cifar10-abc" if first else None, "probe_fd_n": 250 if first else None,
        "steps_trained": 100 if first else None, "train_loss_last": 0.38 if first else None,
        "peak_rss_mb": 900.0 - (150 if config.precision == "bf16" else 0),
    }  # fmt: skip


def track(folder: Path, uri: str, experiment: str = "speed") -> str:
    """Send a finished sweep folder to MLflow as its driver would have; the id of the sweep's run."""
    from tinydit_ray.record import read_records
    from tinydit_ray.tracking import Tracker, files_of, summary_files

    sweep = json.loads((folder / "sweep.json").read_text("utf-8"))
    tracker = Tracker.open(uri=uri, experiment=experiment, sweep=sweep, sweep_dir=folder)
    for record in read_records(folder / "records.jsonl"):
        tracker.log_record(record, files_of(folder, record))
    pooled = pd.read_parquet(folder / "results.parquet")
    tracker.finish(status="FINISHED", summary=summary_files(folder), pooled=pooled)
    assert tracker.warnings == []
    return tracker.run_id


def script(name: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python analysis/NAME …`` as a person runs it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150", **environment}
    env.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "analysis" / name), *arguments],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def script_here(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported pandas already."""
    return run_here(ROOT / "analysis" / name, *arguments, cwd=cwd)


def controls(cells: Sequence[dict[str, Any]]) -> set[str]:
    """Config ids of the cells that are their own control."""
    configs = [from_mapping(cell) for cell in cells]
    return {config.config_id for config in configs if dataclasses.asdict(control_of(config)) == config.asdict()}
