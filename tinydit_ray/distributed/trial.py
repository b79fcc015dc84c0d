"""What runs in a trial's process: a Ray Train ``TorchTrainer`` around the cell.

With one worker the trainer runs in the trial's own process (``num_workers=0``), which holds the CPUs
and the GPU: the same accounting as a worker group, without its start and its pollers. With more the trial
only drives a worker group (``distributed/workers.py``).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tinydit_ray.cell import CellTask, Entry, enter, run_cell

MAX_FILE_BYTES = 4_000_000


def tune_trial(config: dict[str, Any]) -> None:
    """One round: run it under Ray Train, report its record once, after everything was timed."""
    from ray import tune

    task = CellTask.from_json(config["task"])
    if task.cell.workers > 1:
        from tinydit_ray.distributed.workers import run_together

        tune.report(run_together(task, config["nodes"]))
        return
    entry = enter(task)
    from ray.train import ScalingConfig

    scaling = ScalingConfig(num_workers=0, use_gpu=task.cell.gpus_per_worker > 0)
    _fit(task, entry, scaling, here(task, config["nodes"]))


def here(task: CellTask, nodes: list[str]) -> dict[str, str]:
    """What the record says of the node that the trial really runs on; ``nodes`` are those it was given, none where
    this machine is all there is."""
    if not nodes:
        return {}
    from tinydit_ray.distributed.nodes import where_am_i

    return where_am_i(task.cell.device)


def tune_trial_documented(config: dict[str, Any]) -> None:
    """The same round in the pattern of Ray's documentation, a worker group of one: what ``overhead.py``
    compares with."""
    from ray.train import ScalingConfig

    task = CellTask.from_json(config["task"])
    cell = task.cell
    workers = ScalingConfig(
        num_workers=1, use_gpu=cell.gpus_per_worker > 0, resources_per_worker={"CPU": cell.cpus_per_worker}
    )
    _fit(task, None, workers)


def _fit(task: CellTask, entry: Entry | None, scaling: Any, node: dict[str, str] | None = None) -> None:
    from ray import tune
    from ray.train import RunConfig
    from ray.train.torch import TorchTrainer

    from tinydit_ray.distributed.stopping import final_result, reporter

    def train_loop(loop_config: dict[str, Any]) -> Any:
        began = entry or enter(task, grouped=True)
        record = run_cell(task, began, reporter(Path(task.folder)) if task.reports else None, node)
        scores = final_result(record, bool(task.train_s)) if task.reports else {}
        return {**report_of(task, record), **scores}

    with tempfile.TemporaryDirectory(prefix="tinydit-train-") as storage:
        result: Any = TorchTrainer(
            train_loop,  # type: ignore[arg-type]  # what it returns becomes result.return_value
            train_loop_config={},
            scaling_config=scaling,
            run_config=RunConfig(storage_path=storage, name="cell"),
        ).fit()
    tune.report(result.return_value)


def report_of(task: CellTask, record: dict[str, Any]) -> dict[str, Any]:
    """What a trial hands back: its record, and the small files of the round."""
    return {"record": json.dumps(record, ensure_ascii=False), "files": files_of(Path(task.folder))}


def files_of(folder: Path) -> dict[str, bytes]:
    """Small files of the round's folder, to travel to the driver where it has no view of this disk."""
    found = [path for path in folder.glob("*") if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES]
    return {path.name: path.read_bytes() for path in found}
