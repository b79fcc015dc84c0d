"""Velocity MSE: exact against a plain computation, whatever batch, mode or precision surrounds it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tinydit_ray.quality import sample_images, velocity_mse


class SmallModel(nn.Module):
    """A velocity that depends on x, t, the mode (dropout, batch norm) and the precision it is run in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.mix = nn.Linear(32, 32)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        out = self.mix(self.conv(x))
        self.seen.add(out.dtype)
        return self.drop(self.norm(out)) * t.view(-1, 1, 1, 1)


@pytest.fixture
def images() -> Tensor:
    return torch.randint(
        0, 256, (37, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def expected_mse(model: nn.Module, images: Tensor, seed: int) -> float:
    """One image at a time, in float64, from the formulas of flow matching."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.rand(len(images), generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    model = model.double().eval()
    total = 0.0
    with torch.no_grad():
        for i in range(len(images)):
            x0 = images[i : i + 1].double() / 127.5 - 1
            e, ti = noise[i : i + 1].double(), t[i : i + 1].double()
            total += float((model((1 - ti) * x0 + ti * e, ti) - (e - x0)).square().sum())
    return total / images.numel()


def test_equals_the_definition(images: Tensor):
    assert velocity_mse(SmallModel(), images, seed=3) == pytest.approx(
        expected_mse(SmallModel(), images, 3), rel=1e-6
    )


def test_a_model_that_predicts_zero_scores_the_target_itself(images: Tensor):
    # E[(noise - x0)^2] = 1 + mean(x0^2) for noise of variance 1
    pixels = images.float() / 127.5 - 1
    score = velocity_mse(lambda x, t: torch.zeros_like(x), images)
    assert score == pytest.approx(1 + float(pixels.square().mean()), rel=0.02)


@pytest.mark.parametrize("batch", [1, 7, 36, 64])
def test_batch_size_and_odd_tails_do_not_matter(images: Tensor, batch: int):
    model = SmallModel()
    assert velocity_mse(model, images, batch_size=batch) == pytest.approx(
        velocity_mse(model, images, batch_size=37), rel=1e-7
    )


def test_uint8_and_float_images_are_the_same_and_the_seed_counts(images: Tensor):
    model = SmallModel()
    score = velocity_mse(model, images)
    assert velocity_mse(model, images.float() / 127.5 - 1) == score
    assert velocity_mse(model, images, seed=1) != score


def test_runs_in_fp32_inside_autocast(images: Tensor):
    model = SmallModel()
    plain = velocity_mse(model, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = velocity_mse(model, images)
    assert inside == plain
    assert model.seen == {torch.float32}


@pytest.fixture
def narrow_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")  # bf16 products on CPUs that have them
    yield
    torch.set_float32_matmul_precision("highest")


def test_narrow_products_are_not_used_and_put_back(images: Tensor, narrow_products: None):
    seen = []

    def model(x: Tensor, t: Tensor) -> Tensor:
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return x

    velocity_mse(model, images)
    assert set(seen) == {"ieee"}
    assert torch.get_float32_matmul_precision() == "medium"
    inside = velocity_mse(SmallModel(), images)
    torch.set_float32_matmul_precision("highest")
    assert inside == velocity_mse(SmallModel(), images)


def test_16_bit_weights_are_evaluated_as_an_fp32_copy(images: Tensor):
    narrow = SmallModel().bfloat16()
    rounded = SmallModel().bfloat16().float()
    assert velocity_mse(narrow, images) == velocity_mse(rounded, images)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


def test_modes_and_random_state_are_put_back(images: Tensor):
    model = SmallModel().train()
    model.norm.eval()  # a part kept in eval mode must not come back in training mode
    mean = model.norm.running_mean.clone()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = velocity_mse(lambda x, t: model(x, t) + 0 * torch.randn(1), images)
    assert torch.equal(torch.get_rng_state(), before)
    velocity_mse(model, images)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.training, model.conv.training, model.norm.training) == (True, True, False)
    assert torch.equal(model.norm.running_mean, mean)
    assert torch.isfinite(torch.tensor(first))


def test_modes_come_back_after_an_error(images: Tensor):
    model = SmallModel().train()
    with pytest.raises(RuntimeError):
        velocity_mse(model, images[:, :, :16, :15])
    assert model.training


def test_a_compiled_model_is_scored_as_its_plain_module(images: Tensor):
    def backend(graph: object, inputs: object) -> object:
        raise AssertionError("the compiled model was run")

    model = SmallModel()
    compiled = torch.compile(model, backend=backend)
    assert velocity_mse(compiled, images) == velocity_mse(model, images)
    model.conv.compile(backend=backend)  # compiled in place: there is no wrapper to take off
    assert velocity_mse(model, images) > 0


def test_a_broken_model_scores_nan_and_bad_input_is_refused(images: Tensor):
    assert math.isnan(velocity_mse(lambda x, t: x * float("nan"), images))
    with pytest.raises(ValueError, match="both must be positive"):
        velocity_mse(SmallModel(), images[:0])
    with pytest.raises(ValueError, match="must have the shape"):
        velocity_mse(SmallModel(), images[:, 0])


def test_sampling_restores_the_mode_and_does_not_depend_on_the_batch():
    model = SmallModel().train()
    noise = torch.randn(5, 3, 32, 32)
    one, all_ = (sample_images(model, noise, steps=3, batch_size=size) for size in (2, 5))
    torch.testing.assert_close(one, all_, rtol=1e-5, atol=1e-5)
    assert model.training
    heun = sample_images(model, noise, sampler="heun", steps=3)
    assert not torch.allclose(heun, all_, atol=1e-3)
    with pytest.raises(ValueError, match="sampler 'ddim' is not one of euler, heun"):
        sample_images(model, noise, sampler="ddim")
