"""Between Tune and the sweep: rounds go out through a searcher, records come back through a callback."""

from __future__ import annotations

import json
import time
from typing import Any

from ray import tune
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from tinydit_ray.cell import CellTask
from tinydit_ray.distributed.resources import DRIVER_RESOURCE
from tinydit_ray.sweep.local import lost_record, read_record
from tinydit_ray.sweep.queue import Queue


def cell_resources(config: dict[str, Any]) -> Any:
    """The trial holds the CPUs and GPU itself: the cell trains in the trial's own process."""
    cell = CellTask.from_json(config["task"]).cell
    bundle: dict[str, float] = {"CPU": cell.cpus_per_worker}
    if cell.gpus_per_worker:
        bundle["GPU"] = cell.gpus_per_worker
    return tune.PlacementGroupFactory([bundle])


def driver_resources(config: dict[str, Any]) -> Any:
    """A trial that only drives a worker group: a custom resource, since Tune refuses a bundle of nothing."""
    return tune.PlacementGroupFactory([{DRIVER_RESOURCE: 1}])


class RoundSearcher(Searcher):
    """Suggests the queue's next round, until the queue is empty."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(metric=None, mode=None)
        self.queue = queue
        self.tasks: dict[str, tuple[CellTask, float]] = {}

    def suggest(self, trial_id: str) -> Any:
        task = self.queue.next()
        if task is None:
            return Searcher.FINISHED
        self.tasks[trial_id] = (task, time.monotonic())
        return {"task": task.to_json()}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing to learn from a result: the order is the sweep's."""

    def save(self, checkpoint_path: str) -> None:
        """The sweep folder is what a resumed sweep reads; Tune's own state is not needed."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep is resumed from its folder")

    def __deepcopy__(self, memo: Any) -> RoundSearcher:
        return self  # one queue, whoever copies the searcher

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles it into its state; nobody reads that back


class RecordCallback(Callback):
    """Hands each trial's record to the queue the moment it is reported, or the reason why there is none."""

    def __init__(self, searcher: RoundSearcher) -> None:
        self.searcher = searcher

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        if "record" not in result or trial.trial_id not in self.searcher.tasks:
            return
        task, _ = self.searcher.tasks.pop(trial.trial_id)
        record, files = json.loads(result.pop("record")), result.pop("files", {})
        self.searcher.queue.done(task, record, files)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._lost(trial, "the trial ended without a record")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        error = trial.get_error() if hasattr(trial, "get_error") else None
        lines = str(error or "").strip().splitlines() or [f"the trial's process ended ({trial.status})"]
        self._lost(trial, lines[-1] if "Error" in lines[-1] else lines[0])

    def _lost(self, trial: Trial, detail: str) -> None:
        if trial.trial_id not in self.searcher.tasks:
            return
        from pathlib import Path

        task, start = self.searcher.tasks.pop(trial.trial_id)
        found = read_record(task, Path(task.folder))  # written before whatever ended the trial
        record = found or lost_record(task, None, time.monotonic() - start, detail)
        self.searcher.queue.done(task, record, {})
