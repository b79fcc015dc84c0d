"""probe-FD and what surrounds it, with a small untrained probe: only its features matter here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tinydit_ray.quality import (
    anchors,
    comparable,
    fixed_noise,
    frechet_distance,
    image_stats,
    make_grid,
    probe_features,
    probe_scores,
    reference_for,
    save_grid,
    score_model,
)
from tinydit_ray.quality.bias import halves_bias, reference_bias
from tinydit_ray.quality.classifier import Probe, new_probe
from tinydit_ray.quality.net import ProbeNet, to_pixels
from tinydit_ray.quality.scores import Reference


@dataclass(frozen=True)
class Split:
    images: Tensor
    source: str
    digest: str


def pictures(n: int, seed: int = 0) -> Tensor:
    """Smooth random uint8 pictures (n, 3, 32, 32)."""
    coarse = torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(coarse, size=32, mode="bilinear") * 255).to(torch.uint8)


@pytest.fixture(scope="module")
def probe() -> Probe:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = ProbeNet((4, 8, 8, 8))
    return new_probe("small", net, pictures(300), "aaaa", {})


@pytest.fixture(scope="module")
def reference(probe: Probe) -> Reference:
    return Reference(probe.stats, probe.probe_id)


def test_real_images_score_zero_and_noise_far_more(probe: Probe, reference: Reference):
    same = probe_scores(probe, pictures(300), reference)
    assert 0.0 <= same["probe_fd"] < 1e-9
    assert same["probe_fd_n"] == 300
    assert same["probe_id"] == f"small-{probe.digest[:12]}@aaaa"
    other, noise = (
        probe_scores(probe, x, reference)["probe_fd"] for x in (pictures(300, 1), fixed_noise(300))
    )
    assert 0 < 10 * other < noise


def test_real_features_may_be_a_tensor_or_statistics(probe: Probe, reference: Reference):
    images = pictures(40, 1)
    features, logits = probe_features(probe, pictures(300))
    assert (features.shape, logits.shape, features.dtype) == ((300, 8), (300, 10), torch.float32)
    scores = [probe_scores(probe, images, real)["probe_fd"] for real in (features, probe.stats, reference)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-9)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batch_size_does_not_change_the_score(probe: Probe, reference: Reference, batch: int):
    images = pictures(65, 3)
    score = probe_scores(probe, images, reference, batch_size=batch)["probe_fd"]
    assert score == pytest.approx(probe_scores(probe, images, reference)["probe_fd"], abs=1e-4, rel=1e-4)


def test_values_outside_the_range_are_clipped(probe: Probe):
    images = fixed_noise(10)
    assert float(images.abs().max()) > 1
    assert torch.equal(probe_features(probe, images)[0], probe_features(probe, images.clamp(-1, 1))[0])
    assert torch.equal(to_pixels(torch.full((1, 3, 2, 2), float("inf"))), torch.ones(1, 3, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_cast_to_fp32_first(probe: Probe, dtype: torch.dtype):
    images = (fixed_noise(10) / 4).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features, _ = probe_features(probe, images)
    assert features.dtype == torch.float32
    assert torch.equal(features, probe_features(probe, images.float())[0])


def test_uint8_images_equal_their_scaled_floats(probe: Probe):
    images = pictures(9)
    assert torch.equal(probe_features(probe, images)[0], probe_features(probe, images.float() / 127.5 - 1)[0])


def test_one_nan_image_is_an_error_that_names_it(probe: Probe, reference: Reference):
    images = fixed_noise(20)
    images[7, 1, 3, 3] = float("nan")
    with pytest.raises(ValueError, match="1 of 20 images hold NaN, the first is number 7"):
        probe_scores(probe, images, reference)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(0, 3, 32, 32), "no images"),
        (torch.zeros(3, 32, 32), "must have the shape"),
        (torch.zeros(2, 1, 32, 32), "must have the shape"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.int64), "must be uint8 or floats"),
    ],
)
def test_what_is_not_a_batch_of_images_is_refused(
    probe: Probe, reference: Reference, images: Tensor, words: str
):
    with pytest.raises(ValueError, match=words):
        probe_scores(probe, images, reference)


def test_few_and_constant_images_are_flagged_not_broken(probe: Probe, reference: Reference):
    one = probe_scores(probe, pictures(1, 2), reference)
    assert one["flags"] == "fd-no-covariance,fd-n-below-width"
    assert np.isfinite(one["probe_fd"])
    assert one["probe_fd"] > 0
    assert probe_scores(probe, pictures(8, 2), reference)["flags"] == "fd-n-below-width"
    constant = probe_scores(probe, torch.zeros(50, 3, 32, 32), reference)
    assert np.isfinite(constant["probe_fd"])
    assert constant["probe_fd"] > one["probe_fd"] / 10
    assert constant["flags"] == ""
    few_real = probe_scores(probe, pictures(50, 2), probe_features(probe, pictures(5))[0])
    assert few_real["flags"] == "fd-n-below-width"


def test_class_counts_are_the_probes_own_opinion(probe: Probe, reference: Reference):
    images = pictures(30, 4)
    counts = probe_scores(probe, images, reference)["class_counts"]
    wanted = np.bincount(probe_features(probe, images)[1].argmax(dim=1).numpy(), minlength=10)
    assert counts == wanted.tolist()


def test_shipped_statistics_serve_only_their_own_data(probe: Probe, tmp_path):
    same = reference_for(probe, Split(pictures(5), "cifar10", "aaaa"))
    assert same.stats is probe.stats
    other = reference_for(probe, Split(pictures(60, 9), "folder", "bbbb"), cache=tmp_path)
    assert other.stats.n == 60
    assert frechet_distance(other.stats, image_stats(probe, pictures(60, 9))) == 0.0
    assert other.probe_id != same.probe_id
    assert other.probe_id.endswith("@bbbb")
    cached = reference_for(probe, Split(pictures(1), "folder", "bbbb"), cache=tmp_path)
    assert cached.stats.n == 60
    assert torch.equal(cached.stats.cov, other.stats.cov)
    next(tmp_path.iterdir()).write_bytes(b"cut off")
    assert reference_for(probe, Split(pictures(7), "folder", "bbbb"), cache=tmp_path).stats.n == 7


def test_scores_of_different_probes_or_data_do_not_compare(probe: Probe):
    ids = [probe.probe_id, probe.id_for("bbbb"), replace(probe, digest="f" * 64).probe_id]
    assert len(set(ids)) == 3
    assert comparable([ids[0], ids[0]])
    assert not comparable(ids[:2])
    assert not comparable([ids[0], ids[2]])
    assert not comparable([""])
    assert not comparable([])


def test_score_of_a_model_that_points_at_one_image(probe: Probe, reference: Reference):
    # v(x, t) = (x - target) / t moves along a straight line: every Euler path ends in the target exactly.
    target = torch.full((3, 32, 32), 0.25)
    scores = score_model(
        lambda x, t: (x - target) / t.view(-1, 1, 1, 1),
        probe,
        reference,
        n=20,
        steps=4,
        batch_size=7,
        shown=3,
    )
    assert scores["images"].shape == (3, 3, 32, 32)
    assert scores["images"].dtype == torch.uint8
    assert set(scores["images"].unique().tolist()) == {159}  # (0.25 + 1) * 127.5 = 159.4
    assert scores["probe_fd"] == pytest.approx(
        probe_scores(probe, target.expand(20, 3, 32, 32), reference)["probe_fd"], rel=1e-4
    )
    assert (scores["sampler"], scores["steps"], scores["probe_fd_n"]) == ("euler", 4, 20)
    assert sum(scores["class_counts"]) == 20


def test_noise_is_fixed_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(fixed_noise(4), fixed_noise(4))
    assert not torch.equal(fixed_noise(4), fixed_noise(4, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_anchors_order_real_images_before_noise(probe: Probe, reference: Reference):
    rows = anchors(probe, reference, pictures(200, 5), n=100, model=lambda x, t: x, steps=(2, 3))
    assert list(rows) == ["real", "noise", "euler 2", "euler 3"]
    assert rows["real"]["probe_fd"] < rows["noise"]["probe_fd"]
    assert {row["probe_fd_n"] for row in rows.values()} == {100}
    assert {row["probe_id"] for row in rows.values()} == {reference.probe_id}


def test_bias_falls_with_n_and_halves_are_disjoint(probe: Probe):
    features, _ = probe_features(probe, pictures(400, 6))
    rows = halves_bias(features, sizes=(20, 100, 200, 300), draws=6)
    assert [row.n for row in rows] == [20, 100, 200]  # 300 has no second half
    assert rows[0].mean > 2 * rows[1].mean > 2 * rows[2].mean > 0
    assert rows[0].sd > 0
    assert rows[0].draws == 6
    # One half against its own statistics would be 0 for n = N; against others it is not.
    real = reference_bias(features, image_stats(probe, pictures(400, 6)), sizes=(20, 400), draws=2)
    assert real[1].mean < 1e-9 < real[0].mean


def test_grid_places_images_in_reading_order(tmp_path):
    images = torch.stack([torch.full((3, 4, 5), value) for value in (-1.0, 0.0, 1.0)])
    grid = make_grid(images, nrow=2, padding=1)
    assert grid.shape == (3, 2 * 5 + 1, 2 * 6 + 1)
    assert [int(grid[0, 1, 1]), int(grid[0, 1, 7]), int(grid[0, 6, 1]), int(grid[0, 6, 7])] == [
        0,
        128,
        255,
        255,
    ]
    path = save_grid(images * 3, tmp_path / "deep" / "samples.png", nrow=2)
    with Image.open(path) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (2 * 7 + 2, 2 * 6 + 2))
        assert picture.getpixel((2, 2)) == (0, 0, 0)


def test_grid_of_colours_and_of_few_images(tmp_path):
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    images[:, 0] = 200
    with Image.open(save_grid(images, tmp_path / "one.png", nrow=8)) as picture:
        assert picture.size == (12, 12)
        assert picture.getpixel((5, 5)) == (200, 0, 0)
    with pytest.raises(ValueError, match="needs images"):
        save_grid(images[:0], tmp_path / "none.png")
