"""Early stopping through Tune's ASHA, of quality grids alone: what a trial reports, and what its record then says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from tinydit_ray.record import Record, add_flags, update
from tinydit_ray.sweep.queue import STOPPED_FLAG, EarlyStop

if TYPE_CHECKING:
    from tinydit_ray.distributed.search import RoundSearcher

METRIC, SPENT = "velocity_mse", "spent"  # of each report; spent: seconds or steps of the budget
SO_FAR = "record_so_far"
TRAVELLING = ("quality.csv", "strip.png")  # what a trial that is stopped leaves


class _Known:
    """Tells the searcher of Tune's controller, through which it ends a trial that can never start."""

    searcher: RoundSearcher

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        self.searcher.controller = tune_controller
        super().on_trial_add(tune_controller, trial)  # type: ignore[misc]


class _Fifo(_Known, FIFOScheduler):
    pass


class _Asha(_Known, ASHAScheduler):
    pass


def scheduler(searcher: RoundSearcher, stop: EarlyStop | None) -> TrialScheduler:
    """First in, first out; or asynchronous successive halving (Li et al., arXiv:1810.05934), where nobody waits, so
    that the first trials run on."""
    found = _asha(stop) if stop else _Fifo()
    found.searcher = searcher
    return found


def _asha(stop: EarlyStop) -> _Asha:
    return _Asha(
        time_attr=SPENT, metric=METRIC, mode="min", max_t=stop.budget,  # type: ignore[arg-type]  # any number
        grace_period=stop.budget * stop.first, reduction_factor=stop.factor,  # type: ignore[arg-type]
    )  # fmt: skip


def reporter(folder: Path) -> Callable[[Record, float], None]:
    """Reports a trial's record so far. A trial that the scheduler ends does not return from it."""

    def report(record: Record, spent: float) -> None:
        files = {name: (folder / name).read_bytes() for name in TRAVELLING if (folder / name).exists()}
        so_far = json.dumps(record, ensure_ascii=False)
        tune.report({SO_FAR: so_far, "files": files, METRIC: record[METRIC], SPENT: spent})

    return report


def final_result(record: Record, by_seconds: bool) -> dict[str, float]:
    """What the scheduler wants beside the last record, whatever became of the trial."""
    mse, spent = record[METRIC], record["train_wall_s" if by_seconds else "steps_trained"]
    return {METRIC: math.inf if mse is None else mse, SPENT: float(spent or 0.0)}


def stopped_record(record: Record, spent: float, stop: EarlyStop) -> Record:
    """The record so far as the final one: its status is ok, and it says that it was stopped, and why."""
    reason = (
        f"stopped early by ASHA after {spent:.4g} {stop.unit} of {stop.budget:.4g}: velocity MSE {record[METRIC]:.4f}"
        " was above the median of the trials that came as far"
    )
    update(record, {"status": "ok", "reason": reason})
    add_flags(record, [STOPPED_FLAG])
    return record
