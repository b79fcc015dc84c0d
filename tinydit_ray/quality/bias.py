"""How much of a probe-FD is only the number of images: distances between real images and real images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinydit_ray.quality.frechet import FeatureStats, feature_stats, frechet_distance

SIZES = (250, 500, 1000, 5000)


@dataclass(frozen=True)
class BiasRow:
    """Mean and standard deviation (over random draws) of a distance that would be 0 for endless images."""

    n: int
    mean: float
    sd: float
    draws: int


def halves_bias(
    features: Tensor, *, sizes: Sequence[int] = SIZES, draws: int = 10, seed: int = 0
) -> list[BiasRow]:
    """Distance between two disjoint random sets of n features each, out of features (N, F).

    Sizes above N / 2 are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n in (size for size in sizes if 2 * size <= len(features)):
        values = []
        for _ in range(draws):
            order = torch.randperm(len(features), generator=generator)
            pair = [feature_stats(features[order[start : start + n]]) for start in (0, n)]
            values.append(frechet_distance(pair[0], pair[1]))
        rows.append(_row(n, values))
    return rows


def reference_bias(
    features: Tensor, real: FeatureStats, *, sizes: Sequence[int] = SIZES, draws: int = 10, seed: int = 0
) -> list[BiasRow]:
    """Distance of n random features out of (N, F) to fixed statistics, as every score is taken."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n in (size for size in sizes if size <= len(features)):
        picks = [torch.randperm(len(features), generator=generator)[:n] for _ in range(draws)]
        rows.append(_row(n, [frechet_distance(feature_stats(features[pick]), real) for pick in picks]))
    return rows


def _row(n: int, values: list[float]) -> BiasRow:
    sample = torch.tensor(values, dtype=torch.float64)
    return BiasRow(n, float(sample.mean()), float(sample.std()) if len(values) > 1 else 0.0, len(values))
