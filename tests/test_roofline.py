"""The roofs and the traffic of a roofline: counts against closed forms, rates against what can be."""

from __future__ import annotations

import pytest
import torch

from tinydit_ray.bench import peak
from tinydit_ray.bench.traffic import ADAMW_PASSES, _counter, gbytes_per_step
from tinydit_ray.config import from_mapping
from tinydit_ray.network import build_network

TINY = {"model": "tiny", "batch_size": 128}


def test_an_operation_moves_its_inputs_and_outputs_and_a_view_nothing():
    a, b = torch.ones(100, 50), torch.ones(50, 20)
    with _counter() as counted:
        product = a.t().t() @ b
        product.view(-1)
    assert counted.total == 4 * (100 * 50 + 50 * 20 + 100 * 20)
    with _counter() as counted:
        torch.ones(1).expand(1000) + a[0, 0]
    assert counted.total < 4 * 1100  # a broadcast value is one value


def test_twice_the_batch_moves_twice_the_activations_and_the_weights_once():
    one, two = (gbytes_per_step(from_mapping({**TINY, "batch_size": size})) for size in (64, 128))
    assert one is not None
    assert two is not None
    weights = sum(p.numel() for p in build_network(from_mapping(TINY)).parameters()) * 4 / 1e9
    share = 2 * one - two  # what does not grow with the batch
    assert ADAMW_PASSES * weights < share < 0.02 * two


def test_16_bit_tokens_move_less_and_switches_of_kernels_nothing():
    plain = gbytes_per_step(from_mapping(TINY))
    assert gbytes_per_step(from_mapping({**TINY, "attention": "sdpa", "compile": "default"})) == plain
    half = gbytes_per_step(from_mapping({**TINY, "precision": "bf16-weights"}))
    assert plain is not None
    assert half is not None
    assert 0.4 < half / plain < 0.7
    full = gbytes_per_step(from_mapping({**TINY, "precision": "bf16", "residual": "autocast"}))
    assert full is not None
    assert half < full < 1.2 * plain


def test_a_net_that_cannot_be_counted_has_no_traffic():
    assert gbytes_per_step(from_mapping({"model": "own_nets:wrong_shape"})) is None


def test_the_bandwidth_is_a_rate_that_memory_can_have(monkeypatch):
    rate = peak.measure_gbytes_per_s("cpu", megabytes=64, seconds=0.1)
    assert rate is not None
    assert 0.5 < rate < 2000
    monkeypatch.setattr(peak, "available_mb", lambda: 100.0)
    assert peak.measure_gbytes_per_s("cpu") is None  # withheld where no array fits that a cache would not hold


def test_a_memory_limit_costs_the_rate_and_not_the_cell(monkeypatch):
    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "ones", full)
    assert peak.measure_gbytes_per_s("cpu") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_matmul_peak_is_above_what_one_small_matmul_reaches(precision):
    rate, source = peak.peak_tflops(precision, "cpu")
    assert source == "measured"
    assert 0.001 < rate < 1000


def test_a_dtype_without_arithmetic_of_its_own_is_probed_with_matmuls_that_it_can_afford(monkeypatch):
    """16-bit matmuls of a processor that has to convert: seconds for a large one."""
    sizes, now = [], [0.0]

    def slow(size: int, dtype: torch.dtype, device: str):
        sizes.append(size)
        return lambda: now.__setitem__(0, now[0] + 2 * size**3 / 2e9)

    monkeypatch.setattr(peak, "_matmul", slow)
    monkeypatch.setattr(peak.time, "perf_counter", lambda: now[0])
    assert peak.measure_tflops(torch.float16, "cpu") == pytest.approx(2e-3)
    assert sizes == [192, 384]  # the latter 0.06 s: one of 768 is not begun, still less the 3.6 s of the largest
    assert now[0] < 0.6
