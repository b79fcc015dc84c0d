"""Coverage of the intervals in simulation, and the alternatives they were chosen over.

The noise model (``step_times``): log step time = drift + step noise + preemption, where the drift is a
sinusoid of amplitude 20 % with half to three periods a run plus a random walk that ends 10 % away (sd); the
step noise is AR(1) with correlation 0.3, Student-t innovations (5 df) and marginal sd ``step_sd``; and 2 %
of the steps lose an exponential 30 % more. Each process shifts all its ratios by one normal offset of sd
``process_sd``. Steps run A B B A.

    python tests/test_stats_coverage.py     # prints the tables of docs/statistics.md, about a minute
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import special
from scipy import stats as reference
from scipy.signal import lfilter

from tinydit_ray.bench.stats import Estimate, abba_ratios, ci_reached, round_speedup
from tinydit_ray.bench.verdict import noise_floor, pooled_speedups, verdict

pytestmark = pytest.mark.slow  # thousands of simulated sweeps


def step_times(
    rng, shape, quads, log_speedup=0.0, process_sd=0.0,
    *, step_sd=0.03, ar=0.3, drift=0.2, bursts=0.02, tail=0,
):  # fmt: skip
    """Cell and control step times in ms, each (*shape, 2 · quads), of independent processes."""
    steps = 4 * quads
    run = np.arange(steps) / steps
    phase, periods = rng.uniform(0, 2 * np.pi, (*shape, 1)), rng.uniform(0.5, 3, (*shape, 1))
    level = drift * np.sin(2 * np.pi * periods * run + phase)
    level += np.cumsum(rng.normal(0, drift / 2 / np.sqrt(steps), (*shape, steps)), axis=-1)
    noise = rng.standard_t(5, (*shape, steps)) * math.sqrt(3 / 5)
    noise = lfilter([math.sqrt(1 - ar**2)], [1, -ar], noise, axis=-1)
    lost = (rng.random((*shape, steps)) < bursts) * rng.exponential(0.3, (*shape, steps))
    ms = 100 * np.exp(level + step_sd * noise + lost).reshape(*shape, quads, 4)
    offset = rng.standard_t(tail, shape) / math.sqrt(tail / (tail - 2)) if tail else rng.normal(0, 1, shape)
    offset = offset * process_sd + log_speedup
    cell = ms[..., [0, 3]] / np.exp(offset)[..., None, None]
    return cell.reshape(*shape, -1), ms[..., [1, 2]].reshape(*shape, -1)


def rounds_of(cell, control):
    """Estimates of every process, nested as ``shape``."""
    if cell.ndim == 1:
        return round_speedup(abba_ratios(cell, control))
    return [rounds_of(a, b) for a, b in zip(cell, control, strict=True)]


@functools.cache
def sweeps(rounds, cells=5, quads=10, count=1000, process_sd=0.01, noisy=2.0, seed=0, **model):
    """``count`` sweeps of null cells as nested lists of Estimate; cell 0 has ``noisy`` times the spread."""
    rng = np.random.default_rng(seed)
    spread = np.full((cells, 1), process_sd)
    spread[0] *= noisy
    return rounds_of(*step_times(rng, (count, cells, rounds), quads, process_sd=spread, **model))


def moderated(sweep, floor=None):
    return pooled_speedups({str(i): cell for i, cell in enumerate(sweep)}, floor)


def covered(pooled, truth=1.0):
    return pooled.ci_low <= truth <= pooled.ci_high


def named_winners(cells):
    """How many cells of each sweep are called faster or slower."""
    words = [[verdict(cell) for cell in moderated(sweep).values()] for sweep in cells]
    return np.array([row.count("faster") + row.count("slower") for row in words])


def coverage(rounds, floor=None, **model):
    """(coverage of all cells, of the noisy cell 0, median half-width of the others)"""
    results = [list(moderated(sweep, floor).values()) for sweep in sweeps(rounds, **model)]
    hits = np.array([[covered(cell) for cell in sweep] for sweep in results])
    width = np.median([[cell.half_width for cell in sweep[1:] or sweep] for sweep in results])
    return hits.mean(), hits[:, 0].mean(), width


# --- one process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quads", [2, 4, 6, 10, 30, 100])
def test_the_interval_of_one_process_covers_the_truth_when_processes_do_not_differ(quads):
    rng = np.random.default_rng(quads)
    runs = rounds_of(*step_times(rng, (1000,), quads))
    assert np.mean([covered(run) for run in runs]) >= 0.93


def test_neighbouring_quads_are_uncorrelated_so_blocks_are_not_needed():
    cell, control = step_times(np.random.default_rng(0), (400,), 60, ar=0.8)
    quads = np.log([abba_ratios(a, b) for a, b in zip(cell, control, strict=True)])
    assert abs(np.corrcoef(quads[:, :-1].ravel(), quads[:, 1:].ravel())[0, 1]) < 0.03
    steps = np.log(cell)
    assert np.corrcoef(steps[:, :-1].ravel(), steps[:, 1:].ravel())[0, 1] > 0.8  # the drift, in raw times


def test_stopping_when_the_interval_is_narrow_costs_little_coverage():
    rng = np.random.default_rng(3)
    hits, stops = [], []
    for cell, control in zip(*step_times(rng, (400,), 200), strict=True):
        ratios = abba_ratios(cell, control)
        stop = next((n for n in range(10, 201, 5) if ci_reached(ratios[:n], 0.012)), 200)
        hits.append(covered(round_speedup(ratios[:stop])))
        stops.append(stop)
    assert 10 < np.median(stops) < 60
    assert np.mean(hits) >= 0.88


# --- several processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_pooled_interval_covers_the_truth_and_so_does_a_noisier_cells(rounds):
    everywhere, noisy, width = coverage(rounds)
    assert everywhere >= 0.93
    assert noisy >= 0.90
    assert width <= {2: 0.035, 3: 0.03, 5: 0.02}[rounds]


def test_a_single_round_covers_with_the_floor_and_not_without():
    alone = [run for sweep in sweeps(1) for cell in sweep for run in cell]
    assert np.mean([covered(run) for run in alone]) < 0.88
    for floor in (None, 0.01):
        everywhere, noisy, width = coverage(1, floor)
        assert everywhere >= 0.93
        assert noisy >= 0.90
        assert width <= 0.06


def test_a_cell_alone_in_its_sweep_covers_up_to_the_default_spread():
    for rounds in (2, 3):
        everywhere, _, _ = coverage(rounds, cells=1, noisy=1.0, process_sd=0.015)
        assert everywhere >= 0.93


def test_ratios_that_wander_within_a_process_are_covered_by_the_spread_between_processes():
    ratios = wandering(np.random.default_rng(4), 200 * 5 * 3, 30).reshape(200, 5, 3, 30)
    runs = [[[round_speedup(run) for run in cell] for cell in sweep] for sweep in ratios]
    one = [covered(run) for sweep in runs for cell in sweep for run in cell]
    every = [covered(cell) for sweep in runs for cell in moderated(sweep, 0.0).values()]
    assert np.mean(one) < 0.80
    assert np.mean(every) >= 0.93


def test_a_planted_3_percent_under_20_percent_drift_is_found_and_nothing_is_not():
    rng = np.random.default_rng(5)
    names = ("nothing", "planted")
    truths = np.log([[1.0], [1.03]])
    found = {name: [] for name in names}
    covers = []
    for _ in range(60):
        runs = rounds_of(*step_times(rng, (2, 3), 100, log_speedup=truths, process_sd=0.005))
        pooled = pooled_speedups(dict(zip(names, runs, strict=True)))
        covers += [covered(pooled["planted"], 1.03), covered(pooled["nothing"])]
        for name in names:
            found[name].append(verdict(pooled[name]))
    assert found["planted"].count("faster") >= 50
    assert set(found["nothing"]) == {"within noise"}
    assert np.mean(covers) >= 0.93


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_null_sweep_of_twenty_names_at_most_one_winner(rounds):
    named = named_winners(sweeps(rounds, cells=20, noisy=1.0, count=200))
    assert np.mean(named <= 1) >= 0.95
    assert np.mean(named) / 20 <= 0.02


@pytest.mark.parametrize("model", [{"step_sd": 0.10}, {"quads": 60, "process_sd": 0.003}, {"tail": 3}])
def test_null_sweeps_of_other_machines(model):
    """A very noisy machine, a quiet one, and one whose processes have heavy-tailed offsets."""
    named = named_winners(sweeps(3, cells=20, noisy=1.0, count=100, **model))
    assert np.mean(named <= 1) >= 0.90
    assert np.mean(named) / 20 <= 0.025


def test_the_floor_of_a_null_sweep_is_the_machines():
    rng = np.random.default_rng(9)
    cell, control = step_times(rng, (200, 20), 40, process_sd=0.01)
    floors = [
        noise_floor([abba_ratios(a, b) for a, b in zip(*sweep, strict=True)])
        for sweep in zip(cell[:40], control[:40], strict=True)
    ]
    assert np.median([floor.process_sd for floor in floors]) == pytest.approx(0.0106, abs=0.001)
    assert max(floor.margin for floor in floors) < 0.012


# --- alternatives that were tried ------------------------------------------------------------------------


def arrays(cells):
    """Log ratios and standard errors, both (sweeps, cells, rounds)."""
    logs = np.array([[[run.log_ratio for run in cell] for cell in sweep] for sweep in cells])
    errors = np.array([[[run.se_log for run in cell] for cell in sweep] for sweep in cells])
    return logs, errors


def t_half(df, se):
    return special.stdtrit(df, 0.975) * se


def limma_prior(s2, df):
    """Prior degrees of freedom and variance of each sweep by moments of log variances (Smyth 2004, section
    6.2), (sweeps, 1) each."""
    z = np.log(np.maximum(s2, 1e-12)) - special.digamma(df / 2) + math.log(df / 2)
    mean, extra = z.mean(-1, keepdims=True), z.var(-1, ddof=1, keepdims=True) - special.polygamma(1, df / 2)
    grid = np.geomspace(0.05, 1e4, 4000)  # trigamma is monotone: invert it by a table
    prior = 2 * np.interp(-extra, -special.polygamma(1, grid), grid)
    prior = np.where(extra > 0, prior, 1e6)
    return prior, np.exp(mean + special.digamma(prior / 2) - np.log(prior / 2))


def alternatives(cells):
    """name -> (centre, half-width on the log scale) of every cell, (sweeps, cells) each."""
    logs, errors = arrays(cells)
    _, count, rounds = logs.shape
    mean, df, within = logs.mean(-1), rounds - 1, (errors**2).mean(-1)
    s2 = logs.var(-1, ddof=1)
    prior, prior_s2 = limma_prior(s2, df)
    estimated = (prior * prior_s2 + df * s2) / (prior + df)
    rng = np.random.default_rng(0)
    picks = rng.integers(0, rounds, (2000, rounds))
    draws = logs[..., picks].mean(-1)
    low, high = np.quantile(draws, [0.025, 0.975], axis=-1)
    ours = [list(moderated(sweep).values()) for sweep in cells]
    ours_half = np.array([[math.log1p(cell.half_width) for cell in sweep] for sweep in ours])
    return {
        "errors within only": (mean, 1.96 * np.sqrt(within / rounds)),
        "bootstrap over rounds": ((low + high) / 2, (high - low) / 2),
        "plain t": (mean, t_half(df, np.sqrt(s2 / rounds))),
        "pooled t": (mean, t_half(count * df, np.sqrt(s2.mean(-1, keepdims=True) / rounds)) + 0 * mean),
        "moderated t, prior estimated": (
            mean,
            t_half(np.minimum(prior + df, count * df), np.sqrt(estimated / rounds)),
        ),
        "moderated t, prior of 4 df": (mean, ours_half),
        "the same around the median": (np.median(logs, -1), ours_half),
    }


def figures(centre, half):
    """(coverage of all, of cell 0, median half-width of the others)"""
    hit = np.abs(centre) <= half
    return hit.mean(), hit[:, 0].mean(), float(np.median(half[:, 1:]))


def test_the_alternatives_are_too_narrow_or_too_wide():
    got = {name: figures(*value) for name, value in alternatives(sweeps(3)).items()}
    ours = got["moderated t, prior of 4 df"]
    assert got["errors within only"][0] < 0.88
    assert got["bootstrap over rounds"][0] < 0.88
    assert got["pooled t"][1] < 0.90
    assert got["plain t"][2] > 1.3 * ours[2]


def blocks_interval(ratios, rng, length):
    """Moving-block bootstrap percentile interval of the median (Künsch 1989), as an Estimate."""
    logs = np.log(ratios)
    n = len(logs)
    starts = rng.integers(0, n - length + 1, (500, -(-n // length), 1))
    medians = np.median(logs[(starts + np.arange(length)).reshape(500, -1)[:, :n]], axis=-1)
    return Estimate(math.exp(np.median(logs)), *np.exp(np.quantile(medians, [0.025, 0.975])), n)


def bca_interval(ratios):
    got = reference.bootstrap((np.log(ratios),), np.median, n_resamples=500, method="BCa", rng=0)
    return Estimate(1.0, *np.exp(got.confidence_interval), len(ratios))


def wandering(rng, count, quads, phi=0.6, sd=0.03):
    """Ratios that themselves wander (AR(1) between quads): what the ABBA order cannot cancel."""
    noise = rng.normal(0, sd * math.sqrt(1 - phi**2), (count, quads + 50))
    return np.exp(lfilter([1], [1, -phi], noise, axis=-1)[:, 50:])


def cell_text(hits, half_widths):
    return f"{np.mean(hits):.3f} ±{100 * np.median(half_widths):.2f} %"


def one_process_table():
    rng = np.random.default_rng(1)
    print("| ratios | quads | this interval | moving blocks | BCa | Student t of the mean |")
    for name in ("the model", "wandering"):
        for quads in (6, 10, 30, 100, 300):
            count = 1000
            if name == "wandering":
                ratios = wandering(rng, count, quads)
            else:
                ratios = [abba_ratios(a, b) for a, b in zip(*step_times(rng, (count,), quads), strict=True)]
            logs = np.log(ratios)
            columns = {
                "ours": [round_speedup(run) for run in ratios],
                "blocks": [blocks_interval(run, rng, max(2, round(quads ** (1 / 3)))) for run in ratios],
                "bca": [bca_interval(run) for run in ratios[:400]],
            }
            cells = [
                cell_text([covered(run) for run in runs], [run.half_width for run in runs])
                for runs in columns.values()
            ]
            half = t_half(quads - 1, logs.std(-1, ddof=1) / math.sqrt(quads))
            cells.append(cell_text(np.abs(logs.mean(-1)) <= half, half))
            print(f"| {name} | {quads} | {' | '.join(cells)} |")


def pooled_table():
    print("| interval | R | all | noisy | half-width | x20: noisy | x20: others' half-width |")
    for rounds in (2, 3, 5):
        wild = alternatives(sweeps(rounds, noisy=20.0))
        for name, value in alternatives(sweeps(rounds)).items():
            everywhere, noisy, width = figures(*value)
            _, noisy20, width20 = figures(*wild[name])
            print(
                f"| {name} | {rounds} | {everywhere:.3f} | {noisy:.3f} | {100 * width:.2f} % |"
                f" {noisy20:.3f} | {100 * width20:.2f} % |"
            )
    print("| single round | floor | all | noisy | half-width |")
    for floor in (None, 0.01):
        everywhere, noisy, width = coverage(1, floor)
        print(f"| | {floor} | {everywhere:.3f} | {noisy:.3f} | {100 * width:.2f} % |")


def verdict_table():
    print("| R | named per null | sweeps of 20 with at most one | 3 % found |")
    for rounds in (1, 2, 3, 5):
        named = named_winners(sweeps(rounds, cells=20, noisy=1.0, count=1000))
        rng = np.random.default_rng(7)
        planted = rounds_of(*step_times(rng, (300, 5, rounds), 40, math.log(1.03), process_sd=0.01))
        found = np.mean([[verdict(c) == "faster" for c in moderated(sweep).values()] for sweep in planted])
        print(f"| {rounds} | {100 * named.mean() / 20:.2f} % | {np.mean(named <= 1):.3f} | {found:.2f} |")


if __name__ == "__main__":
    one_process_table()
    pooled_table()
    verdict_table()
