"""How a sweep's driver, MLflow and the analysis bear many cells; by hand with more, in test_scale.py with few.

    python tests/scale.py cells 1000 FOLDER      # invented trials through the real Tune path
    python tests/scale.py records 5000 FOLDER    # invented records through tracking and analysis

Prints one JSON map: seconds, CPU seconds and memory of this process, seconds per cell at the start and the end.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinydit_ray.cell import CellTask, blank_record
from tinydit_ray.record import read_records, update

PARTS = 5  # of a sweep whose pace is compared: the first against the last


def invented_trial(config: dict[str, Any]) -> None:
    """A trial's report without the trial: numbers that depend on the seed."""
    from ray import tune

    task = CellTask.from_json(config["task"])
    record, seed = blank_record(task), task.cell.seed
    numbers = {"ms_per_step": 10 + seed % 7, "control_ms_per_step": 12.0, "timed_steps": 50, "velocity_mse": 0.4}
    speedup = 12.0 / (10 + seed % 7)
    interval = {"speedup_vs_control": speedup, "speedup_ci_low": speedup * 0.99, "speedup_ci_high": speedup * 1.01}
    update(record, {**numbers, **interval, "status": "ok"})
    tune.report({"record": json.dumps(record), "files": {"log.txt": b"ready\n", "loss.csv": b"step,loss\n10,0.5\n"}})


def many_cells(count: int, folder: Path) -> dict[str, Any]:
    """A whole sweep of ``count`` cells, MLflow included; only what a trial does is invented."""
    from rich.console import Console

    from tinydit_ray.distributed.executor import RayExecutor
    from tinydit_ray.sweep import driver
    from tinydit_ray.sweep.options import options_from
    from tinydit_ray.sweep.parser import parser
    from tinydit_ray.sweep.resume import parse

    RayExecutor.reuse_actors = True  # a process per trial would measure Python's start
    RayExecutor.trainable = lambda self: invented_trial  # type: ignore[method-assign]
    ends: list[tuple[float, float]] = []  # seconds, and those of this process's CPU

    class Watched(driver.Sweep):
        def done(self, *args: Any) -> None:
            super().done(*args)
            ends.append((time.monotonic(), cpu_s()))

    os.chdir(folder)
    arguments = ["--set", f"seed={','.join(map(str, range(count)))}", "--set", "model=32/1/2", "--data", "shapes"]
    arguments += ["--rounds", "1", "--cpus-per-worker", "1", "--name", "many", "--no-report"]
    options = options_from(parse(parser("scale", ""), arguments), default_grid="published", command=["speed-grid"])
    start, memory = time.monotonic(), peak_mb()
    status = driver.run_sweep(options, Console(file=sys.stderr, width=200), make=Watched)
    end = time.monotonic()
    part = max(1, count // PARTS)
    wall, cpu = zip(*ends, strict=True)
    return {
        "status": status, "rows": len(read_records(folder / "runs" / "many" / "records.jsonl")),
        "seconds": end - start, "before_first_s": wall[0] - start, "after_last_s": end - wall[-1],
        "first_part_s_per_cell": (wall[part] - wall[0]) / part,
        "last_part_s_per_cell": (wall[-1] - wall[-1 - part]) / part,
        "first_part_cpu_s_per_cell": (cpu[part] - cpu[0]) / part,
        "last_part_cpu_s_per_cell": (cpu[-1] - cpu[-1 - part]) / part,
        "cpu_s_per_cell": cpu_s() / count, "memory_before_mb": memory, "memory_mb": peak_mb(),
    }  # fmt: skip


def many_records(count: int, folder: Path) -> dict[str, Any]:
    """``count`` invented records in a sweep folder, sent to MLflow, and read back from both by the analysis."""
    from analysis_help import make_grid_sweep, track

    from analysis.load import frame_of, load
    from analysis.report import main as report

    seconds: dict[str, Any] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.monotonic()
        result = call()
        seconds[name] = time.monotonic() - start
        return result

    rounds, uri = 5, f"sqlite:///{folder}/mlflow.db"
    cells = [{"seed": seed, "attention": ("manual", "sdpa")[seed % 2]} for seed in range(count // rounds)]
    timed("make_s", lambda: make_grid_sweep(folder / "many", cells, rounds=rounds))
    timed("track_s", lambda: track(folder / "many", uri))
    from_folder = timed("load_folder_s", lambda: frame_of(load([folder / "many"])))
    from_store = timed("load_mlflow_s", lambda: frame_of(load(["speed"], uri)))
    os.chdir(folder)
    seconds["report_status"] = timed("report_s", lambda: report(["many", "--out", "page.html"]))
    return {"rows": [len(from_folder), len(from_store)], **seconds, "memory_mb": peak_mb()}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    what, number, place = sys.argv[1:]
    Path(place).mkdir(parents=True, exist_ok=True)
    found = {"cells": many_cells, "records": many_records}[what](int(number), Path(place).resolve())
    print(json.dumps(found))
