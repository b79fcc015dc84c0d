"""How long the rest of a sweep takes, and how to keep it within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from tinydit_ray.sweep.plan import Round

MIN_WINDOW_S = 4.0  # of timing per round; a budget does not shrink windows below it


class Pace:
    """Scales the estimates of rounds to come by how long the finished ones took on this machine.

    ``budget_s``: seconds from now that the whole sweep may take; 0: no limit.
    """

    def __init__(self, estimate: Callable[[Round], float], budget_s: float = 0.0) -> None:
        self.estimate = estimate
        self._ends = time.monotonic() + budget_s if budget_s else math.inf
        self.spent_s = self.expected_s = 0.0
        self.at_once = 1  # rounds that run at a time

    def budget_left_s(self) -> float:
        """Infinite without a budget; below 0 once it is used up."""
        return self._ends - time.monotonic()

    def finished(self, item: Round, seconds: float) -> None:
        self.spent_s += seconds
        self.expected_s += self.estimate(item)

    @property
    def scale(self) -> float:
        """How much longer than estimated rounds take here."""
        return self.spent_s / self.expected_s if self.expected_s else 1.0

    def expected(self, item: Round) -> float:
        """Seconds that a round will take."""
        return self.estimate(item) * self.scale

    def window_s(self, planned_s: float, waiting: Iterable[Round], left_s: float) -> float | None:
        """Timed seconds of the next round, so that all of ``waiting`` (it among them) end within ``left_s``.

        None where it does not fit even with the shortest window.
        """
        rounds = list(waiting)
        over = sum(map(self.expected, rounds)) / self.at_once - left_s
        shortest = min(MIN_WINDOW_S, planned_s)
        if over <= 0:
            return planned_s
        if self.expected(rounds[0]) - (planned_s - shortest) > left_s:
            return None
        return max(shortest, planned_s - over * self.at_once / len(rounds))
