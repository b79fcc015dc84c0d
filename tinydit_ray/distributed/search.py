"""Between Tune and the sweep: rounds go out through a searcher, records come back through a callback."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from tinydit_ray.cell import CellTask
from tinydit_ray.distributed.nodes import MISSED_S, selector
from tinydit_ray.distributed.resources import DRIVER_RESOURCE
from tinydit_ray.distributed.stopping import SO_FAR, SPENT, stopped_record
from tinydit_ray.record import Record, update
from tinydit_ray.sweep.kinds import kinds_of, minutes_words
from tinydit_ray.sweep.local import lost_record, read_record
from tinydit_ray.sweep.placement import Place, Placement
from tinydit_ray.sweep.queue import EarlyStop, Queue

if TYPE_CHECKING:
    from tinydit_ray.distributed.cluster import RayCluster

OVERDUE_S = 90.0  # beyond a trial's time limit, which begins when its process is up; then it is ended from outside
CHECK_S = 2.0  # between looks at the nodes of trials that have not started
UNSURE = ("unavailable", "node has died", "node was terminated")  # Ray's words for what may be a node's end


def cell_resources(config: dict[str, Any]) -> Any:
    """The trial holds the CPUs and GPU itself, on the node it was given: the cell trains in the trial's own process. A
    trial of several workers only drives them, and they hold what they need."""
    cell, nodes = CellTask.from_json(config["task"]).cell, config["nodes"]
    if cell.workers > 1:
        return driver_resources(config)
    bundle: dict[str, float] = {"CPU": cell.cpus_per_worker}
    if cell.gpus_per_worker:
        bundle["GPU"] = cell.gpus_per_worker
    pinned: dict[str, Any] = {"bundle_label_selector": [selector(nodes)]} if nodes else {}
    return tune.PlacementGroupFactory([bundle], **pinned)


def driver_resources(config: dict[str, Any]) -> Any:
    """A trial that only drives a worker group: a custom resource, since Tune refuses a bundle of nothing."""
    return tune.PlacementGroupFactory([{DRIVER_RESOURCE: 1}])


class RoundSearcher(Searcher):
    """Suggests the queue's next round that a node is free for, until the queue is empty and nothing runs."""

    def __init__(
        self, queue: Queue, placement: Placement, cluster: RayCluster | None = None, early_stop: EarlyStop | None = None
    ) -> None:
        super().__init__(metric=None, mode=None)
        self.queue, self.placement, self.cluster, self.early_stop = queue, placement, cluster, early_stop
        self.so_far: dict[str, dict[str, Any]] = {}  # the last report of trials that report on their way
        self.tasks: dict[str, tuple[CellTask, float]] = {}
        self.failure: Exception | None = None  # what the queue raised, a full disk say: it ends the sweep
        # of the same trials: Tune gives a node back before it says how a trial ended
        self.places: dict[str, Place] = {}
        self._alone_since: float | None = None  # when nothing ran any more, for want of nodes
        self.controller: Any = None  # Tune's, once it has a trial

    def suggest(self, trial_id: str) -> Any:
        if self.failure:
            return Searcher.FINISHED
        if self.cluster:
            self.placement.nodes = self.cluster.nodes.alive()
        with self.noting_failure():
            task = self.queue.next(self.placement.has_room)
            self._ask_for_nodes(task)
        if task is None:
            # a trial that runs may lose its node, and be handed back
            return None if self.queue.waiting or self.tasks else Searcher.FINISHED
        place = self.places[trial_id] = self.placement.take(trial_id, task.cell, task.identity["node_kind"])
        task = dataclasses.replace(task, concurrent=place.together)
        self.tasks[trial_id] = (task, time.monotonic())
        return {"task": task.to_json(), "nodes": [node for node in place.nodes if node]}

    def _ask_for_nodes(self, task: CellTask | None) -> None:
        """Let the cluster grow to a node for every round, and say so where nothing can run until one comes. Rounds
        whose node does not come in time get a row that says so."""
        if task is not None:
            kind = task.identity["node_kind"]
            self.queue.standing(self.placement.slots(task.cell, kind))
            if self.cluster and self.placement.concurrent is None:
                kinds = {node.kind: node.cpus for node in self.placement.nodes}
                label = kind if self.cluster.nodes.is_label(kind) else None
                self.cluster.autoscaler.ask(task.cell, self.queue.waiting + len(self.tasks) + 1, label, kinds[kind])
        if task is not None or self.tasks or not self.queue.waiting or not self.cluster:
            self._alone_since = None
            return
        self._alone_since = self._alone_since or time.monotonic()
        limit_s = self.cluster.autoscaler.limit_s or MISSED_S
        waited = time.monotonic() - self._alone_since
        here = ", ".join(map(str, kinds_of(self.placement.nodes))) or "none"
        if waited > limit_s:
            reason = f"no node for it came within {minutes_words(limit_s)} (--wait-nodes); there is {here}"
            self.queue.give_up(self.placement.can_ever, reason)
        else:
            left = minutes_words(limit_s)
            self.queue.standing(1, f"waiting for a node, {left} at most (--wait-nodes); there is {here}")

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keeps what the queue raises for who runs Tune, which would raise the text of its traceback."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing to learn from a result: the order is the sweep's."""
        self.placement.release(trial_id)

    def lost_node(self, trial_id: str, *, wait_s: float = 0.0) -> str | None:
        """A node of the trial's that is gone; one just cut off is missed after seconds (``wait_s``)."""
        place = self.places.get(trial_id)
        if not self.cluster or place is None:
            return None
        end = time.monotonic() + wait_s
        while True:
            alive = {node.id for node in self.cluster.nodes.alive(fresh=True)}
            gone = [node for node in place.nodes if node not in alive]
            if gone or time.monotonic() >= end:
                return gone[0] if gone else None
            time.sleep(1.0)

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
        self._looked = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # as the searcher's

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.begun[trial.trial_id] = trial, time.monotonic()

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self.check()
        self._end_overdue()
        self._end_stranded(trials)

    def _end_overdue(self) -> None:
        """Ends trials whose own watchdog did not: their process is stopped, or stands still in the kernel."""
        self.begun = {name: begun for name, begun in self.begun.items() if name in self.searcher.tasks}
        for name, (trial, start) in self.begun.items():
            limit_s = self.searcher.tasks[name][0].timeout_s
            actor = trial.temporary_state.ray_actor
            if limit_s and actor and time.monotonic() - start > limit_s + OVERDUE_S and name not in self.overdue:
                self.overdue.add(name)
                ray.kill(actor)

    def _end_stranded(self, trials: list[Trial]) -> None:
        """A trial that waits for a node that is gone would wait for ever: end it, it is handed back."""
        if time.monotonic() - self._looked < CHECK_S or self.searcher.controller is None:
            return
        self._looked = time.monotonic()
        for trial in trials:
            waits = trial.status == Trial.PENDING and trial.trial_id in self.searcher.tasks
            if waits and self.searcher.lost_node(trial.trial_id):
                self.searcher.controller.stop_trial(trial)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        if SO_FAR in result:
            self.searcher.so_far[trial.trial_id] = {name: result.pop(name) for name in (SO_FAR, "files")}
            self.searcher.so_far[trial.trial_id][SPENT] = result[SPENT]
            return
        if "record" not in result or trial.trial_id not in self.searcher.tasks:
            return
        record, files = json.loads(result.pop("record")), result.pop("files", {})
        self._hand_over(trial, record, files)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        if not self._stopped_early(trial):
            self._lost(trial, "the trial ended without a record")

    def _stopped_early(self, trial: Trial) -> bool:
        """Keep what a trial had when the scheduler ended it."""
        stop, last = self.searcher.early_stop, self.searcher.so_far.pop(trial.trial_id, None)
        if trial.trial_id not in self.searcher.tasks or stop is None or last is None:
            return False
        self._hand_over(trial, stopped_record(json.loads(last[SO_FAR]), last[SPENT], stop), last["files"])
        return True

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        text = _error_text(trial)
        self._lost(trial, _reason(text) or f"the trial's process ended ({trial.status})", text)

    def _lost(self, trial: Trial, detail: str, text: str = "") -> None:
        if trial.trial_id not in self.searcher.tasks:
            return
        task, start = self.searcher.tasks[trial.trial_id]
        found = read_record(task, Path(task.folder))  # written before whatever ended the trial
        seconds = math.inf if trial.trial_id in self.overdue else time.monotonic() - start
        record = found or lost_record(task, None, seconds, detail)
        self._hand_over(trial, record, {"error.txt": text.encode()} if text else {}, text)

    def _hand_over(self, trial: Trial, record: Record, files: dict[str, bytes], text: str = "") -> None:
        """A round that failed because its node is gone is run again; everything else is done."""
        searcher = self.searcher
        gone = None
        if record["status"] in ("failed", "timeout"):
            spread = len(searcher.places[trial.trial_id].nodes) > 1
            unsure = spread or any(word in text for word in UNSURE)
            gone = searcher.lost_node(trial.trial_id, wait_s=MISSED_S if unsure else 0.0)
        task, _ = searcher.tasks.pop(trial.trial_id)
        del searcher.places[trial.trial_id]
        with searcher.noting_failure():
            if gone:
                reason = f"node {gone[:8]} was lost while the trial ran there; run again"
                update(record, {"status": "failed", "reason": reason, "node_id": gone})
                searcher.queue.lost(task, record, files)
            else:
                searcher.queue.done(task, record, files)


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
