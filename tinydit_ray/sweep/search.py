"""Which cells to time next: switch by switch from the control, then a run-off of growing time.

Coordinate-wise ascent: the axes are gone through in groups; all values of a group are timed with the rest as in
the best cell so far, and the fastest stays. Axes that are known to interact (attention and precision: 16-bit
arithmetic may pay with one kernel and not with another) form one group; a second pass over single axes catches
what the first one missed. Then the fastest few are timed again in fresh processes for twice as long each time, and
half of them go on (successive halving; Jamieson & Talwalkar, arXiv:1502.07943).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Point = tuple[Any, ...]  # a value of each axis, in the order of the axes
Answers = Mapping[Point, float | None]  # speed-up of each point; None where it cannot run or went wrong

INTERACTING = ("attention", "precision")
PASSES = 2
TIE = 1.005  # what is not faster by half a per cent does not replace the simpler value


@dataclass(frozen=True)
class Request:
    """Points to time in a round of theirs, and why."""

    points: list[Point]
    round: int
    what: str


@dataclass
class Search:
    """A search over ``axes`` (name -> values) within the ``possible`` points, from ``start``, in ``rounds`` rounds.

    ``run()`` yields requests and is sent the answers; its return value is the winner, or None where nothing runs.
    """

    axes: Mapping[str, Sequence[Any]]
    possible: Collection[Point]
    start: Point
    rounds: int = 3
    speedups: dict[Point, float | None] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Generator[Request, Answers, Point | None]:
        self.best = self.start
        yield from self._time([self.start], 1, "the start")
        for number in range(1, PASSES + 1):
            before = self.best
            for group in self._groups(number):
                yield from self._choose(group, number)
            if self.best == before:
                break
        return (yield from self._run_off())

    def _groups(self, number: int) -> list[tuple[str, ...]]:
        """Axes that are varied together; later passes take them one by one."""
        together = tuple(name for name in INTERACTING if name in self.axes) if number == 1 else ()
        first = [together] if together else []
        return [*first, *((name,) for name in self.axes if name not in together)]

    def _choose(self, group: tuple[str, ...], number: int) -> Generator[Request, Answers, None]:
        candidates = self._neighbours(group)
        what = f"pass {number}: {' × '.join(group)}"
        yield from self._time([point for point in candidates if point not in self.speedups], 1, what)
        fastest = max(candidates, key=self._speed)
        if self._speed(fastest) > TIE * self._speed(self.best):
            self.best = fastest
        self._note(what, candidates, [self.best])

    def _neighbours(self, group: tuple[str, ...]) -> list[Point]:
        """The best point and those that differ from it in this group alone."""
        here = self.named(self.best)
        choices = [values if name in group else [here[name]] for name, values in self.axes.items()]
        return [point for point in product(*choices) if point in self.possible]

    def _run_off(self) -> Generator[Request, Answers, Point | None]:
        survivors = self._fastest(list(self.speedups), 2 ** (self.rounds - 1))
        for number in range(2, self.rounds + 1):
            what = f"run-off, round {number}"
            if survivors:
                yield from self._time(survivors, number, what)
                kept = self._fastest(survivors, 1 if number == self.rounds else len(survivors) // 2)
                self._note(what, survivors, kept)
                survivors = kept
        return survivors[0] if survivors else None

    def _fastest(self, points: list[Point], count: int) -> list[Point]:
        alive = [point for point in points if self.speedups[point] is not None]
        return sorted(alive, key=self._speed, reverse=True)[: max(1, count)]

    def _time(self, points: list[Point], round_: int, what: str) -> Generator[Request, Answers, None]:
        if points:
            answers = yield Request(points, round_, what)
            self.speedups |= {point: answers[point] for point in points}

    def _speed(self, point: Point) -> float:
        return self.speedups.get(point) or 0.0

    def _note(self, what: str, points: list[Point], kept: list[Point]) -> None:
        timed = [{"point": self.named(point), "speedup": self.speedups.get(point)} for point in points]
        self.trace.append({"what": what, "timed": timed, "kept": [self.named(point) for point in kept]})

    def named(self, point: Point) -> dict[str, Any]:
        return dict(zip(self.axes, point, strict=True))
