"""The generated picture set: the same everywhere, varied, and learnable though not at once."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tinydit_ray.data import DataSpec, draw_shapes, load, prepare, to_pixels
from tinydit_ray.data.shapes import CLASS_NAMES
from tinydit_ray.data.spec import split_digest


@pytest.mark.slow
def test_the_default_set_is_the_same_on_every_machine(tmp_path):
    """Pinned: a change of one pixel is a new data set and needs a new version of the decoder."""
    spec = prepare(DataSpec(source="shapes", root=""), tmp_path)
    assert spec.digest == "249538908ac2d834"
    train, test = load(spec, "train", tmp_path), load(spec, "test", tmp_path)
    assert train.images.shape == (10_000, 3, 32, 32)
    assert train.labels.bincount().tolist() == [1_000] * 10
    assert test.labels.bincount().tolist() == [200] * 10
    assert train.source == "shapes"
    assert "not photographs" in train.notes[0]


def test_a_picture_depends_on_seed_split_and_index_alone():
    many, few = draw_shapes(600)[0], draw_shapes(7)[0]
    assert torch.equal(many[:7], few)
    assert split_digest(*draw_shapes(50)) == split_digest(*draw_shapes(50, seed=0, split="train"))
    others = draw_shapes(50, seed=1), draw_shapes(50, split="test")
    assert len({split_digest(*each) for each in (draw_shapes(50), *others)}) == 3


def test_no_two_pictures_are_equal_and_splits_do_not_overlap():
    pictures = torch.cat([draw_shapes(1000)[0], draw_shapes(1000, split="test")[0]])
    assert len(torch.unique(pictures.flatten(1), dim=0)) == 2000


def test_pictures_are_textured_and_varied():
    pixels = to_pixels(draw_shapes(500)[0])
    assert pixels.std((1, 2, 3)).min() > 0.02  # no picture is plain
    steps = (pixels[..., 1:] - pixels[..., :-1]).abs().flatten(1)
    assert (steps > 0).float().mean() > 0.9  # texture and noise everywhere
    assert pixels.mean((2, 3)).std(0).min() > 0.2  # colours differ from picture to picture
    assert pixels.mean((0, 2, 3)).abs().max() < 0.2  # and favour none


@pytest.mark.slow
def test_a_small_classifier_learns_them_but_not_at_once():
    images, labels = draw_shapes(4_000)
    test_images, test_labels = draw_shapes(1_000, split="test")
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, len(CLASS_NAMES)),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    accuracies = []
    for _ in range(5):
        for rows in torch.randperm(4_000, generator=generator).split(100):
            optimizer.zero_grad()
            cross_entropy(model(to_pixels(images[rows])), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            guesses = model(to_pixels(test_images)).argmax(1)
        accuracies.append((guesses == test_labels).float().mean().item())
    assert accuracies[0] < 0.6
    assert accuracies[-1] > 0.2  # chance is 0.1
    print(accuracies)
