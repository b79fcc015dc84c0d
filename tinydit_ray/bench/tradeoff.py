"""Quality against cost: when a curve reaches a score, and which cells no other one beats in everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SAME = 0.02  # costs that differ by less than this fraction are taken as equal: a budget of time is met to the step
SAME_MSE = 1e-4  # of its value: what other kernels and orders of summation change, not a setup


def time_to_quality(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Seconds until the score is at most ``target``, linear between points (seconds, score); None: not reached.

    The first crossing counts, also where the curve rises again later.
    """
    before: tuple[float, float] | None = None
    for seconds, score in curve:
        if score <= target:
            if before is None or before[1] <= score:
                return seconds
            share = (before[1] - target) / (before[1] - score)
            return before[0] + share * (seconds - before[0])
        before = (seconds, score)
    return None


def pareto_front(points: Mapping[str, Sequence[float]], tolerances: Sequence[float]) -> list[str]:
    """Names of the points that no other point beats: at most as high in every value, and lower in one.

    Every value is a cost, lower is better. Values that differ by at most the fraction in ``tolerances`` are equal.
    """
    return [
        name
        for name, values in points.items()
        if not any(_beats(other, values, tolerances) for key, other in points.items() if key != name)
    ]


def _beats(a: Sequence[float], b: Sequence[float], tolerances: Sequence[float]) -> bool:
    rows = list(zip(a, b, tolerances, strict=True))
    return all(x <= y * (1 + t) for x, y, t in rows) and any(x * (1 + t) < y for x, y, t in rows)
