"""What runs in a trial's process: a Ray Train ``TorchTrainer`` around the cell.

With one worker the trainer runs in the trial's own process (``num_workers=0``), which holds the CPUs
and the GPU: the same accounting as a worker group, without its start and its pollers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tinydit_ray.cell import CellTask, enter, run_cell
from tinydit_ray.record import Record

MAX_FILE_BYTES = 4_000_000


def tune_trial(config: dict[str, Any]) -> None:
    """One round: run it under Ray Train, report its record once, after everything was timed."""
    task = CellTask.from_json(config["task"])
    entry = enter(task)
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    records: list[Record] = []

    def train_loop(loop_config: dict[str, Any]) -> dict[str, Any]:
        records.append(run_cell(task, entry))
        return {"status": records[0]["status"]}

    with tempfile.TemporaryDirectory(prefix="tinydit-train-") as storage:
        TorchTrainer(
            train_loop,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=0, use_gpu=task.cell.device == "cuda"),
            run_config=RunConfig(storage_path=storage, name="cell"),
        ).fit()
    tune.report({"record": json.dumps(records[0], ensure_ascii=False), "files": files_of(Path(task.folder))})


def files_of(folder: Path) -> dict[str, bytes]:
    """Small files of the round's folder, to travel to the driver where it has no view of this disk."""
    found = [path for path in folder.glob("*") if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES]
    return {path.name: path.read_bytes() for path in found}
