"""Flow matching: the loss against float64, the samplers against closed forms and exact solutions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tinydit_ray.flow import euler_sample, flow_matching_loss, heun_sample, interpolate
from tinydit_ray.model import TinyDiTConfig, build_model

SAMPLERS = (euler_sample, heun_sample)


pytestmark = pytest.mark.usefixtures("one_thread")


def batch(n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(n, 3, 8, 8, generator=generator) for _ in range(2))
    return x0, noise, torch.rand(n, generator=generator)


def noise64(n: int = 3) -> Tensor:
    return torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def linear_model(x: Tensor, t: Tensor) -> Tensor:
    return 0.7 * x - 0.3 * t.view(-1, 1, 1, 1) + 0.1


# --- the loss ---------------------------------------------------------------------------------------------


def test_loss_against_float64():
    x0, noise, t = (part.double().numpy() for part in batch())
    x_t = np.empty_like(x0)
    for i, time in enumerate(t):
        x_t[i] = (1 - time) * x0[i] + time * noise[i]
    predicted = 0.7 * x_t - 0.3 * t[:, None, None, None] + 0.1
    expected = np.mean((predicted - (noise - x0)) ** 2)
    loss = flow_matching_loss(linear_model, batch())
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_time_zero_is_data_and_time_one_is_noise():
    x0, noise, _ = batch()
    at_0, velocity = interpolate(x0, noise, torch.zeros(6))
    at_1, _ = interpolate(x0, noise, torch.ones(6))
    assert torch.equal(at_0, x0)
    assert torch.equal(at_1, noise)
    assert torch.equal(velocity, noise - x0)


def test_velocity_is_the_derivative_of_the_path():
    x0, noise, t = (part.double() for part in batch())
    ahead, velocity = interpolate(x0, noise, t + 0.01)
    here, _ = interpolate(x0, noise, t)
    torch.testing.assert_close((ahead - here) / 0.01, velocity)


def test_a_model_that_knows_the_velocity_has_no_loss():
    x0, noise, t = batch()
    assert flow_matching_loss(lambda _x, _t: noise - x0, (x0, noise, t)).item() == 0


def test_16_bit_predictions_are_compared_in_fp32():
    x0, noise, t = batch()
    loss = flow_matching_loss(lambda x, t: linear_model(x, t).bfloat16(), (x0, noise, t))
    assert loss.dtype == torch.float32
    rounded = linear_model(interpolate(x0, noise, t)[0], t).bfloat16().double()
    assert loss.item() == pytest.approx((rounded - (noise - x0).double()).square().mean().item(), rel=1e-6)


def test_images_alone_and_images_with_labels_are_the_same_batch():
    x0, labels = batch()[0], torch.arange(6)
    losses = []
    for form in (x0, (x0, labels), [x0, labels], (x0,)):
        torch.manual_seed(3)
        losses.append(flow_matching_loss(linear_model, form).item())
    assert len(set(losses)) == 1
    torch.manual_seed(4)
    assert flow_matching_loss(linear_model, x0).item() != losses[0]


def test_a_complete_batch_draws_nothing():
    state = torch.get_rng_state()
    losses = {flow_matching_loss(linear_model, form).item() for form in (batch(), list(batch()))}
    assert len(losses) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_drawn_times_are_uniform_and_drawn_noise_is_normal():
    seen: list[Tensor] = []

    def spy(x: Tensor, t: Tensor) -> Tensor:
        seen.extend([x, t])
        return x

    torch.manual_seed(0)
    flow_matching_loss(spy, torch.zeros(4000, 1, 2, 2))  # of black images x_t is t · noise
    x_t, t = seen
    assert stats.kstest(t.numpy(), "uniform").pvalue > 1e-3
    noise = (x_t / t.view(-1, 1, 1, 1)).flatten().numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-3


# --- the samplers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4, 20])
@pytest.mark.parametrize("a", [-0.8, 0.5, 3.0])
def test_euler_of_a_linear_field_is_its_closed_form(a: float, steps: int):
    noise = noise64()
    out = euler_sample(lambda x, _t: a * x, noise, steps=steps)
    torch.testing.assert_close(out, noise * (1 - a / steps) ** steps, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_heun_of_a_linear_field_is_its_closed_form(steps: int):
    noise, a = noise64(), 1.5
    out = heun_sample(lambda x, _t: a * x, noise, steps=steps)
    factor = 1 - a / steps + (a / steps) ** 2 / 2
    torch.testing.assert_close(out, noise * factor**steps, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 8, 64])
def test_a_constant_field_is_followed_exactly(sampler: Callable[..., Tensor], steps: int):
    noise = torch.arange(32.0).reshape(1, 2, 4, 4)
    assert torch.equal(sampler(lambda x, _t: torch.full_like(x, 3.0), noise, steps=steps), noise - 3)


@pytest.mark.parametrize(("sampler", "order"), [(euler_sample, 1), (heun_sample, 2)])
def test_order_of_convergence(sampler: Callable[..., Tensor], order: int):
    """dx/dt = x (1 + t) has x(0) = x(1) exp(-3/2); halving the step divides the error by 2^order."""
    noise = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    exact = math.exp(-1.5)

    def error(steps: int) -> float:
        out = sampler(lambda x, t: x * (1 + t.double()).view(-1, 1, 1, 1), noise, steps=steps)
        return abs(out.flatten()[0].item() - exact)

    assert math.log2(error(32) / error(64)) == pytest.approx(order, abs=0.1)
    assert error(64) < 0.02


@pytest.mark.parametrize(("sampler", "calls"), [(euler_sample, [1, 0.75, 0.5, 0.25]),
                                                (heun_sample, [1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0])])  # fmt: skip
def test_the_times_at_which_the_model_is_asked(sampler: Callable[..., Tensor], calls: list[float]):
    seen: list[Tensor] = []

    def spy(x: Tensor, t: Tensor) -> Tensor:
        seen.append(t)
        return x

    sampler(spy, noise64(3), steps=4)
    assert [t.tolist() for t in seen] == [[time] * 3 for time in calls]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [3, 7, 49])
def test_times_stay_within_zero_and_one(sampler: Callable[..., Tensor], steps: int):
    def check(x: Tensor, t: Tensor) -> Tensor:
        assert t.min() >= 0
        assert t.max() <= 1
        return x

    sampler(check, noise64(1), steps=steps)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_follow_from_the_noise_alone(sampler: Callable[..., Tensor]):
    model = build_model(TinyDiTConfig(dim=32, depth=1), seed=0)
    noise = torch.randn(2, 3, 32, 32)
    kept = noise.clone()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = sampler(model, noise, steps=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(sampler(model, noise, steps=3), first)
    assert torch.equal(noise, kept)
    assert not first.requires_grad
    assert first.shape == noise.shape


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_16_bit_velocities_do_not_lower_the_samples_precision(sampler: Callable[..., Tensor]):
    out = sampler(lambda x, _t: x.bfloat16(), torch.randn(1, 3, 4, 4), steps=2)
    assert out.dtype == torch.float32


def test_twenty_euler_steps_are_the_default():
    calls: list[Tensor] = []
    euler_sample(lambda x, t: calls.append(t) or x, noise64(1))
    assert len(calls) == 20


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_refused(sampler: Callable[..., Tensor], steps: int):
    with pytest.raises(ValueError, match=f"steps {steps}"):
        sampler(linear_model, noise64(), steps=steps)
