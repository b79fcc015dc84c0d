"""Between Tune and the sweep: rounds go out through a searcher, records come back through a callback."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from tinydit_ray.cell import CellTask
from tinydit_ray.distributed.resources import DRIVER_RESOURCE
from tinydit_ray.distributed.stopping import SO_FAR, SPENT, stopped_record
from tinydit_ray.sweep.local import lost_record, read_record
from tinydit_ray.sweep.queue import EarlyStop, Queue


def cell_resources(config: dict[str, Any]) -> Any:
    """The trial holds the CPUs and GPU itself: the cell trains in the trial's own process. A trial of several
    workers only drives them, and they hold what they need."""
    cell = CellTask.from_json(config["task"]).cell
    if cell.workers > 1:
        return driver_resources(config)
    bundle: dict[str, float] = {"CPU": cell.cpus_per_worker}
    if cell.gpus_per_worker:
        bundle["GPU"] = cell.gpus_per_worker
    return tune.PlacementGroupFactory([bundle])


def driver_resources(config: dict[str, Any]) -> Any:
    """A trial that only drives a worker group: a custom resource, since Tune refuses a bundle of nothing."""
    return tune.PlacementGroupFactory([{DRIVER_RESOURCE: 1}])


class RoundSearcher(Searcher):
    """Suggests the queue's next round, until the queue is empty."""

    def __init__(self, queue: Queue, early_stop: EarlyStop | None = None) -> None:
        super().__init__(metric=None, mode=None)
        self.queue, self.early_stop = queue, early_stop
        self.so_far: dict[str, dict[str, Any]] = {}  # the last report of trials that report on their way
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
        if SO_FAR in result:
            self.searcher.so_far[trial.trial_id] = {name: result.pop(name) for name in (SO_FAR, "files")}
            self.searcher.so_far[trial.trial_id][SPENT] = result[SPENT]
            return
        if "record" not in result or trial.trial_id not in self.searcher.tasks:
            return
        task, _ = self.searcher.tasks.pop(trial.trial_id)
        record, files = json.loads(result.pop("record")), result.pop("files", {})
        self.searcher.queue.done(task, record, files)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        if not self._stopped_early(trial):
            self._lost(trial, "the trial ended without a record")

    def _stopped_early(self, trial: Trial) -> bool:
        """Keep what a trial had when the scheduler ended it."""
        stop, last = self.searcher.early_stop, self.searcher.so_far.pop(trial.trial_id, None)
        if trial.trial_id not in self.searcher.tasks or stop is None or last is None:
            return False
        task, _ = self.searcher.tasks.pop(trial.trial_id)
        self.searcher.queue.done(task, stopped_record(json.loads(last[SO_FAR]), last[SPENT], stop), last["files"])
        return True

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        text = _error_text(trial)
        self._lost(trial, _reason(text) or f"the trial's process ended ({trial.status})", text)

    def _lost(self, trial: Trial, detail: str, text: str = "") -> None:
        if trial.trial_id not in self.searcher.tasks:
            return
        task, start = self.searcher.tasks.pop(trial.trial_id)
        found = read_record(task, Path(task.folder))  # written before whatever ended the trial
        record = found or lost_record(task, None, time.monotonic() - start, detail)
        self.searcher.queue.done(task, record, {"error.txt": text.encode()} if text else {})


def _error_text(trial: Trial) -> str:
    """What Tune wrote about the trial's end."""
    try:
        return Path(trial.error_file).read_text() if trial.error_file else ""
    except OSError:
        return ""


def _reason(text: str) -> str:
    """The line of a traceback that says what happened."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(ray\.)?[\w.]*(Error|Exception|Exit)\b", line)]
    if any("ActorDiedError" in line or "died unexpectedly" in line for line in lines):
        cause = next((line for line in lines if "exit" in line.lower() and ":" in line), "")
        return f"the trial's process died. {cause}".strip()
    return (named or lines or [""])[-1]
