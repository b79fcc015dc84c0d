"""Statistics of the paired timing protocol, within one process.

In a round, one-step blocks of the cell (A) and of the control (B) alternate A B B A, A B B A, …
Each quad gives one ratio, control time ÷ cell time: **above 1 the cell is faster**. The median over
quads and its 95 % interval are the round's estimate. ``verdict`` pools rounds of several processes;
``docs/statistics.md`` holds the model, the figures behind the choices and what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Floats: TypeAlias = NDArray[np.float64]

LEVEL = 0.95  # of every interval that is shown
# Below six quads the interval from order statistics is the whole range and yet covers less than 95 %
# (1 - 2^(1-n): 94 % for five, 88 % for four), so Student's t is used there.
MIN_ORDER_QUADS = 6
# Fewer quads can agree by chance; ``--ci`` does not stop on them.
MIN_CI_QUADS = 10


def positive_times(values: ArrayLike, name: str) -> Floats:
    """A 1-D float64 array of finite numbers above zero; ValueError for anything else."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name}: a 1-D series is needed, not shape {array.shape}")
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name}: contains a value that is not finite")
    if np.any(array <= 0):
        raise ValueError(f"{name}: contains a value that is not above zero")
    return array


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Raw step times of one series, in ms. They carry the machine's drift; compare ratios instead."""

    ms_per_step: float  # median
    iqr: float  # 75th less 25th percentile
    p10: float
    p90: float
    n: int


def summarise(step_ms: ArrayLike) -> StepSummary:
    """Median, interquartile range, 10th and 90th percentile of step times in ms.

    Percentiles interpolate linearly between order statistics (Hyndman & Fan 1996, type 7; numpy's default).
    Raises ValueError for an empty series or a time that is not above zero.
    """
    times = positive_times(step_ms, "step_ms")
    if not times.size:
        raise ValueError("step_ms: no timed steps")
    p10, p25, p50, p75, p90 = (float(q) for q in np.percentile(times, (10, 25, 50, 75, 90)))
    return StepSummary(ms_per_step=p50, iqr=p75 - p25, p10=p10, p90=p90, n=times.size)


def abba_ratios(cell_ms: ArrayLike, control_ms: ArrayLike) -> Floats:
    """Ratio (b1 + b2) / (a1 + a2) of each whole quad A B B A, in time order, shape (quads,).

    Both series hold two steps per quad, in the order they ran. A drift that is linear over a quad
    multiplies both sums alike and cancels. Steps beyond the last whole quad are dropped.
    """
    cell, control = positive_times(cell_ms, "cell_ms"), positive_times(control_ms, "control_ms")
    quads = min(cell.size, control.size) // 2
    return control[: 2 * quads].reshape(quads, 2).sum(1) / cell[: 2 * quads].reshape(quads, 2).sum(1)


