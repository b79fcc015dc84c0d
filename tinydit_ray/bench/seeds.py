"""Whether a cell's quality is worse, better, or what another seed of the control could have given as well.

A cell and its control start from the same weights and see the same batches, but rounding soon sends them along
different paths: what tells them apart must be more than what a seed alone does. n seeds of the control, none of
them the cell's own, give an interval for one more observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinydit_ray.bench.stats import LEVEL, t_quantile

WORSE, BETTER, WITHIN, NOT_JUDGED = "worse", "better", "within seed spread", "not judged"
FEWEST_SEEDS = 2  # one seed shows no spread


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """Where one more seed's score lies with a probability of 95 %. Scores are errors: lower is better."""

    low: float
    high: float
    mean: float
    seeds: int

    def judge(self, score: float) -> str:
        if score > self.high:
            return WORSE
        return BETTER if score < self.low else WITHIN


def seed_spread(scores: Sequence[float], level: float = LEVEL) -> SeedSpread | None:
    """Prediction interval for one new observation from n: mean ± t(n − 1) · s · √(1 + 1/n), two-sided
    (Hahn & Meeker 1991, *Statistical Intervals*, section 4.7). None from fewer than two scores.

    Scores are taken as normal; with 3 seeds that costs ±5.0 s, with 5 ±3.0 s, with 10 ±2.4 s.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not np.all(np.isfinite(values)):
        raise ValueError("scores: contains a value that is not finite")
    n = values.size
    if n < FEWEST_SEEDS:
        return None
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    half = t_quantile(n - 1, level) * sd * math.sqrt(1 + 1 / n)
    return SeedSpread(low=mean - half, high=mean + half, mean=mean, seeds=n)


def worst(verdicts: Sequence[str]) -> str:
    """One word of several scores: worse where any is worse, better where any is better and none worse."""
    known = [verdict for verdict in verdicts if verdict != NOT_JUDGED]
    for word in (WORSE, BETTER, WITHIN):
        if word in known:
            return word
    return NOT_JUDGED
