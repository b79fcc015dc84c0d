"""Statistics of paired timing: values worked out by hand, invariances, degenerate input, verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from tinydit_ray.bench.stats import (
    Estimate,
    abba_ratios,
    break_even_steps,
    ci_reached,
    images_per_s,
    mfu,
    pooled_ms,
    round_speedup,
    scaling_efficiency,
    summarise,
    tflops_per_s,
)
from tinydit_ray.bench.verdict import (
    DEFAULT_PROCESS_SD,
    VERDICTS,
    Floor,
    Pooled,
    half_width_vs_time,
    noise_floor,
    pooled_speedups,
    verdict,
)

BAD_TIMES = ([1.0, 0.0, 2.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0], [[1.0, 2.0]])
times = st.lists(st.floats(1e-3, 1e4), min_size=4, max_size=60)


def estimate(log_ratio: float, se: float, n: int = 20) -> Estimate:
    """A round whose interval implies the standard error ``se``."""
    half = reference.t.ppf(0.975, n - 1) * se
    return Estimate(math.exp(log_ratio), math.exp(log_ratio - half), math.exp(log_ratio + half), n)


# --- series of one process -------------------------------------------------------------------------------


def test_summary_of_a_known_series():
    summary = summarise(range(1, 12))  # 1..11: percentiles fall on whole numbers
    assert (summary.ms_per_step, summary.iqr, summary.p10, summary.p90, summary.n) == (6, 5, 2, 10, 11)


def test_quads_in_time_order_and_above_one_means_the_cell_is_faster():
    # A B B A | A B B A; cell 10, 12 | 10, 10; control 20, 24 | 30, 30; one step too many on either side
    ratios = abba_ratios([10, 12, 10, 10, 7], [20, 24, 30, 30, 99])
    assert ratios.tolist() == [2.0, 3.0]
    assert abba_ratios([10, 12, 10], [20, 24, 30, 30]).tolist() == [2.0]
    assert abba_ratios([10], [20, 24]).size == 0


def test_linear_drift_cancels_inside_a_quad():
    at = np.arange(40).reshape(10, 4)
    drift = 100 * (1 + 0.01 * at)
    assert abba_ratios(drift[:, [0, 3]].ravel(), drift[:, [1, 2]].ravel()) == pytest.approx(np.ones(10))


@pytest.mark.parametrize("bad", BAD_TIMES)
def test_zeros_nan_and_wrong_shapes_are_refused(bad):
    calls = (summarise, round_speedup, pooled_ms, lambda x: abba_ratios(x, x), lambda x: ci_reached(x, 0.1))
    for call in calls:
        with pytest.raises(ValueError, match=r"above zero|finite|1-D"):
            call(bad)


def test_empty_series_are_refused_where_nothing_can_be_said():
    for call in (summarise, round_speedup, pooled_ms):
        with pytest.raises(ValueError, match="no "):
            call([])
    assert ci_reached([], 0.1) is False


def test_one_quad_has_a_value_and_no_interval():
    one = round_speedup([1.25])
    assert one.value == pytest.approx(1.25)
    assert one.n == 1
    assert all(math.isnan(x) for x in (one.ci_low, one.ci_high, one.se_log, one.half_width))


def test_constant_series_has_an_interval_of_no_width():
    for n in (2, 5, 6, 50):
        constant = round_speedup([1.5] * n)
        assert (constant.value, constant.ci_low, constant.ci_high) == pytest.approx((1.5, 1.5, 1.5))
        assert constant.se_log == pytest.approx(0, abs=1e-12)


def test_few_quads_get_student_t_around_the_median():
    logs = np.array([0.01, 0.05, 0.03])
    got = round_speedup(np.exp(logs))
    half = 4.302653 * 0.02 / math.sqrt(3)  # t(97.5 %, 2 df); the standard deviation is 0.02
    assert math.log(got.ci_low) == pytest.approx(0.03 - half, abs=1e-6)
    assert math.log(got.ci_high) == pytest.approx(0.03 + half, abs=1e-6)
    assert got.se_log == pytest.approx(0.02 / math.sqrt(3))


@pytest.mark.parametrize("n", [6, 9, 25, 101, 400])
def test_interval_is_the_resampled_bootstrap_of_the_median(n):
    logs = np.random.default_rng(n).standard_t(3, n) * 0.03
    boot = reference.bootstrap((logs,), np.median, n_resamples=20_000, method="percentile", rng=1)
    got = round_speedup(np.exp(logs))
    low, high = boot.confidence_interval
    near = 0.4 * (high - low) / math.sqrt(n)  # order statistics are steps: 16 % of the width at 6 quads
    assert math.log(got.ci_low) == pytest.approx(low, abs=near)
    assert math.log(got.ci_high) == pytest.approx(high, abs=near)
    assert got.value == pytest.approx(math.exp(np.median(logs)))


@settings(deadline=None, max_examples=60)
@given(times, times)
def test_swapping_cell_and_control_inverts_the_ratio_and_mirrors_the_interval(cell, control):
    there, back = round_speedup(abba_ratios(cell, control)), round_speedup(abba_ratios(control, cell))
    assert there.value == pytest.approx(1 / back.value)
    assert there.ci_low == pytest.approx(1 / back.ci_high, nan_ok=True)
    assert there.ci_high == pytest.approx(1 / back.ci_low, nan_ok=True)
    assert there.half_width == pytest.approx(back.half_width, rel=1e-6, abs=1e-9)
    one, other = (pooled_speedups({"x": [e, e]})["x"] for e in (there, back))
    assert (one.ci_low, one.ci_high) == pytest.approx((1 / other.ci_high, 1 / other.ci_low))
    mirrored = {"faster": "slower", "slower": "faster"}
    assert verdict(one) == mirrored.get(verdict(other), verdict(other))


@settings(deadline=None, max_examples=60)
@given(times, times, st.floats(1e-3, 1e3))
def test_scaling_all_times_leaves_the_ratios_unchanged(cell, control, factor):
    scaled = abba_ratios(np.multiply(cell, factor), np.multiply(control, factor))
    assert scaled == pytest.approx(abba_ratios(cell, control), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=40))
def test_the_value_lies_in_its_interval_and_the_order_of_quads_does_not_matter(ratios):
    got = round_speedup(ratios)
    assert got.ci_low * (1 - 1e-12) <= got.value <= got.ci_high * (1 + 1e-12)
    assert round_speedup(ratios[::-1]) == got


def test_ci_reached_needs_ten_quads_and_a_narrow_interval():
    ratios = np.exp(np.random.default_rng(0).normal(0, 0.03, 400))
    assert not ci_reached(ratios[:9], 10.0)
    assert not ci_reached(ratios[:10], 0.005)
    assert ci_reached(ratios, 0.005)
    with pytest.raises(ValueError, match="half_width"):
        ci_reached(ratios, 0.0)


def test_a_round_comes_back_from_its_columns():
    got = round_speedup(np.exp(np.random.default_rng(0).normal(0, 0.03, 21)))
    again = Estimate.from_columns(got.value, got.ci_low, got.ci_high, timed_steps=42)
    assert again == got
    assert again.se_log == got.se_log
    assert math.isnan(Estimate.from_columns(1.1, None, None, 2).se_log)


# --- rates and helpers -----------------------------------------------------------------------------------


def test_rates_by_hand():
    assert images_per_s(64.0, 128) == 2000.0
    assert tflops_per_s(50.0, 25.0) == 2.0  # 50 GFLOP in 25 ms
    assert mfu(2.0, 8.0) == 0.25
    assert mfu(2.0, None) is None
    assert pooled_ms([70.0, 90.0, 71.0]) == 71.0


def test_break_even_by_hand():
    assert break_even_steps(8.0, 60.0, 80.0) == 400.0  # 8 s won back at 20 ms a step
    assert break_even_steps(8.0, 80.0, 80.0) is None
    assert break_even_steps(8.0, 162.2, 75.7) is None
    assert break_even_steps(-0.1, 60.0, 80.0) == 0.0


def test_scaling_efficiency_by_hand():
    assert scaling_efficiency(3000.0, 1000.0, 4) == 0.75
    with pytest.raises(ValueError, match="workers"):
        scaling_efficiency(1.0, 1.0, 0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rates_refuse_times_that_are_none(value):
    for call in (lambda v: images_per_s(v, 1), lambda v: tflops_per_s(1, v), lambda v: mfu(1, v)):
        with pytest.raises(ValueError, match="above zero"):
            call(value)


# --- pooling ---------------------------------------------------------------------------------------------


def test_pooled_interval_by_hand():
    """Two cells, three rounds each, standard errors 0.01; logs 0.00 0.02 0.04 and 0.10 0.10 0.13."""
    cells = {
        "a": [estimate(x, 0.01) for x in (0.00, 0.02, 0.04)],
        "b": [estimate(x, 0.01) for x in (0.10, 0.10, 0.13)],
    }
    within, var_a, var_b = 1e-4, 4e-4, 3e-4
    tau2 = (2 * 0.015**2 + 2 * (var_a - within) + 2 * (var_b - within)) / (2 + 4)
    got = pooled_speedups(cells)
    for name, mean, var in (("a", 0.02, var_a), ("b", 0.11, var_b)):
        moderated = (4 * (tau2 + within) + 2 * var) / 6
        half = 2.446912 * math.sqrt(moderated / 3)  # t(97.5 %, 6 df)
        assert math.log(got[name].value) == pytest.approx(mean)
        assert math.log(got[name].ci_low) == pytest.approx(mean - half, abs=1e-7)
        assert math.log(got[name].ci_high) == pytest.approx(mean + half, abs=1e-7)
        assert (got[name].df, got[name].rounds) == (6, 3)


def test_a_single_round_is_widened_by_the_floor():
    got = pooled_speedups({"x": [estimate(0.03, 0.004)]}, floor=0.01)["x"]
    half = 2.776445 * math.sqrt(0.01**2 + 0.004**2)  # t(97.5 %, 4 df)
    assert math.log(got.ci_high) == pytest.approx(0.03 + half, abs=1e-7)
    default = pooled_speedups({"x": [estimate(0.03, 0.004)]})["x"]
    assert default.se_log == pytest.approx(math.hypot(DEFAULT_PROCESS_SD, 0.004))
    assert default.half_width > got.half_width > estimate(0.03, 0.004).half_width


def test_rounds_that_agree_by_chance_are_not_narrower_than_their_own_errors():
    same = {"x": [estimate(0.05, 0.02)] * 3}
    got = pooled_speedups(same, floor=0.0)["x"]
    assert got.se_log == pytest.approx(0.02 / math.sqrt(3))
    assert got.df == 6


def test_a_cell_whose_rounds_disagree_wildly_keeps_its_noise_to_itself():
    quiet = {f"q{i}": [estimate(x, 0.005) for x in (-0.01, 0.0, 0.01)] for i in range(4)}
    wild = [estimate(x, 0.005) for x in (-0.3, 0.0, 0.3)]
    alone, mixed = pooled_speedups(quiet), pooled_speedups({**quiet, "wild": wild})
    assert mixed["q0"].half_width == pytest.approx(alone["q0"].half_width, rel=1e-9)
    half = 4.302653 * 0.3 / math.sqrt(3)
    assert math.log(mixed["wild"].ci_high) == pytest.approx(half, abs=1e-6)
    assert verdict(mixed["wild"]) == "too noisy"


def test_a_noisier_cell_is_wider():
    steady = {f"s{i}": [estimate(x, 0.005) for x in (-0.01, 0.0, 0.01)] for i in range(4)}
    got = pooled_speedups({**steady, "loose": [estimate(x, 0.005) for x in (-0.03, 0.0, 0.03)]})
    assert got["loose"].half_width > 1.2 * got["s0"].half_width


def test_rounds_of_one_quad_each_have_the_plain_t_interval_and_one_such_round_has_none():
    def quad(x):
        return Estimate(math.exp(x), math.nan, math.nan, 1)

    got = pooled_speedups({"one": [quad(0.5)], "two": [quad(0.0), quad(0.02)], "x": [estimate(0, 0.01)] * 2})
    assert got["one"].value == pytest.approx(math.exp(0.5))
    assert math.isnan(got["one"].ci_low)
    assert verdict(got["one"]) == "too noisy"
    assert math.log(got["two"].ci_high) == pytest.approx(0.01 + 12.7062 * 0.01, abs=1e-5)
    assert got["x"].half_width == pooled_speedups({"x": [estimate(0, 0.01)] * 2})["x"].half_width


def test_cells_without_rounds_are_left_out_and_bad_floors_refused():
    assert pooled_speedups({}) == {}
    assert list(pooled_speedups({"a": [], "b": [estimate(0, 0.01)]})) == ["b"]
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="floor"):
            pooled_speedups({"b": [estimate(0, 0.01)]}, floor=bad)


# --- floor and verdict -----------------------------------------------------------------------------------


def test_floor_of_null_processes_by_hand():
    """Constant series: no noise within, so the variance between processes is that of 0, 0.01, 0.02."""
    floor = noise_floor([[math.exp(x)] * 8 for x in (0.0, 0.01, 0.02)])
    assert floor.process_sd_raw == pytest.approx(0.01)
    assert floor.process_sd == pytest.approx(math.sqrt((2 * 0.015**2 + 2 * 0.01**2) / 4))
    assert (floor.df, floor.processes, floor.quads) == (4, 3, 8)
    assert floor.bias == pytest.approx(0.01)
    assert floor.margin == pytest.approx(math.log(1.005))  # 0.01 ± 4.3 · 0.01 / √3 is not proven
    biased = noise_floor([[math.exp(x)] * 8 for x in (0.020, 0.021, 0.022, 0.019, 0.018)])
    assert biased.margin == pytest.approx(0.02 - 2.776445 * 0.00158114 / math.sqrt(5), abs=1e-6)


def test_floor_without_two_null_processes_is_the_default():
    for nulls in ([], [[1.0] * 10], [[1.0], [1.01]]):
        floor = noise_floor(nulls)
        assert floor.process_sd == DEFAULT_PROCESS_SD
        assert all(math.isnan(x) for x in (floor.process_sd_raw, floor.half_width, floor.detectable()))


def test_detectable_difference_shrinks_with_rounds_and_is_found_in_four_of_five():
    rng = np.random.default_rng(0)
    floor = noise_floor([np.exp(rng.normal(rng.normal(0, 0.01), 0.03, 40)) for _ in range(20)])
    assert floor.detectable(1) > floor.detectable(3) > floor.detectable(10) > 0.005
    within = math.log1p(floor.half_width) / reference.t.ppf(0.975, floor.quads - 1)
    effect = math.log1p(floor.detectable(3))
    logs = rng.normal(effect, math.hypot(floor.process_sd, within), (400, 3))
    cells = [pooled_speedups({"x": [estimate(x, within) for x in row]}, floor)["x"] for row in logs]
    found = [verdict(cell, floor) == "faster" for cell in cells]
    assert 0.72 <= np.mean(found) <= 0.88
    with pytest.raises(ValueError, match="rounds"):
        floor.detectable(0)


def test_half_width_shrinks_with_time_as_one_over_root_n():
    rng = np.random.default_rng(1)
    nulls = [np.exp(rng.normal(0, 0.03, 192)) for _ in range(10)]
    rows = half_width_vs_time(nulls, quad_s=0.3, floor=noise_floor(nulls))
    assert [row.quads for row in rows] == [6, 12, 24, 48, 96, 192]
    assert [row.windows for row in rows] == [320, 160, 80, 40, 20, 10]
    assert [row.seconds for row in rows] == pytest.approx([1.8, 3.6, 7.2, 14.4, 28.8, 57.6])
    assert rows[5].within / rows[3].within == pytest.approx(0.5, abs=0.12)
    assert rows[5].within == pytest.approx(1.96 * 1.2533 * 0.03 / math.sqrt(192), rel=0.25)
    assert rows[0].pooled > rows[5].pooled > rows[5].within  # processes differ: more time has a limit
    assert half_width_vs_time([[1.0] * 5], 0.3, Floor()) == []
    assert half_width_vs_time([], 0.3, Floor()) == []


def pooled(log_ratio: float, se: float, df: float = 6) -> Pooled:
    half = reference.t.ppf(0.975, df) * se
    low, value, high = (math.exp(log_ratio + x) for x in (-half, 0, half))
    return Pooled(value=value, ci_low=low, ci_high=high, se_log=se, df=df, rounds=3)


@pytest.mark.parametrize(
    ("log_ratio", "se", "words"),
    [
        (0.030, 0.009, "faster"),  # t(99 %, 6 df) = 3.143: 0.0283
        (0.027, 0.009, "within noise"),  # 95 % interval clear of 1 (0.0220), 98 % not
        (0.0060, 0.0001, "faster"),
        (0.0050, 0.0001, "within noise"),  # sure, and smaller than the margin
        (0.0, 0.009, "within noise"),
        (0.0, 0.05, "too noisy"),  # half-width 13 %
        (0.7, 0.05, "faster"),  # as noisy, and clear
    ],
)
def test_verdicts_on_both_sides(log_ratio, se, words):
    assert verdict(pooled(log_ratio, se)) == words
    other = {"faster": "slower"}.get(words, words)
    assert verdict(pooled(-log_ratio, se)) == other
    assert {words, other} <= set(VERDICTS)


def test_a_proven_bias_of_the_machine_raises_the_margin():
    small = pooled(0.015, 0.001)
    assert verdict(small) == "faster"
    assert verdict(small, Floor(margin=0.02)) == "within noise"
