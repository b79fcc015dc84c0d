"""The Fréchet distance against closed forms and scipy, and on the sets that break careless versions of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from tinydit_ray.quality.frechet import (
    FeatureStats,
    StatsAccumulator,
    feature_stats,
    frechet_distance,
    score_flags,
)


def gaussian(mean: list[float], cov: torch.Tensor | list[list[float]], n: int = 1000) -> FeatureStats:
    return FeatureStats(torch.tensor(mean, dtype=torch.float64), torch.as_tensor(cov, dtype=torch.float64), n)


def random_features(n: int, width: int, seed: int, *, dead: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    features = torch.randn(n, width, generator=generator) @ mix + torch.randn(width, generator=generator)
    if dead:
        features[:, :dead] = 0.0
    return features


def test_univariate_closed_form():
    # (m1 - m2)^2 + (s1 - s2)^2
    a, b = gaussian([1.0], [[4.0]]), gaussian([-2.0], [[9.0]])
    assert frechet_distance(a, b) == pytest.approx(3.0**2 + 1.0**2, rel=1e-12)


def test_commuting_covariances_closed_form():
    turn = torch.linalg.qr(
        torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    )[0]
    one = torch.tensor([0.1, 1.0, 4.0, 9.0, 25.0], dtype=torch.float64)
    two = torch.tensor([9.0, 4.0, 0.5, 0.0, 1.0], dtype=torch.float64)
    a = gaussian([0.0] * 5, turn @ torch.diag(one) @ turn.T)
    b = gaussian([1.0, 0.0, 2.0, 0.0, 0.0], turn @ torch.diag(two) @ turn.T)
    expected = 5.0 + float((one.sqrt() - two.sqrt()).square().sum())
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-6)


def test_two_by_two_closed_form_that_does_not_commute():
    # A 2x2 M with eigenvalues >= 0 has tr sqrt(M) = sqrt(tr M + 2 sqrt(det M)); S1 S2 has the same ones.
    s1 = torch.tensor([[2.0, 0.7], [0.7, 1.0]], dtype=torch.float64)
    s2 = torch.tensor([[1.0, -0.4], [-0.4, 3.0]], dtype=torch.float64)
    product = s1 @ s2
    shared = math.sqrt(float(product.trace()) + 2 * math.sqrt(float(torch.det(product))))
    expected = float(s1.trace() + s2.trace()) - 2 * shared
    assert frechet_distance(gaussian([0.0, 0.0], s1), gaussian([0.0, 0.0], s2)) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agrees_with_scipy_where_that_is_well_conditioned(seed: int):
    a = feature_stats(random_features(4000, 32, seed))
    b = feature_stats(random_features(3000, 32, seed + 10))
    root = np.real(scipy.linalg.sqrtm(a.cov.numpy() @ b.cov.numpy()))
    expected = float((a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace()) - 2 * np.trace(root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)


def test_statistics_agree_with_numpy():
    features = random_features(257, 9, 5)
    stats = feature_stats(features)
    wide = features.double().numpy()
    np.testing.assert_allclose(stats.mean.numpy(), wide.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats.cov.numpy(), np.cov(wide, rowvar=False), rtol=1e-10, atol=1e-14)
    assert stats.mean.dtype == stats.cov.dtype == torch.float64
    assert stats.n == 257


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batch_size_does_not_change_statistics(batch: int):
    features = random_features(200, 16, 1) + 1000.0  # far from zero: sums in fp32 would lose digits
    accumulator = StatsAccumulator()
    for chunk in features.split(batch):
        accumulator.add(chunk)
    stats, whole = accumulator.result(), feature_stats(features)
    assert stats.n == whole.n
    torch.testing.assert_close(stats.cov, whole.cov, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(stats.mean, whole.mean, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("n", [10, 200])
def test_identical_sets_are_zero_and_never_negative(n: int):
    features = random_features(n, 32, 2, dead=3)
    assert frechet_distance(feature_stats(features), feature_stats(features.clone())) == 0.0
    shuffled = features[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    distance = frechet_distance(feature_stats(features), feature_stats(shuffled))
    assert 0.0 <= distance < 1e-9


def test_symmetric_and_growing_with_the_shift():
    features = random_features(500, 8, 4)
    real = feature_stats(features)
    distances = [frechet_distance(feature_stats(features + shift), real) for shift in (0.1, 0.2, 0.4)]
    assert distances == pytest.approx([8 * 0.01, 8 * 0.04, 8 * 0.16], rel=1e-4)


def test_one_image_has_no_covariance_and_says_so():
    real = feature_stats(random_features(500, 8, 0))
    one = feature_stats(random_features(1, 8, 1))
    assert torch.count_nonzero(one.cov) == 0
    expected = float((one.mean - real.mean).square().sum() + real.cov.trace())
    assert frechet_distance(one, real) == pytest.approx(expected, rel=1e-12)
    assert score_flags(1, 8) == "fd-no-covariance,fd-n-below-width"


def test_flags_below_the_width_only():
    assert score_flags(8, 8) == "fd-n-below-width"  # n - 1 degrees of freedom: 8 vectors span 7
    assert score_flags(9, 8) == ""


def test_a_dead_feature_and_constant_sets_give_finite_distances():
    real = feature_stats(random_features(300, 6, 0, dead=2))
    other = feature_stats(random_features(300, 6, 1, dead=2))
    full = [frechet_distance(a, b) for a, b in ((real, other), (other, real))]
    reduced = frechet_distance(*(FeatureStats(s.mean[2:], s.cov[2:, 2:], s.n) for s in (real, other)))
    assert full == pytest.approx([reduced, reduced], abs=1e-6)
    constant = feature_stats(torch.full((50, 6), 0.1))
    assert torch.count_nonzero(constant.cov) == 0
    expected = float((constant.mean - real.mean).square().sum() + real.cov.trace())
    assert frechet_distance(constant, real) == pytest.approx(expected, rel=1e-12)


def test_what_is_not_a_number_is_refused():
    features = random_features(20, 4, 0)
    features[13, 2] = float("nan")
    accumulator = StatsAccumulator()
    accumulator.add(features[:10])
    with pytest.raises(ValueError, match="1 feature vectors are not finite, the first is number 13"):
        accumulator.add(features[10:])
    good = feature_stats(features[:10])
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance(FeatureStats(good.mean, good.cov * float("nan"), 10), good)


def test_widths_and_empty_sets_are_refused():
    with pytest.raises(ValueError, match="widths differ: 4 and 5"):
        frechet_distance(feature_stats(random_features(9, 4, 0)), feature_stats(random_features(9, 5, 0)))
    with pytest.raises(ValueError, match="at least one image"):
        StatsAccumulator().result()