@dataclass(frozen=True)
class Estimate:
    """Speed-up of one round, control time ÷ cell time, with its within-process 95 % interval.

    The interval says nothing about other processes: see ``verdict.pooled_speedups``. It is (nan, nan)
    for a single quad, which has no spread.
    """

    value: float
    ci_low: float
    ci_high: float
    n: int  # quads

    @classmethod
    def from_columns(
        cls, speedup: float, ci_low: float | None, ci_high: float | None, timed_steps: int
    ) -> Estimate:
        """From a record's ``speedup_vs_control``, its interval (None where unknown) and ``timed_steps``."""
        known = ci_low is not None and ci_high is not None
        low, high = (float(ci_low), float(ci_high)) if known else (math.nan, math.nan)  # type: ignore[arg-type]
        return cls(float(speedup), low, high, int(timed_steps) // 2)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Estimate:
        """Of a record that has a speed-up."""
        ends = (row["speedup_ci_low"], row["speedup_ci_high"])
        return cls.from_columns(row["speedup_vs_control"], *ends, row["timed_steps"] or 0)

    @property
    def log_ratio(self) -> float:
        return math.log(self.value)

    @property
    def half_width(self) -> float:
        """Half of the interval on the log scale, as a fraction: 0.02 is ±2 %. Equal for a speed-up and its
        inverse."""
        return half_width(self.ci_low, self.ci_high)

    @property
    def se_log(self) -> float:
        """Standard error of ``log_ratio`` within the process, as the interval implies it:
        log(high / low) / (2 t), t being Student's 97.5 % quantile with n − 1 degrees of freedom."""
        if self.n < 2 or math.isnan(self.ci_low):
            return math.nan
        return math.log(self.ci_high / self.ci_low) / (2 * t_quantile(self.n - 1))


def half_width(ci_low: float, ci_high: float) -> float:
    """sqrt(high / low) − 1: the interval is value ×/÷ (1 + half-width). nan where the interval is."""
    return math.sqrt(ci_high / ci_low) - 1


def t_quantile(df: float, level: float = LEVEL) -> float:
    """Two-sided Student quantile: |t| stays below it with probability ``level``."""
    return float(special.stdtrit(df, (1 + level) / 2))


def round_speedup(ratios: ArrayLike) -> Estimate:
    """Median of the quad ratios with its 95 % bootstrap percentile interval.

    The bootstrap distribution of a median needs no resampling. A resample's median is at most the k-th
    smallest ratio with the probability that the Beta((n+1)/2, (n+1)/2) distribution gives to [0, k/n]:
    exactly for odd n, closely for even n (Efron 1979, Ann. Statist. 7:1, section 3; Maritz & Jarrett 1978,
    JASA 73:194). So the interval is the sample quantiles (Hazen's, Hyndman & Fan type 5) at that Beta's
    2.5 % and 97.5 %: what resampling converges to, and deterministic. Below six quads: median ×/÷
    exp(t · s / √n), s being the standard deviation of the log ratios. All on the log scale, so that
    swapping cell and control inverts it.

    Quads are resampled one by one, not in blocks: the ABBA order leaves neighbouring ratios uncorrelated,
    and moving blocks covered less (docs/statistics.md).

    Raises ValueError without a quad; one quad has the interval (nan, nan).
    """
    logs = np.sort(np.log(positive_times(ratios, "ratios")))
    if not logs.size:
        raise ValueError("ratios: no whole ABBA quad was timed")
    centre = float(np.median(logs))
    low, high = _log_interval(logs, centre)
    return Estimate(math.exp(centre), math.exp(low), math.exp(high), logs.size)


def _log_interval(logs: Floats, centre: float) -> tuple[float, float]:
    """95 % interval of the median of sorted log ratios."""
    n = logs.size
    if n < 2:
        return math.nan, math.nan
    if n < MIN_ORDER_QUADS:
        half = t_quantile(n - 1) * float(np.std(logs, ddof=1)) / math.sqrt(n)
        return centre - half, centre + half
    p = float(special.betaincinv((n + 1) / 2, (n + 1) / 2, (1 - LEVEL) / 2))
    low, high = np.interp((n * p - 0.5, n * (1 - p) - 0.5), np.arange(n), logs)
    return float(low), float(high)


def ci_reached(ratios: ArrayLike, half_width: float) -> bool:
    """Whether the round's interval is at most ×/÷ (1 + half_width), from ten quads on.

    For ``--ci``; cheap enough (one sort) for once a second between timed blocks. It speaks of this process
    alone: the pooled interval adds what differs between processes and is wider.
    """
    if not half_width > 0:
        raise ValueError(f"half_width {half_width} is not above zero")
    checked = positive_times(ratios, "ratios")
    return checked.size >= MIN_CI_QUADS and round_speedup(checked).half_width <= half_width


def pooled_ms(ms_per_step: Sequence[float]) -> float:
    """Median over rounds of ms per step. It carries the machine's drift; the speed-up does not."""
    times = positive_times(ms_per_step, "ms_per_step")
    if not times.size:
        raise ValueError("ms_per_step: no rounds")
    return float(np.median(times))


def images_per_s(ms_per_step: float, batch_size: int) -> float:
    """Images per second of steps of ``batch_size`` images: 1000 · batch / ms."""
    return 1000.0 * batch_size / _above_zero(ms_per_step, "ms_per_step")


def tflops_per_s(gflops_per_step: float, ms_per_step: float) -> float:
    """10¹² operations per second; 10⁹ operations per ms is the same unit."""
    return gflops_per_step / _above_zero(ms_per_step, "ms_per_step")


def mfu(tflops: float, peak_tflops: float | None) -> float | None:
    """Model FLOPs utilisation, achieved ÷ peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    None where the device's peak is not known.
    """
    return None if peak_tflops is None else tflops / _above_zero(peak_tflops, "peak_tflops")


def break_even_steps(compile_s: float, ms_cell: float, ms_control: float) -> float | None:
    """Steps after which compile time is won back: 1000 · compile_s / (ms_control − ms_cell).

    None when the cell is not faster than the control; 0 when nothing was spent.
    """
    saved = _above_zero(ms_control, "ms_control") - _above_zero(ms_cell, "ms_cell")
    return max(0.0, 1000.0 * compile_s) / saved if saved > 0 else None


def scaling_efficiency(images_per_s_n: float, images_per_s_1: float, workers: int) -> float:
    """Throughput of n workers ÷ (n · throughput of one): 1 is perfect, for weak and strong scaling alike."""
    if workers < 1:
        raise ValueError(f"workers {workers} is below 1")
    return images_per_s_n / (workers * _above_zero(images_per_s_1, "images_per_s_1"))


def _above_zero(value: float, name: str) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: {value} is not a finite number above zero")
    return value
