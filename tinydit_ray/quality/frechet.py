"""Fréchet distance between two Gaussians, in float64 and without complex roots.

|m₁ − m₂|² + tr(S₁ + S₂ − 2 (S₁^½ S₂ S₁^½)^½), Dowson and Landau 1982; used on features by Heusel et al.,
arXiv:1706.08500. The matrix under the last root is symmetric and positive semi-definite, so ``eigh`` serves
where the usual sqrtm(S₁ S₂) needs complex arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FeatureStats:
    """Mean (F,) and covariance (F, F) of n feature vectors, in float64."""

    mean: Tensor
    cov: Tensor
    n: int

    @property
    def width(self) -> int:
        return len(self.mean)


class StatsAccumulator:
    """Sums features batch by batch in float64, so that the batch size does not matter.

    Sums are taken about the first vector seen: a constant feature has exactly no variance, and features
    far from zero lose no digits.
    """

    def __init__(self) -> None:
        self.n = 0
        self._origin: Tensor | None = None

    def add(self, features: Tensor) -> None:
        """Take in features (N, F). Raises ValueError where one is not a finite number."""
        rows = features.detach().to("cpu", torch.float64)
        if rows.ndim != 2:
            raise ValueError(f"features must have the shape (N, F), not {tuple(rows.shape)}")
        finite = torch.isfinite(rows).all(dim=1)
        if not bool(finite.all()):
            first = self.n + int((~finite).nonzero()[0])
            count = int((~finite).sum())
            raise ValueError(f"{count} feature vectors are not finite, the first is number {first}")
        if not len(rows):
            return
        if self._origin is None:
            self._origin = rows[0].clone()
            self._sum = torch.zeros_like(self._origin)
            self._outer = torch.zeros(len(self._origin), len(self._origin), dtype=torch.float64)
        rows = rows - self._origin
        self._sum += rows.sum(dim=0)
        self._outer += rows.T @ rows
        self.n += len(rows)

    def result(self) -> FeatureStats:
        """Mean and unbiased covariance; the covariance of a single vector is zero."""
        if self._origin is None:
            raise ValueError("no features: statistics need at least one image")
        mean = self._sum / self.n
        scatter = self._outer - self.n * torch.outer(mean, mean)
        cov = scatter / max(self.n - 1, 1)
        return FeatureStats(mean + self._origin, (cov + cov.T) / 2, self.n)


def feature_stats(features: Tensor) -> FeatureStats:
    """Statistics of features (N, F)."""
    accumulator = StatsAccumulator()
    accumulator.add(features)
    return accumulator.result()


def frechet_distance(a: FeatureStats, b: FeatureStats) -> float:
    """Squared Fréchet (2-Wasserstein) distance of two Gaussians: at least 0, and 0 for identical statistics.

    Raises ValueError where widths differ or a value is not finite.
    """
    if a.width != b.width:
        raise ValueError(f"feature widths differ: {a.width} and {b.width}")
    if not all(bool(torch.isfinite(x).all()) for x in (a.mean, a.cov, b.mean, b.cov)):
        raise ValueError("statistics hold values that are not finite")
    if torch.equal(a.mean, b.mean) and torch.equal(a.cov, b.cov):
        return 0.0
    cov_a, cov_b = a.cov.double(), b.cov.double()
    root_a = _root(cov_a)
    inner = root_a @ cov_b @ root_a
    shared = torch.linalg.eigvalsh((inner + inner.T) / 2).clamp_min(0).sqrt().sum()
    means = (a.mean.double() - b.mean.double()).square().sum()
    return max(0.0, float(means + cov_a.trace() + cov_b.trace() - 2 * shared))


def _root(cov: Tensor) -> Tensor:
    """Symmetric root of a covariance; rounding may leave tiny negative eigenvalues, which count as zero."""
    values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def score_flags(n: int, width: int) -> str:
    """Words that qualify a distance from n images, comma-separated; empty where there is nothing to say.

    With n ≤ F the covariance is singular: the number exists, but is mostly bias.
    """
    flags = []
    if n < 2:
        flags.append("fd-no-covariance")
    if n <= width:
        flags.append("fd-n-below-width")
    return ",".join(flags)
