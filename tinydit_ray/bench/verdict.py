"""From rounds in several processes to one interval per cell and a verdict in words.

Two equal models in one process differ by where their memory lies, so an interval from one process is too
narrow. Model, for cell c and round r, on the log scale (``docs/statistics.md``):

    log ratio(c, r) = log speed-up(c) + process offset(c, r) + timing noise(c, r)

with sd τ between processes and the known standard error within. A few rounds tell τ of one cell badly
and of a whole sweep well, so each cell's variance is moderated by the sweep's (Smyth 2004, limma).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from tinydit_ray.bench.stats import (
    LEVEL,
    MIN_ORDER_QUADS,
    Estimate,
    Floats,
    half_width,
    positive_times,
    round_speedup,
    t_quantile,
)

# sd between processes of a machine that has not been measured: the upper end of the 0.5–1.5 % seen
# when two equal models are timed in many processes. It counts as much as 3 null processes would.
DEFAULT_PROCESS_SD = 0.015
DEFAULT_DF = 2.0
# Weight of the sweep's variance in each cell's, in degrees of freedom. At 4 a cell with twice the others'
# spread is still covered in 92 % of sweeps, and 3 rounds cost 2.4 σ instead of 4.3 σ.
PRIOR_DF = 4.0
OUTLIER_P = 0.01  # a cell whose rounds disagree more than this F-test allows neither lends nor borrows

VERDICTS = ("faster", "slower", "within noise", "too noisy")
VERDICT_LEVEL = 0.98  # of the test behind faster / slower: at most 2 nulls in 100, 0.4 in 20
MARGIN = math.log(1.005)  # differences below 0.5 % are not told from the protocol's own asymmetries
TOO_NOISY = 0.10  # half-width above which "within noise" would say nothing
POWER = 0.80


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a machine shows when the control is compared with itself. Log scale: 0.01 is 1 %."""

    process_sd: float = DEFAULT_PROCESS_SD  # sd between processes, drawn towards the default
    process_sd_raw: float = math.nan  # the same, from the null processes alone
    df: float = DEFAULT_DF  # degrees of freedom of process_sd
    bias: float = 0.0  # mean null log ratio
    margin: float = MARGIN  # what a difference must exceed: 0.5 %, or the part of the bias beyond chance
    half_width: float = math.nan  # median within-process half-width of the nulls, a fraction
    quads: float = math.nan  # median quads per null process
    processes: int = 0

    def detectable(self, rounds: int = 3) -> float:
        """Smallest true speed-up, less 1, that ``rounds`` rounds timed like the nulls would call faster with
        a probability of 80 %: the verdict's threshold plus t(80 %) standard errors. nan when not measured."""
        if rounds < 1:
            raise ValueError(f"rounds {rounds} is below 1")
        within = math.log1p(self.half_width) / t_quantile(max(1.0, self.quads - 1))
        se = math.sqrt((self.process_sd**2 + within**2) / rounds)
        df = PRIOR_DF + rounds - 1
        return math.expm1(_threshold(se, df, self.margin) + se * float(special.stdtrit(df, POWER)))


def noise_floor(null_ratios: Sequence[ArrayLike]) -> Floor:
    """The floor from null comparisons (control's own cell against the control), one series of quad ratios
    per process, repeats and rounds alike.

    Variance between processes = variance of the round estimates − mean squared standard error
    (one-way random effects by moments; Searle, Casella & McCulloch 1992, chapter 3). A few processes tell
    it badly, so the default enters with 2 degrees of freedom. The margin is the larger of 0.5 % and what
    remains of the mean null ratio after its own 95 % interval.
    """
    estimates = [round_speedup(ratios) for ratios in null_ratios]
    estimates = [estimate for estimate in estimates if estimate.n > 1]
    if len(estimates) < 2:
        return Floor(processes=len(estimates))
    logs = np.array([estimate.log_ratio for estimate in estimates])
    within = float(np.mean([estimate.se_log**2 for estimate in estimates]))
    df, total = len(logs) - 1, float(np.var(logs, ddof=1))
    moderated = (DEFAULT_DF * DEFAULT_PROCESS_SD**2 + df * (total - within)) / (DEFAULT_DF + df)
    bias = float(np.mean(logs))
    proven = abs(bias) - t_quantile(df) * math.sqrt(max(total, within) / len(logs))
    return Floor(
        process_sd=math.sqrt(max(0.0, moderated)),
        process_sd_raw=math.sqrt(max(0.0, total - within)),
        df=DEFAULT_DF + df,
        bias=bias,
        margin=max(MARGIN, proven),
        half_width=float(np.median([estimate.half_width for estimate in estimates])),
        quads=float(np.median([estimate.n for estimate in estimates])),
        processes=len(logs),
    )


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """Half-widths after some seconds of timing per process, as fractions."""

    seconds: float
    quads: int
    within: float  # median of one process's interval
    pooled: float  # of the pooled interval over ``rounds`` such processes
    windows: int  # stretches of the null runs behind the median


