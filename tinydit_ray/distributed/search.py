"""Between Tune and the sweep: rounds go out through a searcher, records come back through a callback."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from tinydit_ray.cell import CellTask
from tinydit_ray.distributed.resources import DRIVER_RESOURCE
from tinydit_ray.distributed.stopping import SO_FAR, SPENT, stopped_record
from tinydit_ray.record import Record
from tinydit_ray.sweep.local import lost_record, read_record
from tinydit_ray.sweep.queue import EarlyStop, Queue

OVERDUE_S = 90.0  # beyond a trial's time limit, which begins when its process is up; then it is ended from outside


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
        self.failure: Exception | None = None  # what the queue raised, a full disk say: it ends the sweep

    def suggest(self, trial_id: str) -> Any:
        with self._noting_failure():
            task = None if self.failure else self.queue.next()
        if task is None:
            return Searcher.FINISHED
        self.tasks[trial_id] = (task, time.monotonic())
        return {"task": task.to_json()}

    def done(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        """Hand a record to the queue."""
        with self._noting_failure():
            self.queue.done(task, record, files)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise

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

    def __init__(self, searcher: RoundSearcher, check: Callable[[], None] = lambda: None) -> None:
        self.searcher, self.check = searcher, check  # check raises where Ray is gone
        self.begun: dict[str, tuple[Trial, float]] = {}  # trials that run, and since when
        self.overdue: set[str] = set()  # those that were ended from outside

    def __getstate__(self) -> dict[str, Any]:
        return {}  # as the searcher's

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.begun[trial.trial_id] = trial, time.monotonic()

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Ends trials whose own watchdog did not: their process is stopped, or stands still in the kernel."""
        self.check()
        self.begun = {name: begun for name, begun in self.begun.items() if name in self.searcher.tasks}
        for name, (trial, start) in self.begun.items():
            limit_s = self.searcher.tasks[name][0].timeout_s
            actor = trial.temporary_state.ray_actor
            if limit_s and actor and time.monotonic() - start > limit_s + OVERDUE_S and name not in self.overdue:
                self.overdue.add(name)
                ray.kill(actor)

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
        self.searcher.done(task, record, files)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        if not self._stopped_early(trial):
            self._lost(trial, "the trial ended without a record")

    def _stopped_early(self, trial: Trial) -> bool:
        """Keep what a trial had when the scheduler ended it."""
        stop, last = self.searcher.early_stop, self.searcher.so_far.pop(trial.trial_id, None)
        if trial.trial_id not in self.searcher.tasks or stop is None or last is None:
            return False
        task, _ = self.searcher.tasks.pop(trial.trial_id)
        self.searcher.done(task, stopped_record(json.loads(last[SO_FAR]), last[SPENT], stop), last["files"])
        return True

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        text = _error_text(trial)
        self._lost(trial, _reason(text) or f"the trial's process ended ({trial.status})", text)

    def _lost(self, trial: Trial, detail: str, text: str = "") -> None:
        if trial.trial_id not in self.searcher.tasks:
            return
        task, start = self.searcher.tasks.pop(trial.trial_id)
        found = read_record(task, Path(task.folder))  # written before whatever ended the trial
        seconds = math.inf if trial.trial_id in self.overdue else time.monotonic() - start
        record = found or lost_record(task, None, seconds, detail)
        self.searcher.done(task, record, {"error.txt": text.encode()} if text else {})


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
        cause = re.search(r"Worker exit type: (\w+)", text)
        return f"the trial's process died ({cause[1] if cause else 'killed, or crashed'}; see error.txt)"
    return (named or lines or [""])[-1]
