"""What an executor needs of a sweep: the next task, and a place for its record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tinydit_ray.cell import CellTask
from tinydit_ray.config import CellConfig
from tinydit_ray.record import Record

STOPPED_FLAG = "stopped-early"  # of rows whose trial was ended by an EarlyStop


@dataclass(frozen=True)
class EarlyStop:
    """Successive halving without waiting (ASHA): at an eighth, a quarter and half of ``budget``, a trial whose
    velocity MSE is above the median of those that came as far is ended."""

    budget: float
    unit: str  # of the budget: "s" or "steps"
    first: float = 1 / 8
    factor: int = 2


Ready = Callable[[CellConfig, str], bool]  # whether a cell can start now on a node of this kind


class Queue(Protocol):
    @property
    def waiting(self) -> int:
        """How many rounds are left to hand out, as far as is known."""

    def next(self, ready: Ready | None = None) -> CellTask | None:
        """The next round to run, the first that is ``ready``, marked as started; None when there is none."""

    def done(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        """A round ended. ``files`` are those of its folder where the trial ran on another machine."""

    def lost(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        """A round's node is gone, and the round with it: its record is kept, and it is handed out once more."""

    def standing(self, at_once: int, waits_for: str = "") -> None:
        """How many rounds run at a time from now on, and what those that cannot start wait for."""

    def give_up(self, ready: Ready, reason: str) -> None:
        """Rounds that are not ``ready`` are never going to be: each gets a row that says why."""

    def executor_lost(self, why: str) -> None:
        """What runs the trials is gone and does not return: end the process here, in whatever thread this is."""


class Executor(Protocol):
    name: str

    def run(self, queue: Queue) -> None:
        """Run all that the queue gives; returns when it is empty, raises KeyboardInterrupt when interrupted."""

    def close(self) -> None: ...