def half_width_vs_time(
    null_ratios: Sequence[ArrayLike], quad_s: float, floor: Floor, rounds: int = 3
) -> list[TimeRow]:
    """How the half-width shrinks with seconds of timing per process, from stretches of the null runs.

    Quads double from row to row (6, 12, 24, …; the last is the longest run); each row takes the median
    over all stretches of consecutive quads that do not overlap. ``quad_s`` is what one quad (two steps of
    the cell and two of the control) takes. ``pooled`` adds the sd between processes and so has a limit.
    """
    if not (quad_s > 0 and rounds >= 1):
        raise ValueError(f"quad_s {quad_s} must be above 0 and rounds {rounds} at least 1")
    series = [positive_times(ratios, "null_ratios") for ratios in null_ratios]
    longest = max((run.size for run in series), default=0)
    rows = []
    for quads in _doubling(MIN_ORDER_QUADS, longest):
        windows = [
            round_speedup(run[start : start + quads])
            for run in series
            for start in range(0, run.size - quads + 1, quads)
        ]
        se2 = float(np.median([window.se_log for window in windows])) ** 2
        pooled = t_quantile(PRIOR_DF + rounds - 1) * math.sqrt((floor.process_sd**2 + se2) / rounds)
        within = float(np.median([window.half_width for window in windows]))
        row = TimeRow(
            seconds=quads * quad_s,
            quads=quads,
            within=within,
            pooled=math.expm1(pooled),
            windows=len(windows),
        )
        rows.append(row)
    return rows


def _doubling(first: int, last: int) -> list[int]:
    """first, 2·first, … below ``last``, then ``last``; empty when even ``first`` is beyond it."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last] if sizes or first == last else []


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Speed-up of a cell over its rounds, control time ÷ cell time, with a 95 % interval that covers other
    processes on the same machine. (nan, nan) where nothing is known of the spread."""

    value: float
    ci_low: float
    ci_high: float
    se_log: float  # standard error of log(value)
    df: float  # degrees of freedom of se_log
    rounds: int

    @property
    def half_width(self) -> float:
        return half_width(self.ci_low, self.ci_high)


def pooled_speedups(
    rounds_by_cell: Mapping[str, Sequence[Estimate]], floor: Floor | float | None = None
) -> dict[str, Pooled]:
    """Pool each cell's rounds: exp of the mean log ratio, with a moderated t interval.

    For cell c with R rounds, d = R − 1, s² the variance of its log ratios and w the mean squared standard
    error within its processes:

        τ²  = (ν·floor² + Σ d·(s² − w)) / (ν + Σ d)      over all cells of the sweep, at least 0
        s̃²  = max(w, (4·(τ² + w) + d·s²) / (4 + d))      Smyth 2004, SAGMB 3:1:3, section 3, prior of 4 df
        log value ± t(4 + d) · s̃ / √R

    A single round has d = 0: its own standard error widened by the machine's τ. ``floor`` is a measured
    ``Floor`` (ν = its df), a sd between processes, or None for the default 1.5 % (ν = 2). A cell whose
    s² is larger than the others allow (F-test, 1 %) leaves the pool and gets the plain t interval
    (after Phipson et al. 2016, Ann. Appl. Stat. 10:2). A cell with no spread in any of its processes (one
    quad each) gets the plain t too. Cells without rounds are left out.
    """
    prior = _as_floor(floor)
    cells = {name: list(rounds) for name, rounds in rounds_by_cell.items() if len(rounds)}
    if not cells:
        return {}
    logs = [np.array([estimate.log_ratio for estimate in rounds]) for rounds in cells.values()]
    count = np.array([len(values) for values in logs])
    df = count - 1.0
    own = np.array([float(np.var(values, ddof=1)) if len(values) > 1 else 0.0 for values in logs])
    within = np.array([_mean_known([e.se_log**2 for e in rounds]) for rounds in cells.values()])
    tau2, member = _pool(own, within, df, prior)
    with np.errstate(invalid="ignore"):
        moderated = (PRIOR_DF * (tau2 + within) + df * own) / (PRIOR_DF + df)
    # outside the pool a single round (own spread unknown) has no interval
    alone = np.where(df > 0, np.fmax(own, within), np.nan)
    variance = np.where(member, np.fmax(within, moderated), alone)
    se = np.sqrt(variance / count)
    total_df = np.where(member, PRIOR_DF + df, df)
    centres = [float(np.mean(values)) for values in logs]
    rows = zip(cells, centres, se.tolist(), total_df.tolist(), count.tolist(), strict=True)
    return {name: _pooled(centre, error, freedom, n) for name, centre, error, freedom, n in rows}


def _pooled(centre: float, se: float, df: float, rounds: int) -> Pooled:
    half = t_quantile(df) * se if df > 0 else math.nan
    value, low, high = (math.exp(x) for x in (centre, centre - half, centre + half))
    return Pooled(value=value, ci_low=low, ci_high=high, se_log=se, df=df, rounds=rounds)


def _as_floor(floor: Floor | float | None) -> Floor:
    if floor is None:
        return Floor()
    if isinstance(floor, Floor):
        return floor
    if not 0 <= floor < math.inf:
        raise ValueError(f"floor: {floor} is not a sd between processes (0.01 is 1 %)")
    return Floor(process_sd=float(floor))


def _mean_known(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _pool(own: Floats, within: Floats, df: Floats, prior: Floor) -> tuple[float, np.ndarray]:
    """Variance between processes over the sweep, and which cells belong to the pool.

    Members are tested one at a time, the least plausible first, against the prior and all other members.
    """
    member = ~np.isnan(within)
    excess = np.where(member, own - within, 0.0)
    while True:
        weight = df * member
        total_df = prior.df + weight.sum()
        total = prior.df * prior.process_sd**2 + float(weight @ excess)
        testable = np.flatnonzero(weight > 0)
        if not testable.size:
            break
        d, rest_df = df[testable], total_df - df[testable]
        rest = np.maximum(0.0, (total - d * excess[testable]) / rest_df) + within[testable]
        p = special.fdtrc(d, rest_df, own[testable] / np.maximum(rest, np.finfo(float).tiny))
        worst = int(np.argmin(p))
        if p[worst] >= OUTLIER_P:
            break
        member[testable[worst]] = False
    return max(0.0, total / total_df), member


def verdict(pooled: Pooled, floor: Floor | None = None) -> str:
    """``faster``, ``slower``, ``within noise`` or ``too noisy``.

    Faster means that the 98 % interval lies above 1 **and** the 95 % interval above 1 + margin (slower:
    below, alike). The interval already contains the spread between processes, so the floor's sd is not
    added again; the margin (0.5 %, or the proven part of the machine's mean null ratio) stands for what all
    processes share and no interval shows. At 98 % one null in 50 is named by chance: in 20 null comparisons
    at most one is in 94 % of sweeps (binomial), more where the margin counts. Too noisy: not clear of 1
    and the half-width above 10 %, or no interval at all; a large effect stays faster or slower.
    """
    if math.isnan(pooled.ci_low):
        return "too noisy"
    centre = math.log(pooled.value)
    if abs(centre) > _threshold(pooled.se_log, pooled.df, floor.margin if floor else MARGIN):
        return "faster" if centre > 0 else "slower"
    return "too noisy" if pooled.half_width > TOO_NOISY else "within noise"


def _threshold(se: float, df: float, margin: float) -> float:
    """Log difference from which the verdict is faster or slower."""
    return max(t_quantile(df, VERDICT_LEVEL) * se, t_quantile(df, LEVEL) * se + margin)
